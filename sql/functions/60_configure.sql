-- CODE. Station 60: settings, and the switch that stops claims.

create or replace function outbox.configure(name text, value text)
    returns text
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_ok boolean;
begin
    if configure.name is null then
        perform outbox._refuse('OB001', 'name must not be null', 'Pass the name of a setting.');
    end if;
    if outbox._value_of(configure.name) is null or configure.name = 'paused' then
        perform outbox._refuse('OB020', 'name is not a setting',
            'Settings are default_exchange, max_body_bytes, max_attempts, retry_base, retry_multiplier, retry_cap, retry_jitter, on_dead, strict_keys, retention, dead_retention, inbox_retention and dedup_window.');
    end if;
    if configure.value is null then
        delete from outbox.setting as s
        where s.name = configure.name;
        return outbox._value_of(configure.name);
    end if;

    begin
        v_ok := case configure.name
            when 'default_exchange' then octet_length(configure.value) between 1 and 255
            when 'on_dead'          then configure.value in ('continue', 'park')
            when 'strict_keys'      then configure.value in ('on', 'off')
            when 'max_body_bytes'   then configure.value::integer between 1048576 and 15728640
            when 'max_attempts'     then configure.value::integer between 1 and 1000000
            when 'retry_multiplier' then configure.value::numeric between 1 and 1000
            when 'retry_jitter'     then configure.value::numeric between 0 and 1
            when 'retry_base'       then configure.value::interval between interval '1 ms' and interval '1 day'
            when 'retry_cap'        then configure.value::interval between interval '1 ms' and interval '30 days'
            when 'dedup_window'     then configure.value::interval between interval '1 s' and interval '365 days'
            when 'retention'        then configure.value in ('delete', 'forever')
                                         or configure.value::interval between interval '0' and interval '100 years'
            else configure.value::interval between interval '0' and interval '100 years'
        end;
    exception
        when data_exception then
            v_ok := false;
    end;
    if not v_ok then
        perform outbox._refuse('OB020', format('value cannot be taken for %s', configure.name),
            'docs/tuning.md lists what each setting takes; null goes back to the default.');
    end if;

    insert into outbox.setting as s (name, value)
    values (configure.name, configure.value)
    on conflict on constraint setting_pkey do update
        set value = excluded.value,
            changed_at = excluded.changed_at,
            changed_by = excluded.changed_by;
    if configure.name = 'retention' then
        perform outbox._make_days();
    end if;
    return configure.value;
end
$function$;

comment on function outbox.configure(text, text) is
    'Changes a setting for all relays and returns its new value; null goes back to the default.';

create or replace function outbox.pause()
    returns void
    language sql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
    insert into outbox.setting (name, value)
    values ('paused', 'on')
    on conflict on constraint setting_pkey do nothing;
$function$;

comment on function outbox.pause() is
    'No relay claims anything until resume(); emits go on and wait.';

create or replace function outbox.resume()
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    delete from outbox.setting as s
    where s.name = 'paused';
    perform pg_notify('outbox', '');
end
$function$;

comment on function outbox.resume() is
    'Ends pause() and wakes the relays.';
