-- Station 50: what was sent and is kept goes to the archive, and leaves it by the day.
\ir setup.psql
select plan(47);

-- Emits, claims and settles one message; returns its id.
create function pg_temp.sent(name text) returns bigint language plpgsql as $function$
declare
    v_id bigint := outbox.emit(name, '{"a": 1}', key => 'k', headers => '{"h": 1}', expires_in => '1 h', dedup_key => 'd-' || name, properties => '{"type": "t"}');
begin
    perform outbox.claim_batch(pg_temp.token(1));
    perform outbox.mark_sent(pg_temp.token(1), array[v_id]);
    return v_id;
end
$function$;
create function pg_temp.days() returns text language sql as $$
    select coalesce(string_agg(to_char(d.begins_at at time zone 'UTC', 'YYYYMMDD'), ' ' order by d.begins_at), '') from outbox._days() as d;
$$;
create function pg_temp.today(n integer = 0) returns timestamptz language sql as $$
    select date_trunc('day', clock_timestamp(), 'UTC') + n * interval '1 day';
$$;
create function pg_temp.name_of(n integer) returns text language sql as $$select to_char(pg_temp.today(n) at time zone 'UTC', 'YYYYMMDD')$$;
-- A day of the past, with so many messages.
create procedure pg_temp.day(n integer, messages integer = 1) language plpgsql as $function$
begin
    execute format(
        'create table outbox.%I partition of outbox.archive for values from (%L) to (%L)',
        'archive_' || pg_temp.name_of(n), pg_temp.today(n), pg_temp.today(n + 1)
    );
    call pg_temp.kept(pg_temp.today(n), messages);
end
$function$;
create procedure pg_temp.kept(at timestamptz, messages integer = 1) language sql as $$
    insert into outbox.archive (id, sent_at, message_id, routing_key, content_type, created_at, attempts, emitted_by, body)
    select -n, at, gen_random_uuid(), 'old', 't', at, 0, 'x', '' from generate_series(1, messages) as n;
$$;

-- Delete, the default: nothing is kept, no day is made.
select outbox.configure('max_attempts', '9') as configured, pg_temp.sent('a') as a \gset
select is((select count(*) from outbox.archive), 0::bigint, 'delete: nothing is kept');
select is((select count(*) from outbox.message), 0::bigint, 'and nothing left');
select outbox.cleanup() as cleaned \gset
select is(pg_temp.days(), '', 'and cleanup() makes no day');
select is(outbox.configure('retention', 'delete'), 'delete', 'said so explicitly');
select pg_temp.sent('b') as b \gset
select is((select count(*) from outbox.archive), 0::bigint, 'it is the same');
select is(pg_temp.days(), '', 'configure() makes no day either');

-- Forever.
select outbox.configure('retention', 'forever') as configured \gset
select is(pg_temp.days(), concat_ws(' ', pg_temp.name_of(0), pg_temp.name_of(1), pg_temp.name_of(2), pg_temp.name_of(3)), 'configure() makes today and the next three days');
select pg_temp.sent('c') as c \gset
select is((select count(*) from outbox.message), 0::bigint, 'kept messages wait no more');
select is(
    (select to_jsonb(a) - '{sent_at,created_at,expires_at,message_id,body}'::text[] from outbox.archive as a),
    jsonb_build_object(
        'id', :c, 'exchange', null, 'routing_key', 'c', 'key', 'k', 'content_type', 'application/json', 'headers', '{"h": 1}'::jsonb,
        'properties', '{"type": "t"}'::jsonb, 'attempts', 0, 'emitted_by', session_user, 'dedup_key', 'd-c'
    ),
    'the archive has it whole'
);
select is((select convert_from(a.body, 'UTF8')::jsonb from outbox.archive as a), '{"a": 1}', 'and its body');
select ok((select a.message_id is not null and a.created_at <= a.sent_at and a.sent_at <= clock_timestamp() and a.expires_at > a.sent_at from outbox.archive as a), 'and its times');
select is((select a.tableoid::regclass::text from outbox.archive as a), 'outbox.archive_' || pg_temp.name_of(0), 'in the partition of the day');
select is((select array_agg(distinct a.sent_at) = array[max(t.settled_at)] from outbox.archive as a, outbox.tally as t), true, 'at the time the call was noted');
call pg_temp.day(-1000);
call pg_temp.kept(pg_temp.today(-2000));
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'nothing is ever past');
select is((select count(*) from outbox.archive), 3::bigint, 'and all stay');

-- A message that is not sent is not kept.
select outbox.emit('d', '1') as d \gset
select outbox.claim_batch(pg_temp.token(1)) as claimed, outbox.mark_failed(pg_temp.token(1), array[:d], array['x']) as failed \gset
select is((select count(*) from outbox.archive as a where a.id = :d), 0::bigint, 'what failed is not in the archive');
select pg_temp.sent('d2') as d2 \gset
select is((select array_agg(a.routing_key) from outbox.archive as a where a.id in (:d, :d2)), '{d2}', 'nor what waits while another is sent');
delete from outbox.archive as a where a.id = :d2;
select outbox.mark_sent(pg_temp.token(2), array[:d]) as sent \gset
select is((select count(*) from outbox.archive as a where a.id = :d), 0::bigint, 'nor what somebody settles who does not hold it');
delete from outbox.message;

-- For an interval: by the day, and outside the days by the row.
select outbox.configure('retention', '2 days') as configured \gset
call pg_temp.day(-4);
call pg_temp.day(-3);
call pg_temp.day(-2);
call pg_temp.day(-1);
call pg_temp.kept(pg_temp.today(-5));
select is(outbox.cleanup(), row(0, 0, 3, 2, 0, false)::outbox.cleanup_result, 'days that ended before the interval, and rows older than it');
select is(
    pg_temp.days(), (select string_agg(pg_temp.name_of(n), ' ' order by n) from generate_series(-2, 3) as n), 'a day that ended within the interval stays'
);
select is((select count(*) from outbox.archive_default), 0::bigint, 'and nothing that is past is left outside them');
select is((select count(*) from outbox.archive), 3::bigint, 'what is not past stays');
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'and that is all');
select outbox.configure('retention', '0') as configured \gset
select is((outbox.cleanup()).archive_days, 2, 'an interval of 0 keeps the day');

-- Back to delete: what is kept goes as its day ends.
select outbox.configure('retention', null) as configured \gset
call pg_temp.day(-1);
select is((outbox.cleanup()).archive_days, 1, 'delete: days that have ended go');
select is((select count(*) from outbox.archive as a where a.id = :c), 1::bigint, 'today stays until tomorrow');

-- Without a partition of the day the default one takes it.
select outbox.configure('retention', '2 days') as configured \gset
do $do$ begin execute format('drop table outbox.%I', 'archive_' || pg_temp.name_of(0)); end $do$;
select lives_ok($$select pg_temp.sent('e')$$, 'settling does not fail for want of a day');
select is((select a.tableoid::regclass::text from outbox.archive as a where a.routing_key = 'e'), 'outbox.archive_default', 'the default partition takes it');
select lives_ok('select outbox.cleanup()', 'and cleanup() does not fail for it');
select is((select count(*) from outbox.archive as a where a.routing_key = 'e'), 1::bigint, 'but keeps it');
select is(pg_temp.days(), concat_ws(' ', pg_temp.name_of(1), pg_temp.name_of(2), pg_temp.name_of(3)), 'that day is not made any more');
do $do$ begin execute format('drop table outbox.%I', 'archive_' || pg_temp.name_of(2)); end $do$;
select outbox.cleanup() as cleaned \gset
select is(pg_temp.days(), concat_ws(' ', pg_temp.name_of(1), pg_temp.name_of(2), pg_temp.name_of(3)), 'a coming day that is missing is');

-- Bounded steps.
call pg_temp.kept(pg_temp.today(-10), 10001);
select is(outbox.cleanup(), row(0, 0, 0, 10000, 0, true)::outbox.cleanup_result, 'at most 10,000 rows at a time, and more to come');
select is(outbox.cleanup(), row(0, 0, 0, 1, 0, false)::outbox.cleanup_result, 'the last of them');
do $do$ begin for n in 10..20 loop call pg_temp.day(-n, 0); end loop; end $do$;
select is(outbox.cleanup(), row(0, 0, 10, 0, 0, true)::outbox.cleanup_result, 'at most ten days at a time, and more to come');
select is((select count(*) from outbox._days() as d where d.name = 'archive_' || pg_temp.name_of(-10)), 1::bigint, 'the oldest first');
select is(outbox.cleanup(), row(0, 0, 1, 0, 0, false)::outbox.cleanup_result, 'the last of them');
do $do$ begin for n in 11..20 loop call pg_temp.day(-n, 0); end loop; end $do$;
select is(outbox.cleanup(), row(0, 0, 10, 0, 0, false)::outbox.cleanup_result, 'exactly ten: no more');

-- A day that was detached is somebody's own.
call pg_temp.day(-30);
do $do$
begin
    execute format('alter table outbox.archive detach partition outbox.%I', 'archive_' || pg_temp.name_of(-30));
    execute format('alter table outbox.archive detach partition outbox.%I', 'archive_' || pg_temp.name_of(1));
end
$do$;
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'a day that was detached is neither dropped nor made');
do $do$
begin
    execute format('drop table outbox.%I, outbox.%I', 'archive_' || pg_temp.name_of(-30), 'archive_' || pg_temp.name_of(1));
end
$do$;

-- Rights on a new day: nobody's but the owner's, whatever the default privileges.
create role tap_stranger;
alter default privileges in schema outbox grant select on tables to tap_stranger, public;
alter default privileges grant insert on tables to tap_stranger;
do $do$ begin execute format('drop table outbox.%I', 'archive_' || pg_temp.name_of(2)); end $do$;
select outbox.cleanup() as cleaned \gset
select is(
    (
        select count(*)
        from pg_class as c
        cross join lateral aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) as g
        where c.relname = 'archive_' || pg_temp.name_of(2) and g.grantee <> c.relowner
    ),
    0::bigint, 'nobody has a right on a day that cleanup() made'
);
select ok(
    (
        select count(*) > 3
        from pg_class as c
        cross join lateral aclexplode(c.relacl) as g
        where c.relname = 'archive_' || pg_temp.name_of(2) and g.grantee = c.relowner
    ),
    'but the owner'
);
select is(
    (select c.relowner from pg_class as c where c.relname = 'archive_' || pg_temp.name_of(2)),
    (select n.nspowner from pg_namespace as n where n.nspname = 'outbox'), 'and it belongs to the owner of the package'
);

-- A session's own notion of days and dates does not matter.
do $do$ begin execute format('drop table outbox.%I', 'archive_' || pg_temp.name_of(3)); end $do$;
set local timezone = 'Asia/Tokyo';
set local datestyle = 'SQL, DMY';
select outbox.cleanup() as cleaned \gset
select is(
    (
        select pg_get_expr(c.relpartbound, c.oid) = format('FOR VALUES FROM (%L) TO (%L)', pg_temp.today(3), pg_temp.today(4))
        from pg_class as c where c.relname = 'archive_' || pg_temp.name_of(3)
    ), true, 'a day is a day of UTC'
);
set local timezone = 'UTC';
set local datestyle = 'ISO';

-- What mark_sent() notes for stats() is folded into minutes.
delete from outbox.tally;
insert into outbox.tally (settled_at, first_id, sent, took, worst)
values
    (date_trunc('minute', now()) - interval '2 min', 1, 2, '4 s', '3 s'),
    (date_trunc('minute', now()) - interval '2 min', 2, 3, '6 s', '5 s'),
    (date_trunc('minute', now()) - interval '61 min', 3, 3, '6 s', '5 s'),
    (clock_timestamp() + interval '1 min', 4, 1, '1 s', '1 s');
select outbox.cleanup() as cleaned \gset
select is((select array_agg(t.first_id) from outbox.tally as t), array[4]::bigint[], 'what was noted before this minute is folded');
select is(
    (select array_agg((m.sent, m.took, m.worst)::text) from outbox.tally_minute as m), array['(5,00:00:10,00:00:05)'], 'into its minute; what is older than an hour is forgotten'
);

insert into outbox.tally (settled_at, first_id, sent, took, worst)
select date_trunc('minute', now()) - interval '2 min', n, 1, '1 s', case n when 1 then '9 s' else '1 s' end::interval from generate_series(1, 10001) as n;
select outbox.cleanup() as cleaned \gset
select is((select count(*) from outbox.tally as t where t.first_id <> 4), 1::bigint, '10,000 at a time');
select outbox.cleanup() as cleaned \gset
select is(
    (select array_agg((m.sent, m.took, m.worst)::text) from outbox.tally_minute as m), array['(10006,02:46:51,00:00:09)'], 'and added to what their minute has'
);

select * from finish();
rollback;
