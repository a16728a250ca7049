-- What must exist: the names that people and drivers use. What else exists is judged by 01_conventions.
\ir setup.psql
select no_plan();

-- Tables, and what keeps them from growing without an owner: a primary key each.
select has_table('outbox', name, name)
from unnest(array['archive', 'dead_letter', 'dedup', 'horizon', 'inbox', 'lane', 'message', 'setting']) as name;

select has_pk('outbox', c.relname, c.relname || ' has a primary key')
from pg_class as c
where c.relnamespace = 'outbox'::regnamespace
  and c.relkind = 'r'
order by c.relname;

-- Public functions with their arguments, in order: names and order are API.
select is(
    (
        select pg_get_function_identity_arguments(p.oid) || ' -> ' || pg_get_function_result(p.oid)
        from pg_proc as p
        where p.pronamespace = 'outbox'::regnamespace
          and p.proname = expected.name
    ),
    expected.signature,
    expected.name
)
from (values
    (
        'emit',
        'routing_key text, payload jsonb, key text, headers jsonb, exchange text, eta timestamp with time zone, '
        'delay interval, expires_in interval, dedup_key text, message_id uuid, properties jsonb -> bigint'
    ),
    (
        'claim_batch',
        'token uuid, batch_size integer, lease interval, max_bytes bigint, relay bigint -> SETOF outbox.claimed_message'
    ),
    ('mark_sent', 'token uuid, ids bigint[] -> integer'),
    (
        'mark_failed',
        'token uuid, ids bigint[], errors text[], reasons text[], retry_in interval[], counts boolean, dead boolean -> integer'
    ),
    ('release_batch', 'token uuid -> integer'),
    ('version', ' -> text')
) as expected (name, signature);

-- What a relay reads by name.
select is(
    (
        select array_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod) order by a.attnum)
        from pg_attribute as a
        where a.attrelid = 'outbox.claimed_message'::regclass
          and a.attnum > 0
          and not a.attisdropped
    )::text[],
    array[
        'id bigint', 'message_id uuid', 'exchange text', 'routing_key text', 'key text', 'body bytea', 'content_type text',
        'headers jsonb', 'properties jsonb', 'expires_in interval', 'attempts integer', 'created_at timestamp with time zone'
    ],
    'claimed_message has its attributes, in order'
);

select * from finish();
rollback;
