-- For tests in pgTAP: assertions about what was emitted. Not part of the package; on demand, into a test database that
-- has outbox and pgTAP: psql -d DATABASE -f sql/testing/pgtap.sql
-- To remove it: drop schema outbox_test cascade;
\set ON_ERROR_STOP on
\set QUIET on

begin;
set local client_min_messages = warning;

create schema outbox_test;

comment on schema outbox_test is
    'pgTAP assertions about messages that wait in outbox.message, as the current transaction sees them.';

-- pgTAP is found by the caller's path, as its own functions are: nothing is pinned where they are called.

create function outbox_test._matches(routing_key text, payload jsonb, headers jsonb, key text)
    returns setof outbox.message
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select m.*
    from outbox.message as m
    where m.routing_key = _matches.routing_key
      and (_matches.payload is null
           or case when m.content_type ~ '^application/([^;]*\+)?json' then convert_from(m.body, 'UTF8')::jsonb @> _matches.payload end)
      and (_matches.headers is null or coalesce(m.headers, '{}') @> _matches.headers)
      and (_matches.key is null or m.key = _matches.key)
    order by m.id;
$function$;

comment on function outbox_test._matches(text, jsonb, jsonb, text) is
    'The messages of this routing key; payload and headers name what must be in them, null means any.';

create function outbox_test._waiting()
    returns text
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select coalesce(
        string_agg(
            format('    %s: %s%s, %s%s', m.id, m.routing_key, ', key ' || m.key,
                case when m.content_type ~ 'json' then convert_from(m.body, 'UTF8') else encode(m.body, 'hex') end,
                ', headers ' || m.headers::text),
            e'\n' order by m.id
        ),
        '    nothing'
    )
    from outbox.message as m;
$function$;

comment on function outbox_test._waiting() is
    'What waits, one line each, for the diagnosis of a failure.';

create function outbox_test.emitted(
    routing_key text,
    payload     jsonb = null,
    headers     jsonb = null,
    key         text  = null,
    description text  = null
)
    returns text
    language plpgsql
    volatile
as $function$
declare
    v_found boolean := exists (select from outbox_test._matches(emitted.routing_key, emitted.payload, emitted.headers, emitted.key));
begin
    return ok(v_found, coalesce(emitted.description, emitted.routing_key || ' is emitted'))
        || case when v_found then '' else e'\n' || diag(format('emitted so far:%s', e'\n' || outbox_test._waiting())) end;
end
$function$;

comment on function outbox_test.emitted(text, jsonb, jsonb, text, text) is
    'Passes if a message like that waits: payload and headers name what must be in them, null means any.';

create function outbox_test.emitted_count(
    routing_key text,
    count       bigint,
    payload     jsonb = null,
    headers     jsonb = null,
    key         text  = null,
    description text  = null
)
    returns text
    language plpgsql
    volatile
as $function$
declare
    v_count bigint := (
        select pg_catalog.count(*)
        from outbox_test._matches(emitted_count.routing_key, emitted_count.payload, emitted_count.headers, emitted_count.key)
    );
begin
    return is(v_count, emitted_count.count,
            coalesce(emitted_count.description, format('%s is emitted %s times', emitted_count.routing_key, emitted_count.count)))
        || case
            when v_count = emitted_count.count then ''
            else e'\n' || diag(format('emitted so far:%s', e'\n' || outbox_test._waiting()))
        end;
end
$function$;

comment on function outbox_test.emitted_count(text, bigint, jsonb, jsonb, text, text) is
    'Passes if exactly so many messages like that wait.';

create function outbox_test.nothing_emitted(description text = null)
    returns text
    language plpgsql
    volatile
as $function$
declare
    v_none boolean := not exists (select from outbox.message);
begin
    return ok(v_none, coalesce(nothing_emitted.description, 'nothing is emitted'))
        || case when v_none then '' else e'\n' || diag(format('emitted so far:%s', e'\n' || outbox_test._waiting())) end;
end
$function$;

comment on function outbox_test.nothing_emitted(text) is
    'Passes if no message waits.';

commit;
