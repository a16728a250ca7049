-- CODE. What several stations need. Helpers start with _ and are granted to nobody.
--
-- Error codes. Messages name the argument, never its value; the hint says what to do.
--   OB001  an argument is null or missing          OB011  an argument is out of range
--   OB002  an argument is too long or empty        OB012  the token holds lanes already
--   OB003  headers or properties cannot be sent    OB013  arrays of different length
--   OB004  the body is too large                   OB014  unknown reason
--   OB005  eta, delay or expires_in is wrong       OB020  unknown setting, or a value it cannot take
--   OB006  messages is not what emit_many() takes  OB090  installed already, or not as expected
--   OB010  not read committed                      OB091  the server or database is not suitable
--   OB015  the other kind delivers                 OB092  uninstall refused
--   OB016  a notice: messages were put aside       OB093  upgrade refused: a table is in use

create or replace function outbox._refuse(code text, message text, hint text)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    raise exception using errcode = _refuse.code, message = _refuse.message, hint = _refuse.hint;
end
$function$;

comment on function outbox._refuse(text, text, text) is
    'Raises one of the package''s own errors.';

create or replace function outbox._value_of(name text)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return coalesce(
        (select s.value from outbox.setting as s where s.name = _value_of.name),
        case _value_of.name
            when 'default_exchange' then 'outbox'
            when 'max_body_bytes'   then '1048576'
            when 'max_attempts'     then '10'
            when 'retry_base'       then '5 s'
            when 'retry_multiplier' then '2'
            when 'retry_cap'        then '1 h'
            when 'retry_jitter'     then '0.25'
            when 'on_dead'          then 'continue'
            when 'strict_keys'      then 'off'
            when 'retention'        then 'delete'
            when 'dead_retention'   then '30 days'
            when 'inbox_retention'  then '7 days'
            when 'dedup_window'     then '1 h'
            when 'paused'           then 'off'
        end
    );
end
$function$;

comment on function outbox._value_of(text) is
    'Value of a setting: what configure() stored, else its default; null for an unknown name.';

create or replace function outbox._refuse_isolation()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    -- An older snapshot would not see what committed meanwhile, and every decision about lanes is about that.
    perform outbox._refuse('OB010', 'isolation level must be read committed',
        'Run "set session characteristics as transaction isolation level read committed" first.');
end
$function$;

comment on function outbox._refuse_isolation() is
    'Raises: the transaction is not read committed.';

create or replace function outbox._lanes()
    returns setof outbox.lane
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
begin
    return query
    select l.*
    from generate_series(0, 63) as n
    cross join lateral (
        select x.*
        from outbox.lane as x
        where x.lane = n::smallint
        order by x.version desc
        limit 1
    ) as l;
end
$function$;

comment on function outbox._lanes() is
    'The lanes as they are, without walking their dead versions.';

create or replace function outbox._widen(xid bigint)
    returns xid8
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    -- Open transactions lie on both sides of xmax, so the nearest number with these 32 bits is the one that is meant.
    select (x.near + ((_widen.xid - x.near + 2147483648) & 4294967295) - 2147483648)::text::xid8
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as near) as x;
$function$;

comment on function outbox._widen(bigint) is
    'A 32-bit transaction id as xid8.';
