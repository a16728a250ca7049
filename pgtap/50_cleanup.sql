-- Station 50: cleanup() removes what is past, and nothing else; the sweep repairs what cannot be.
\ir setup.psql

-- Only read committed will do.
rollback;
begin isolation level repeatable read;
\ir refusal.psql
select pg_temp.refusal('select outbox.cleanup()') as cleanup \gset
rollback;

\ir setup.psql
select plan(37);

create function pg_temp.claim(n integer, batch_size integer = 500) returns text language plpgsql as $function$
begin
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
    return (
        select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '') from outbox.claim_batch(pg_temp.token(n), batch_size) with ordinality as c
    );
end
$function$;
create function pg_temp.key_of(lane integer) returns text language sql as $$
    select 'k' || k from generate_series(1, 1000) as k where hashtextextended('k' || k, 0) & 63 = lane order by k limit 1;
$$;
-- A message that died so long ago.
create procedure pg_temp.dead(name text, age interval, key text = null) language plpgsql as $function$
declare
    v_id bigint := outbox.emit(name, '1', key => key);
begin
    perform outbox._bury(array[v_id], array['rejected'], array['x'], 1);
    update outbox.dead_letter as d set dead_at = clock_timestamp() - age where d.id = v_id;
end
$function$;
create function pg_temp.left_dead() returns text language sql as $$
    select coalesce(string_agg(d.routing_key, ' ' order by d.id), '') from outbox.dead_letter as d;
$$;
create function pg_temp.left_dedup() returns text language sql as $$
    select coalesce(string_agg(d.dedup_key, ' ' order by d.dedup_key), '') from outbox.dedup as d;
$$;

select is(:'cleanup'::text, 'OB010 isolation level must be read committed', 'cleanup() in repeatable read');
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'nothing is past');
select is((select floor_repairs from outbox.horizon), 0::bigint, 'no floor was ever wrong');

-- Dead letters and deduplication keys.
call pg_temp.dead('old', '30 days 1 min');
call pg_temp.dead('young', '29 days 23 h 59 min');
select outbox.emit('a', '1', dedup_key => 'old') as a, outbox.emit('a', '1', dedup_key => 'young') as b \gset
update outbox.dedup set created_at = clock_timestamp() - case dedup_key when 'old' then interval '61 min' else interval '59 min' end;
select outbox.emit('waits', '1', delay => '1 h') as delayed, outbox.emit('waits', '1', expires_in => '1 h') as ready \gset
update outbox.message set created_at = created_at - interval '10 years', expires_at = expires_at - interval '10 years';
select is(outbox.cleanup(), row(1, 1, 0, 0, 0, false)::outbox.cleanup_result, 'one of each is past');
select is(pg_temp.left_dead(), 'young', 'a dead letter within dead_retention stays');
select is(pg_temp.left_dedup(), 'young', 'a dedup_key within dedup_window stays');
select is((select count(*) from outbox.message), 4::bigint, 'what waits stays, however old');
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'and that is all');
select outbox.configure('dead_retention', '1 h') as dead_retention, outbox.configure('dedup_window', '30 min') as dedup_window \gset
select is(outbox.cleanup(), row(1, 1, 0, 0, 0, false)::outbox.cleanup_result, 'the settings count');
delete from outbox.setting;
delete from outbox.message;

select outbox.configure('on_dead', 'park') as configured \gset
call pg_temp.dead('head', '31 days', 'k');
select outbox.emit('follower', '1', key => 'k') as follower \gset
select is(pg_temp.claim(1), '', 'a parked key waits');
select is((outbox.cleanup()).dead_letters, 1, 'until cleanup() takes its dead letter away');
select is(pg_temp.claim(1), 'follower', 'then it goes on');
select outbox.mark_sent(pg_temp.token(1), array[:follower]) as sent, outbox.configure('on_dead', null) as configured \gset

-- Bounded steps.
insert into outbox.dedup (dedup_key, id, created_at) select 'd' || n, n, clock_timestamp() - interval '1 day' from generate_series(1, 10001) as n;
select is(outbox.cleanup(), row(0, 10000, 0, 0, 0, true)::outbox.cleanup_result, 'at most 10,000 dedup keys at a time, and more to come');
select is(outbox.cleanup(), row(0, 1, 0, 0, 0, false)::outbox.cleanup_result, 'the last of them');
insert into outbox.dead_letter (id, dead_at, reason, lane, message_id, routing_key, content_type, created_at, attempts, emitted_by, parked, body)
select -n, clock_timestamp() - interval '31 days', 'rejected', 0, gen_random_uuid(), 'd', 't', clock_timestamp(), 1, 'x', false, '' from generate_series(1, 10001) as n;
select is(outbox.cleanup(), row(10000, 0, 0, 0, 0, true)::outbox.cleanup_result, 'at most 10,000 dead letters at a time, and more to come');
select is(outbox.cleanup(), row(1, 0, 0, 0, 0, false)::outbox.cleanup_result, 'the last of them');
insert into outbox.dedup (dedup_key, id, created_at) select 'd' || n, n, clock_timestamp() - interval '1 day' from generate_series(1, 10000) as n;
select is(outbox.cleanup(), row(0, 10000, 0, 0, 0, false)::outbox.cleanup_result, 'exactly 10,000: no more');

-- The sweep refills what is derived.
delete from outbox.lane where lane in (0, 63);
delete from outbox.horizon;
select outbox.cleanup() as cleaned \gset
select is((select array[count(*), count(distinct lane), min(lane), max(lane)] from outbox.lane)::integer[], array[64, 64, 0, 63], 'missing lanes are back');
select is((select count(*) from outbox.horizon), 1::bigint, 'and the horizon');
delete from outbox.lane;
select outbox.hello('tap') as relay \gset
select is((select count(*) from outbox.lane), 64::bigint, 'hello() sweeps too');

-- The floors that claims go by are noted when something is settled, all of them or none: a claim finds them by their place.
update outbox.lane set floor = 0;
update outbox.horizon set checked_at = '-infinity', floors = null;
select outbox.mark_sent(pg_temp.token(9), '{1}') as sent \gset
select is((select floors from outbox.horizon), array_fill(0::bigint, array[64]), 'the floors of all lanes are noted');
delete from outbox.lane where lane = 5;
update outbox.horizon set checked_at = '-infinity';
select outbox.mark_sent(pg_temp.token(9), '{1}') as sent \gset
select is((select floors from outbox.horizon), null, 'none while a lane is missing');
select outbox._sweep() \g /dev/null

-- A ready message below its floor is a bug: found, counted, delivered.
select outbox.emit('below', '1', key => pg_temp.key_of(3)) as below, outbox.emit('below too', '1', key => pg_temp.key_of(3)) as below_too,
    outbox.emit('delayed', '1', key => pg_temp.key_of(4), delay => '1 h') as delayed \gset
update outbox.lane set floor = :delayed + 1, reach = :delayed where lane in (3, 4);
update outbox.horizon set floors = (select array_agg(floor order by lane) from outbox.lane);
select is(pg_temp.claim(1), '', 'a claim does not look below the floor');
select outbox.cleanup() as cleaned \gset
select is((select floor from outbox.lane where lane = 3), :below::bigint, 'the sweep lowers it to the first ready message');
select is((select floor_repairs from outbox.horizon), 1::bigint, 'and counts it');
select is((select floor from outbox.lane where lane = 4), :delayed + 1::bigint, 'what waits for a time needs no floor');
select is(pg_temp.claim(1), 'below below too', 'and it is handed out');
select outbox.mark_sent(pg_temp.token(1), array[:below, :below_too]) as sent \gset
select outbox.emit('below', '1', key => pg_temp.key_of(3)) as below, outbox.emit('in flight', '1', key => pg_temp.key_of(3)) as in_flight \gset
update outbox.lane set floor = :in_flight where lane = 3;
select pg_temp.claim(1) as claimed \gset
update outbox.lane set reach = :in_flight where lane = 3;
select outbox.cleanup() as cleaned, outbox.mark_sent(pg_temp.token(1), array[:in_flight]) as sent \gset
select is(pg_temp.claim(1), 'below', 'settling what was in flight meanwhile does not bring the wrong floor back');
select outbox.mark_sent(pg_temp.token(1), array[:below]) as sent \gset

-- The sequence was set back: nothing proven holds.
select outbox.emit('after restore', '1', key => pg_temp.key_of(3)) as restored \gset
update outbox.horizon set safe_id = 1000000000000, pending_id = 1000000000000, pending_xid = '5', version = version + 1;
update outbox.lane set floor = 1000000000000, reach = 1000000000000;
update outbox.horizon set floors = (select array_agg(floor order by lane) from outbox.lane);
select outbox.cleanup() as cleaned \gset
select is((select array[safe_id, pending_id, noted_id] from outbox.horizon), array[0, null, null]::bigint[], 'a horizon above the sequence is reset');
select is((select max(floor) from outbox.lane), 0::bigint, 'and every floor');
select is(pg_temp.claim(1), 'after restore', 'so that new messages are seen');
select outbox.mark_sent(pg_temp.token(1), array[:restored]) as sent \gset

-- Transaction ids of another cluster.
update outbox.horizon set pending_id = 1, pending_xid = (pg_current_xact_id()::text::bigint + 1000000000)::text::xid8, version = version + 1;
select outbox.cleanup() as cleaned \gset
select is((select pending_xid from outbox.horizon), null, 'a pending transaction of the future is forgotten');
update outbox.horizon set noted_id = 1, noted_xids = array[pg_current_xact_id(), (pg_current_xact_id()::text::bigint + 1000000000)::text::xid8], version = version + 1;
select outbox.cleanup() as cleaned \gset
select is((select noted_xids from outbox.horizon), null, 'a noted one too');
update outbox.horizon set pending_id = 1, pending_xid = pg_current_xact_id(), noted_id = 1, noted_xids = array[pg_current_xact_id()], version = version + 1;
select outbox.cleanup() as cleaned \gset
select is((select array[pending_xid, noted_xids[1]] from outbox.horizon), array[pg_current_xact_id(), pg_current_xact_id()], 'our own are kept');

-- Held for nobody.
delete from outbox.message;
select outbox.emit('held', '1', key => 'k') as held \gset
update outbox.message set due_at = 'infinity';
select is(pg_temp.claim(1), '', 'a held message of a key not known as held');
select outbox.cleanup() as cleaned \gset
select is(pg_temp.claim(1), 'held', 'is let go by the sweep');
select outbox.mark_sent(pg_temp.token(1), array[:held]) as sent, outbox.emit('head', '1', key => 'k') as head, outbox.emit('behind', '1', key => 'k') as behind \gset
select pg_temp.claim(1, 1) as claimed, outbox.mark_failed(pg_temp.token(1), array[:head], array['x']) as failed, pg_temp.claim(1) as none \gset
delete from outbox.message where id = :head;
select outbox.cleanup() as cleaned \gset
select is(pg_temp.claim(1), 'behind', 'and what waits for a message that somebody deleted');

select * from finish();
rollback;
