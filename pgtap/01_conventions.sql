-- The house rules, read from the catalog: each test lists what breaks a rule, and the list must be empty.
-- Exceptions stand below, by name and with their reason.
\ir setup.psql

-- The public API (design: SQL contract). A function that is not here is a helper and starts with an underscore.
create temporary table public_api (name) on commit drop as
select unnest(array[
    -- producer
    'emit', 'emit_bytes', 'emit_many', 'emit_event', 'cancel', 'set_context',
    -- relay
    'hello', 'relay_settings', 'claim_batch', 'mark_sent', 'mark_failed', 'release_batch', 'extend_lease',
    'arm_wakeup', 'disarm_wakeup', 'next_due', 'dead_among',
    -- operator
    'stats', 'configure', 'pause', 'resume', 'version', 'cleanup', 'requeue_dead', 'purge_dead', 'wait_sent',
    'grant_emit', 'grant_relay', 'grant_consume', 'grant_monitor', 'grant_admin',
    'revoke_emit', 'revoke_relay', 'revoke_consume', 'revoke_monitor', 'revoke_admin',
    -- consumer
    'accept'
]);

create temporary table exempt (rule, name, reason) on commit drop as
values
    (
        'what has a time zone ends in _at, and nothing is a timestamp without one', 'lane.leased_until',
        'the end of a span of time, not the moment something happened'
    ),
    (
        'every table has a primary key', 'archive',
        'each partition has its own: a restore of the days would otherwise find the key made already'
    );

create temporary view routine as
select
    p.*,
    p.proname in (select a.name from public_api as a) as public_api,
    p.prorettype = 'trigger'::regtype as is_trigger
from pg_proc as p
where p.pronamespace = 'outbox'::regnamespace;

create temporary view relation as
select c.*
from pg_class as c
where c.relnamespace = 'outbox'::regnamespace;

-- Fails with the names of the offenders.
create function pg_temp.none(rule text, offenders text) returns text language plpgsql as $function$
declare
    v_found text;
begin
    execute format(
        'select string_agg(o.name, '', '' order by o.name) from (%s) as o (name)'
        ' where o.name not in (select e.name from exempt as e where e.rule = %L)',
        offenders, rule
    ) into v_found;
    return is(v_found, null, rule);
end
$function$;

select plan(24);

select cmp_ok((select count(*) from routine), '>', 0::bigint, 'there is something to judge');

-- functions
select pg_temp.none('every function is part of the public API, a helper or a trigger', $$
    select proname from routine where not public_api and proname not like '\_%'
$$);
select pg_temp.none('no overloads', $$
    select proname from routine group by proname having count(*) > 1
$$);
select pg_temp.none('search_path is pinned to pg_catalog, pg_temp, but for the doorbell, which runs under that of emit()', $$
    select proname from routine
    where proname <> '_ring'
      and not coalesce('search_path=pg_catalog, pg_temp' = any (proconfig), false)
$$);
select pg_temp.none('the public API runs with the rights of the owner', $$
    select proname from routine where public_api and not prosecdef and proname !~ '^(grant|revoke)_'
$$);
select pg_temp.none('helpers run with the rights of their caller', $$
    select proname from routine where not public_api and prosecdef and not is_trigger
$$);
select pg_temp.none('a null argument raises: the public API is not strict', $$
    select proname from routine where public_api and proisstrict
$$);
select pg_temp.none('arguments of the public API are named, without a prefix', $$
    select proname
    from routine
    where public_api
      and (
          coalesce(cardinality(proargnames), 0) < pronargs
          or exists (select from unnest(proargnames) as a where a = '' or a ~ '^_' or a ~ '^[a-z]_')
      )
$$);
select pg_temp.none('languages are sql and plpgsql', $$
    select r.proname from routine as r join pg_language as l on l.oid = r.prolang where l.lanname not in ('sql', 'plpgsql')
$$);
select pg_temp.none('every function is commented', $$
    select proname from routine where obj_description(oid, 'pg_proc') is null
$$);
select pg_temp.none('every function belongs to the owner of the schema', $$
    select r.proname
    from routine as r
    join pg_namespace as n on n.oid = r.pronamespace
    where r.proowner <> n.nspowner
$$);

-- relations and types
select pg_temp.none('every relation belongs to the owner of the schema', $$
    select r.relname
    from relation as r
    join pg_namespace as n on n.oid = r.relnamespace
    where r.relowner <> n.nspowner
$$);
select pg_temp.none('every table has a primary key', $$
    select relname
    from relation as r
    where relkind in ('r', 'p')
      and not exists (select from pg_constraint as c where c.conrelid = r.oid and c.contype = 'p')
$$);
select pg_temp.none('every table, view, sequence and composite type is commented', $$
    select relname
    from relation as r
    where relkind in ('r', 'p', 'v', 'm', 'S')
      and not relispartition
      and obj_description(oid, 'pg_class') is null
    union all
    select relname
    from relation as r
    where relkind = 'c'
      and obj_description(reltype, 'pg_type') is null
$$);
select pg_temp.none('every column and attribute is commented', $$
    select r.relname || '.' || a.attname
    from relation as r
    join pg_attribute as a on a.attrelid = r.oid
    where r.relkind in ('r', 'p', 'v', 'm', 'c')
      and not r.relispartition
      and a.attnum > 0
      and not a.attisdropped
      and col_description(r.oid, a.attnum) is null
$$);
select pg_temp.none('every index that backs no constraint is commented', $$
    select r.relname
    from relation as r
    where r.relkind in ('i', 'I')
      and not r.relispartition
      and obj_description(r.oid, 'pg_class') is null
      and not exists (select from pg_constraint as c where c.conindid = r.oid)
$$);
select pg_temp.none('what has a time zone ends in _at, and nothing is a timestamp without one', $$
    select r.relname || '.' || a.attname
    from relation as r
    join pg_attribute as a on a.attrelid = r.oid
    where r.relkind in ('r', 'p', 'v', 'm', 'c')
      and a.attnum > 0
      and not a.attisdropped
      and (
          a.atttypid = 'timestamptz'::regtype and a.attname !~ '_at$'
          or a.atttypid = 'timestamp'::regtype
          or a.attname ~ '_at$' and a.atttypid <> 'timestamptz'::regtype
      )
$$);
-- The server would call them setting_value_check, setting_value_idx or setting_value_key: upgrades need names we chose.
select pg_temp.none('constraints and indexes are named by us', $$
    select c.conname
    from pg_constraint as c
    join relation as r on r.oid = c.conrelid
    where not r.relispartition
      and c.conname ~ case c.contype when 'c' then '_check[0-9]*$' when 'u' then '_key[0-9]*$' else '_(fkey|excl)[0-9]*$' end
    union all
    select r.relname
    from relation as r
    where r.relkind in ('i', 'I')
      and not r.relispartition
      and r.relname ~ '_idx[0-9]*$'
$$);
select pg_temp.none('every name is lower-case', $$
    select relname from relation where relname ~ '[^a-z0-9_]' and not relispartition
    union all
    select proname from routine where proname ~ '[^a-z0-9_]'
$$);
select pg_temp.none('trigger functions serve a trigger', $$
    select proname
    from routine as r
    where is_trigger
      and not exists (select from pg_trigger as t where t.tgfoid = r.oid)
$$);

-- rights
select pg_temp.none('nobody but the owner has rights on the schema', $$
    select g.grantee::regrole::text
    from pg_namespace as n
    cross join lateral aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) as g
    where n.nspname = 'outbox' and g.grantee <> n.nspowner
$$);
select pg_temp.none('nobody but the owner may call a function', $$
    select r.proname
    from routine as r
    cross join lateral aclexplode(coalesce(r.proacl, acldefault('f', r.proowner))) as g
    where g.grantee <> r.proowner
$$);
select pg_temp.none('nobody but the owner has rights on a relation or a column', $$
    select r.relname
    from relation as r
    cross join lateral aclexplode(
        coalesce(r.relacl, acldefault(case r.relkind when 'S' then 's'::"char" else 'r' end, r.relowner))
    ) as g
    where r.relkind not in ('i', 'I', 'c')
      and g.grantee <> r.relowner
    union all
    select r.relname || '.' || a.attname
    from relation as r
    join pg_attribute as a on a.attrelid = r.oid
    where a.attacl is not null
$$);
select pg_temp.none('nobody but the owner may use a type', $$
    select t.typname
    from pg_type as t
    left join pg_class as c on c.oid = t.typrelid
    cross join lateral aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) as g
    where t.typnamespace = 'outbox'::regnamespace
      and t.typelem = 0
      and coalesce(c.relkind = 'c', true)
      and g.grantee <> t.typowner
$$);

select * from finish();
rollback;
