-- Station 70: who may do what, cell by cell: each role makes each call and touches each table. What exists comes from the
-- catalog, so that a function or table without a row in the matrix fails.
\ir setup.psql
select no_plan();

-- One role for each part, one with none, one to be granted things.
create function pg_temp.role_for(part text) returns name language sql as $function$
    select (part || '_' || current_database())::name;
$function$;
create temporary table part (name) on commit drop as
values ('emit'), ('relay'), ('consume'), ('monitor'), ('admin'), ('nobody'), ('other');
do $do$
declare
    v_part text;
begin
    for v_part in select p.name from part as p loop
        execute format('create role %I', pg_temp.role_for(v_part));
        execute format('grant usage on schema tap to %I', pg_temp.role_for(v_part));
        if v_part not in ('nobody', 'other') then
            execute format('select outbox.grant_%s(%L)', v_part, quote_ident(pg_temp.role_for(v_part)));
        end if;
    end loop;
end
$do$;

-- Who may call it, how, and what the answer is then. $other is a role.
create temporary table may_call (name text primary key, parts text[], call text, answer text) on commit drop;
insert into may_call
values
    ('version', '{emit,relay,consume,monitor,admin}', 'select outbox.version() ~ ''^\d''', 'true'),
    ('emit', '{emit}', 'select outbox.emit(''a'', ''1'') > 0', 'true'),
    ('emit_bytes', '{emit}', 'select outbox.emit_bytes(''a'', ''x'') > 0', 'true'),
    ('emit_many', '{emit}', 'select cardinality(outbox.emit_many(''[{"routing_key": "a", "payload": 1}]''))', '1'),
    ('emit_event', '{emit}', 'select outbox.emit_event(''order'', ''1'', ''placed'', ''1'') > 0', 'true'),
    ('set_context', '{emit}', 'select outbox.set_context(''{"a": 1}'')', ''),
    ('cancel', '{emit,admin}', 'select outbox.cancel(-1)', 'false'),
    ('hello', '{relay}', 'select outbox.hello(''tap'') is not null', 'true'),
    ('relay_settings', '{relay}', 'select outbox.relay_settings() ->> ''default_exchange''', 'outbox'),
    ('claim_batch', '{relay}', 'select count(*) from outbox.claim_batch(gen_random_uuid())', '1'),
    ('mark_sent', '{relay}', 'select outbox.mark_sent(gen_random_uuid(), ''{}'')', '0'),
    ('mark_failed', '{relay}', 'select outbox.mark_failed(gen_random_uuid(), ''{}'', ''{}'')', '0'),
    ('release_batch', '{relay}', 'select outbox.release_batch(gen_random_uuid())', '0'),
    ('extend_lease', '{relay}', 'select outbox.extend_lease(gen_random_uuid(), ''10 s'')', 'false'),
    ('arm_wakeup', '{relay}', 'select outbox.arm_wakeup() is not null', 'true'),
    ('disarm_wakeup', '{relay}', 'select outbox.disarm_wakeup()', ''),
    ('next_due', '{relay}', 'select outbox.next_due() is not null', 'true'),
    ('cleanup', '{relay,consume,admin}', 'select (outbox.cleanup()).more', 'false'),
    ('dead_among', '{relay}', 'select count(*) from outbox.dead_among(''{}'')', '0'),
    ('stats', '{relay,monitor,admin}', 'select (outbox.stats()).waiting', '1'),
    ('wait_sent', '{monitor,admin}', 'select outbox.wait_sent(-1, ''0'')', 'false'),
    ('configure', '{admin}', 'select outbox.configure(''max_attempts'', ''3'')', '3'),
    ('pause', '{admin}', 'select outbox.pause()', ''),
    ('resume', '{admin}', 'select outbox.resume()', ''),
    ('requeue_dead', '{admin}', 'select outbox.requeue_dead(''{-1}'')', '0'),
    ('purge_dead', '{admin}', 'select outbox.purge_dead(''0'')', '1'),
    ('accept', '{consume}', 'select outbox.accept(''tap'', gen_random_uuid())', 'true');
insert into may_call
select format('%s_%s', verb, p.name), '{admin}', format('select outbox.%s_%s(''$other'')', verb, p.name), ''
from unnest('{grant,revoke}'::text[]) as verb
cross join part as p
where p.name not in ('nobody', 'other');

-- Who may read it, and how many rows are there: every table has one.
create temporary table may_read (name text primary key, parts text[], answer text) on commit drop;
insert into may_read
values
    ('message_status', '{monitor,admin}', '\d+'),
    ('dead_letter', '{admin}', '1'),
    ('archive', '{admin}', '1'),
    ('setting', '{admin}', '1');

-- Something to see.
insert into outbox.dead_letter (id, dead_at, reason, lane, message_id, routing_key, content_type, created_at, attempts, emitted_by, parked, body)
values (0, '2020-01-01', 'rejected', 0, gen_random_uuid(), 'a', 'text/plain', '2020-01-01', 1, 'tap', false, 'secret');
select outbox.emit('a', '"secret"') as waiting \gset
insert into outbox.archive (id, sent_at, message_id, routing_key, content_type, created_at, attempts, emitted_by, body)
values (0, now(), gen_random_uuid(), 'a', 'text/plain', now(), 0, 'tap', 'secret');
select outbox.configure('retention', 'forever') as kept \gset
-- A dead letter past its retention would go with cleanup().
update outbox.dead_letter set dead_at = now();

-- The answer, or the code of the error; whatever the call did is undone.
create function pg_temp.answer(part text, call text) returns text language plpgsql as $function$
declare
    v_answer text;
begin
    execute format('set local role %I', pg_temp.role_for(part));
    execute replace(call, '$other', quote_ident((select tap_other.name from tap_other))) into v_answer;
    raise exception using errcode = 'TAP00', message = coalesce(v_answer, '');
exception
    when sqlstate 'TAP00' then
        return sqlerrm;
    when others then
        return sqlstate;
end
$function$;
create temporary table tap_other (name) on commit drop as
select pg_temp.role_for('other');
grant select on tap_other to public;

-- functions
select is(
    (
        select string_agg(p.proname, ', ' order by p.proname)
        from pg_proc as p
        where p.pronamespace = 'outbox'::regnamespace
          and p.proname !~ '^_'
          and p.proname not in (select m.name from may_call as m)
    ), null, 'every function has a row in the matrix'
);
select is(
    pg_temp.answer(a.name, coalesce(a.call, a.denied)), coalesce(a.answer, '42501'),
    format('%s %s %s()', a.name, case when a.call is null then 'may not call' else 'may call' end, a.proname)
)
from (
    select
        part.name,
        p.proname,
        case when part.name = any (m.parts) then m.call end as call,
        case when part.name = any (m.parts) then m.answer end as answer,
        -- Refused before anybody looks at the arguments.
        format('select outbox.%I(%s)', p.proname, (
            select string_agg(format('null::%s', t.type::regtype), ', ' order by t.n)
            from unnest(p.proargtypes) with ordinality as t (type, n)
        )) as denied
    from part
    cross join pg_proc as p
    left join may_call as m
        on m.name = p.proname
    where p.pronamespace = 'outbox'::regnamespace
      and part.name <> 'other'
) as a
order by a.proname, a.name;

-- tables, views and sequences
select is(
    (
        select string_agg(m.name, ', ' order by m.name)
        from may_read as m
        where not exists (select from pg_class as c where c.relnamespace = 'outbox'::regnamespace and c.relname = m.name)
          and m.name <> 'message_status'
    ), null, 'every table of the matrix exists'
);
select matches(
    pg_temp.answer(a.name, format(a.call, a.relation, a.col)), '^(' || case when a.call ~ '^select' then coalesce(a.answer, '42501') else '42501' end || ')$',
    format('%s %s: %s', a.name, case when a.call ~ '^select' and a.answer is not null then 'may' else 'may not' end, format(a.call, a.relation, a.col))
)
from (
    select
        part.name,
        c.oid::regclass as relation,
        (select quote_ident(a.attname) from pg_attribute as a where a.attrelid = c.oid and a.attnum = 1) as col,
        case when part.name = any (m.parts) then m.answer end as answer,
        s.call
    from part
    cross join pg_class as c
    left join may_read as m
        on m.name = c.relname
    cross join lateral unnest(case
        when c.relkind = 'S' then array['select last_value from %s', 'do $$begin perform nextval(''%s''); end$$', 'do $$begin perform setval(''%s'', 1); end$$']
        when c.relkind in ('v', 'm') then array['select count(*) from %s']
        else array[
            'select count(*) from %s', 'insert into %s default values', 'update %s set %s = default', 'delete from %s', 'truncate %s',
            'lock table %s in row share mode', 'alter table %s rename to stolen', 'drop table %s',
            'create trigger spy after insert on %s for each row execute function suppress_redundant_updates_trigger()'
        ]
    end) as s (call)
    where c.relnamespace = 'outbox'::regnamespace
      and c.relkind in ('r', 'p', 'v', 'm', 'S')
      and part.name <> 'other'
) as a
order by a.relation::text, a.call, a.name;
select is(
    (
        select string_agg(distinct format('%s.%s', m.name, a.attname), ', ')
        from may_read as m
        join pg_attribute as a
            on a.attrelid = to_regclass(format('outbox.%I', m.name))
        where 'monitor' = any (m.parts)
          and a.attname in ('body', 'payload', 'headers', 'properties')
    ), null, 'what a monitor reads has no payload'
);

-- the schema
select is(pg_temp.answer(p.name, 'create table outbox.mine ()'), '42501', p.name || ' creates nothing in the schema')
from part as p
where p.name <> 'other'
order by p.name;
select is(pg_temp.answer('nobody', 'select outbox.no_such_thing()'), '42501', 'without a part nobody looks into the schema');

-- Parts are siblings: what one takes, another may still permit.
create function pg_temp.holds(part text) returns text language sql as $function$
    select coalesce(string_agg(o.name, ',' order by o.sort, o.name collate "C"), '')
    from outbox._objects() as o
    where exists (select from aclexplode(o.acl) as g where g.grantee = pg_temp.role_for(part)::text::regrole);
$function$;
select is(pg_temp.holds('other'), '', 'a role without a part has no right');
create function pg_temp.change(verb text, part text) returns text language plpgsql as $function$
begin
    execute format('select outbox.%s_%s(%L)', verb, part, quote_ident(pg_temp.role_for('other')));
    return pg_temp.holds('other');
end
$function$;
select is(pg_temp.change('grant', p.name), pg_temp.holds(p.name), 'granted once more: ' || p.name) from part as p where p.name = 'relay';
select is(pg_temp.change('grant', 'relay'), pg_temp.holds('relay'), 'granted twice is granted');
select isnt(pg_temp.change('grant', 'admin'), pg_temp.holds('relay'), 'two parts');
select is(pg_temp.change('revoke', 'relay'), pg_temp.holds('admin'), 'what both permit stays: cleanup, version, the schema');
select is(pg_temp.change('revoke', 'relay'), pg_temp.holds('admin'), 'revoked twice is revoked');
select is(pg_temp.change('revoke', 'emit'), pg_temp.holds('admin'), 'revoked without having been granted');
select is(pg_temp.change('revoke', 'admin'), '', 'the last part takes the schema with it');
select is(
    array[pg_temp.change('grant', p.name), pg_temp.change('revoke', p.name)], array[pg_temp.holds(p.name), ''],
    format('grant_%s() and revoke_%1$s()', p.name)
)
from part as p
where p.name not in ('nobody', 'other')
order by p.name;
select is((select count(*) from outbox._granted() as g where g.role = pg_temp.role_for('other')::text::regrole), 0::bigint, 'and nothing is recorded');
select is((select array_agg(p.name order by p.name) from part as p where p.name not in ('nobody', 'other')),
    (select array_agg(distinct r.part order by r.part) from outbox._rights() as r), 'the matrix knows these parts and no others');
select is((select count(*) from outbox._rights() as r where r.name like '\_%'), 0::bigint, 'helpers are granted to nobody');

-- What somebody gave by hand on what no part is about stays until the next upgrade; what he passed on goes with it.
do $do$
begin
    execute format('grant select on outbox.message to %I', pg_temp.role_for('other'));
    execute format('select outbox.grant_emit(%L)', quote_ident(pg_temp.role_for('other')));
    execute format('grant execute on function outbox.emit to %I with grant option', pg_temp.role_for('other'));
    execute format('set local role %I', pg_temp.role_for('other'));
    execute format('grant execute on function outbox.emit to %I', pg_temp.role_for('nobody'));
    reset role;
    execute format('select outbox.revoke_emit(%L)', quote_ident(pg_temp.role_for('other')));
end
$do$;
select is(pg_temp.holds('other'), 'message', 'only what a part gives is taken');
select is(pg_temp.holds('nobody'), '', 'and what was passed on');
do $do$
begin
    execute format('revoke all on outbox.message from %I', pg_temp.role_for('other'));
end
$do$;

select ok(
    exists (
        select
        from pg_locks as l
        where l.relation = 'outbox.access'::regclass
          and l.pid = pg_backend_pid()
          and l.mode = 'ShareRowExclusiveLock'
    ), 'who grants makes others wait who want to, until the end of the transaction'
);

-- What lies elsewhere under the same name, and what looks like a record of a part.
create schema namesake;
create table namesake.dead_letter (emit text);
create function namesake.version() returns text language sql as 'select 1::text';
revoke all on function namesake.version() from public;
do $do$
declare
    v_other name := pg_temp.role_for('other');
begin
    execute format('grant usage on schema namesake to %I', v_other);
    execute format('grant references (emit) on namesake.dead_letter to %I', v_other);
    execute format('grant select (emit) on outbox.access to %I', v_other);
    grant references (emit) on outbox.access to public;
end
$do$;
select is((select count(*) from outbox._granted() as g where g.role in (0, pg_temp.role_for('other')::text::regrole)), 0::bigint, 'none of these is a record');
select isnt(pg_temp.change('grant', 'admin'), '', 'an admin');
select is(pg_temp.answer('other', call), '42501', 'may not: ' || call)
from unnest(array['select from namesake.dead_letter', 'select namesake.version()', 'select outbox.emit(''a'', ''1'')']) as call;
select is(
    (select array_agg(o.object order by o.object collate "C") from outbox._objects() as o where o.sort = 'type'),
    (select array_agg('type outbox.' || c.relname order by c.relname collate "C") from pg_class as c where c.relnamespace = 'outbox'::regnamespace and c.relkind = 'c'),
    'types of their own, each once'
);
select is((select array_agg(o.object) from outbox._objects() as o where o.object !~ '^[a-z]+ outbox(\.|$)'), null, 'nothing of another schema');

-- After an upgrade, at the end of the transaction, every role has again what its parts permit.
do $do$
begin
    execute format('revoke execute on function outbox.emit from %I', pg_temp.role_for('emit'));
    execute format('grant execute on function outbox.claim_batch to %I', pg_temp.role_for('emit'));
end
$do$;
insert into outbox.access default values;
select is(pg_temp.answer('emit', 'select outbox.emit(''a'', ''1'') > 0'), '42501', 'not yet');
set constraints all immediate;
select is(pg_temp.answer('emit', 'select outbox.emit(''a'', ''1'') > 0'), 'true', 'given again');
select is(pg_temp.answer('emit', 'select outbox.claim_batch(gen_random_uuid())'), '42501', 'and taken what another part permits');
select is(pg_temp.answer('relay', 'select count(*) from outbox.claim_batch(gen_random_uuid())'), '1', 'others keep theirs');

-- Members of a role may what the role may.
do $do$
begin
    execute format('grant %I to %I', pg_temp.role_for('emit'), pg_temp.role_for('nobody'));
end
$do$;
select is(pg_temp.answer('nobody', 'select outbox.emit(''a'', ''1'') > 0'), 'true', 'a member of an emitter emits');
select is(pg_temp.answer('nobody', 'select outbox.claim_batch(gen_random_uuid())'), '42501', 'and no more');

-- bad input
select throws_ok(format('select outbox.%s_%s(null)', verb, p.name), 'OB001', 'role must not be null', format('%s_%s without a role', verb, p.name))
from part as p
cross join unnest('{grant,revoke}'::text[]) as verb
where p.name not in ('nobody', 'other')
order by p.name, verb;
select throws_ok('select outbox.grant_emit(''-'')', 'OB011', 'role does not exist', 'PUBLIC is no role');
select throws_ok('select outbox.grant_emit(''4294967295'')', 'OB011', 'role does not exist', 'nor is a number');
select throws_ok('select outbox.revoke_emit(current_user::regrole)', 'OB011', 'role owns the package', 'the owner keeps his rights');

-- Names that mean something else when they are not quoted.
create function pg_temp.odd(name text) returns text language plpgsql as $function$
begin
    execute format('create role %I', name);
    perform outbox.grant_monitor(quote_ident(name)::regrole);
    return (select string_agg(g.part, ',') from outbox._granted() as g where g.role = quote_ident(name)::regrole);
end
$function$;
select is(pg_temp.odd(odd || current_database()), 'monitor', 'role ' || odd)
from unnest(array['Upper ', 'a"b', 'a''b; drop table outbox.message; --', 'x, public ', 'é ']) as odd;

select * from finish();
rollback;
