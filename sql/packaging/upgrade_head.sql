-- First in every upgrade, either way: one at a time, from the right version, as the owner, and no long wait for a lock.

do $do$
declare
    v_owner name;
    v_view record;
    v_lock text;
    v_holders text;
begin
    perform pg_advisory_xact_lock(hashtextextended('outbox install', 0));
    if outbox.version() <> '@FROM@' then
        raise exception 'outbox in this database has version %, and this upgrades @FROM@', outbox.version()
            using errcode = 'OB090',
                  hint = 'Take the upgrades from that version on, one after the other.';
    end if;
    perform
        set_config('outbox.kept_role', current_setting('role'), true),
        set_config('outbox.kept_lock_timeout', current_setting('lock_timeout'), true);

    -- What is made now belongs to whom the rest belongs to: functions run with the rights of their owner.
    select r.rolname
    into v_owner
    from pg_namespace as n
    join pg_roles as r
        on r.oid = n.nspowner
    where n.nspname = 'outbox';
    if v_owner <> current_user then
        begin
            perform set_config('role', v_owner, true);
        exception
            when insufficient_privilege then
                raise exception 'not upgraded: outbox belongs to role %, for which role % may not act', v_owner, current_user
                    using errcode = 'OB090',
                          hint = 'Run the upgrade as that role, or as a superuser.';
        end;
    end if;

    -- Whoever comes later queues behind a lock that is waited for, emitters too: do not wait for long. What they need is
    -- locked last.
    if current_setting('lock_timeout') = '0' then
        perform set_config('lock_timeout', '2s', true);
    end if;
    begin
        -- Views are made anew by every upgrade. To lock one would lock its tables; to change nothing about it does not.
        for v_view in
            select c.oid::regclass as name, a.attname as first
            from pg_class as c
            join pg_attribute as a
                on a.attrelid = c.oid
                and a.attnum = 1
            where c.relnamespace = 'outbox'::regnamespace
              and c.relkind = 'v'
        loop
            v_lock := v_view.name;
            execute format('alter view %s alter column %I drop default', v_view.name, v_view.first);
        end loop;
        foreach v_lock in array array[@LOCKS@]
        loop
            execute format('lock table %s mode', v_lock);
        end loop;
    exception
        when lock_not_available then
            select string_agg(distinct l.pid::text, ', ')
            into v_holders
            from pg_locks as l
            join pg_database as d
                on d.oid = l.database
                and d.datname = current_database()
            where l.relation = split_part(v_lock, ' ', 1)::regclass
              and l.granted;
            raise exception 'not upgraded: % is in use%', split_part(v_lock, ' ', 1), coalesce(' by process ' || v_holders, '')
                using errcode = 'OB093',
                      hint = 'Nothing has changed. Try again, or end what runs for long: pg_stat_activity has it by its pid.';
    end;
end
$do$;
