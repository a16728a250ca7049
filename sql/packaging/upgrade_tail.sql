
-- The transaction may go on: as whom, and how patient, it was before.
do $do$
begin
    perform
        set_config('role', current_setting('outbox.kept_role'), true),
        set_config('lock_timeout', current_setting('outbox.kept_lock_timeout'), true);
end
$do$;
