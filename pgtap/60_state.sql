-- Station 60: stats() and message_status tell the same about every message.
\ir setup.psql
select plan(75);

create function pg_temp.claim(n integer, batch_size integer = 500, lease interval = '30 s') returns text language plpgsql as $function$
begin
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
    return (
        select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
        from outbox.claim_batch(pg_temp.token(n), batch_size, lease) with ordinality as c
    );
end
$function$;
-- Another key of the same lane.
create function pg_temp.beside(key text) returns text language sql as $$
    select 'k' || n from generate_series(1, 1000) as n where hashtextextended('k' || n, 0) & 63 = hashtextextended(key, 0) & 63 order by n limit 1;
$$;
create function pg_temp.status(name text) returns text language sql as $$
    select string_agg(s.status, ' ' order by s.id) from outbox.message_status as s where s.routing_key = name;
$$;
-- What stats() counts, by the words of message_status; and the same counted there.
create function pg_temp.counted() returns jsonb language sql as $$
    select jsonb_build_object(
        'waiting', s.waiting, 'scheduled', s.scheduled, 'in_flight', s.in_flight, 'retrying', s.retrying, 'parked', s.parked, 'dead', s.dead
    )
    from outbox.stats() as s;
$$;
create function pg_temp.listed() returns jsonb language sql as $$
    select jsonb_object_agg(w.word, (select count(*) from outbox.message_status as s where s.status = w.word))
    from unnest('{waiting,scheduled,in_flight,retrying,parked,dead}'::text[]) as w (word);
$$;
create function pg_temp.say(variadic counts integer[]) returns jsonb language sql as $$
    select jsonb_build_object(
        'waiting', counts[1], 'scheduled', counts[2], 'in_flight', counts[3], 'retrying', counts[4], 'parked', counts[5], 'dead', counts[6]
    );
$$;

-- Nothing.
select is(pg_temp.counted(), pg_temp.say(0, 0, 0, 0, 0, 0), 'nothing');
select is(
    (
        select to_jsonb(s) - '{waiting,scheduled,in_flight,retrying,parked,dead,relays}'::text[] from outbox.stats() as s
    ),
    '{"oldest_age": "00:00:00", "exact": true, "sent_last_hour": 0, "mean_time_to_send": null, "worst_time_to_send": null,
      "top_failing": [], "oldest_emitter_pid": null, "oldest_emitter_at": null, "paused": false}',
    'and nothing to say of it'
);
select outbox.pause() as paused \gset
select ok((outbox.stats()).paused, 'a pause is told');
select outbox.resume() as resumed \gset
select is((select count(*) from outbox.message_status), 0::bigint, 'the view is empty');

-- One message through its stations.
select outbox.emit('a', '{"secret": 1}', exchange => 'x', key => 'k') as a \gset
select is(pg_temp.status('a'), 'waiting', 'emitted: waiting');
select is(pg_temp.counted(), pg_temp.say(1, 0, 0, 0, 0, 0), 'counted');
select is(
    (select to_jsonb(s) - '{message_id,created_at}'::text[] from outbox.message_status as s),
    jsonb_build_object(
        'id', :a, 'status', 'waiting', 'exchange', 'x', 'routing_key', 'a', 'key', 'k', 'due_at', null, 'settled_at', null, 'attempts', 0,
        'reason', null, 'error', null, 'emitted_by', session_user
    ),
    'what the view tells, and no payload'
);
select is(pg_temp.claim(1), 'a', 'claimed');
select is(pg_temp.status('a'), 'in_flight', 'in flight');
select is(pg_temp.counted(), pg_temp.say(0, 0, 1, 0, 0, 0), 'counted');
update outbox.lane set leased_until = clock_timestamp() - interval '1 ms' where token is not null;
select is(pg_temp.status('a'), 'waiting', 'a lease that ran out: waiting');
select is(pg_temp.counted(), pg_temp.say(1, 0, 0, 0, 0, 0), 'counted');
select outbox.mark_failed(pg_temp.token(1), array[:a], array['no']) as failed \gset
select is(pg_temp.status('a'), 'retrying', 'refused: retrying');
select is(pg_temp.counted(), pg_temp.say(0, 0, 0, 1, 0, 0), 'counted');
select is((select array[s.attempts::text, s.error, (s.due_at > clock_timestamp())::text] from outbox.message_status as s), '{1,no,true}', 'with the error, and when it is tried again');
update outbox.message set due_at = clock_timestamp();
select is(pg_temp.status('a'), 'retrying', 'still so when it is due');
select outbox.emit('behind', '1', key => 'k') as behind \gset
select is(pg_temp.claim(1, 1), 'a', 'it is tried again');
select is(pg_temp.status('a') || ' ' || pg_temp.status('behind'), 'in_flight waiting', 'what follows waits for its turn');
select outbox.mark_failed(pg_temp.token(1), array[:a], array['never'], array['rejected']) as failed \gset
select is(pg_temp.status('a'), 'dead', 'refused for good: dead');
select is(pg_temp.counted(), pg_temp.say(1, 0, 0, 0, 0, 1), 'counted');
select is(
    (select array[s.reason, s.error, (s.settled_at <= clock_timestamp())::text] from outbox.message_status as s where s.id = :a), '{rejected,never,true}',
    'with the reason, and when'
);
select is(outbox.requeue_dead(array[:a]), 1, 'requeued');
select is(pg_temp.status('a'), 'waiting', 'waiting again');
select outbox.configure('retention', '1 day') as configured \gset
select is(pg_temp.claim(1) || ' ' || outbox.mark_sent(pg_temp.token(1), array[:a]), 'a 1', 'sent at last');
select is(pg_temp.claim(1) || ' ' || outbox.mark_sent(pg_temp.token(1), array[:behind]), 'behind 1', 'and the one behind it');
select is(pg_temp.status('a'), 'sent', 'sent');
select ok((select s.settled_at <= clock_timestamp() from outbox.message_status as s where s.id = :a), 'with the time');
select is(pg_temp.counted(), pg_temp.say(0, 0, 0, 0, 0, 0), 'and not counted any more');
select outbox.configure('retention', null) as configured \gset
delete from outbox.archive;

-- Waiting for a time.
select outbox.emit('later', '1', delay => '1 h') as later, outbox.emit('soon', '1', delay => '1 h') as soon \gset
select is(pg_temp.status('later'), 'scheduled', 'delayed: scheduled');
update outbox.message set due_at = clock_timestamp() where id = :soon;
select is(pg_temp.status('soon'), 'waiting', 'its time has come: waiting');
select is(pg_temp.counted(), pg_temp.say(1, 1, 0, 0, 0, 0), 'counted');
select is(pg_temp.claim(1), 'soon', 'claimed');
select outbox.mark_failed(pg_temp.token(1), array[:soon], array['busy'], counts => false) as failed \gset
select is(pg_temp.status('soon'), 'retrying', 'put off without counting an attempt: retrying');
select is(pg_temp.counted(), pg_temp.say(0, 1, 0, 1, 0, 0), 'counted');
select is((select s.oldest_age from outbox.stats() as s), interval '0', 'what waits for a time has no age yet');
delete from outbox.message;

-- A failing key, and a parked one.
select outbox.emit('h1', '1', key => 'k') as h1, outbox.emit('h2', '1', key => 'k') as h2, outbox.emit('h3', '1', key => 'k') as h3 \gset
select pg_temp.claim(1, 2) as claimed, outbox.mark_failed(pg_temp.token(1), array[:h1, :h2], array['x', 'x']) as failed, pg_temp.claim(2) as held \gset
select is(concat_ws(' ', pg_temp.status('h1'), pg_temp.status('h2'), pg_temp.status('h3')), 'retrying retrying waiting', 'behind a failing message: waiting, unless it failed itself');
select is((select s.due_at from outbox.message_status as s where s.id = :h3), null, 'held for no set time');
select is(pg_temp.counted(), pg_temp.say(1, 0, 0, 2, 0, 0), 'counted');
select outbox.configure('on_dead', 'park') as configured \gset
select outbox._bury(array[:h1], array['rejected'], array['x'], 1) as buried, outbox.emit('h4', '1', key => 'k') as h4 \gset
select is(
    concat_ws(' ', pg_temp.status('h1'), pg_temp.status('h2'), pg_temp.status('h3'), pg_temp.status('h4')), 'dead parked parked parked',
    'behind a dead letter: parked, also what was just emitted'
);
select is(pg_temp.counted(), pg_temp.say(0, 0, 0, 0, 3, 1), 'counted');
select is((select s.oldest_age from outbox.stats() as s), interval '0', 'what is parked cannot leave: it has no age');
select outbox.emit('z1', '1', key => pg_temp.beside('k')) as z1, outbox.emit('z2', '1', key => pg_temp.beside('k')) as z2 \gset
select ok((select s.oldest_age > interval '0' from outbox.stats() as s), 'what is behind it in the lane has');
select pg_temp.claim(3, 1) as claimed, outbox.mark_failed(pg_temp.token(3), array[:z1], array['x']) as failed, pg_temp.claim(3) as held \gset
select is(pg_temp.status('z1') || ' ' || pg_temp.status('z2'), 'retrying waiting', 'another key of the lane is not parked');
select is(pg_temp.counted(), pg_temp.say(1, 0, 0, 1, 3, 1), 'counted');
delete from outbox.message where id in (:z1, :z2);
select outbox.purge_dead('0') as purged \gset
select is(pg_temp.listed(), pg_temp.counted(), 'purged: both agree again');
select is((select s.parked from outbox.stats() as s), 0::bigint, 'nothing is parked any more');
delete from outbox.message;
delete from outbox.held_key;

-- The age of the oldest.
select outbox.emit('old', '1', key => 'a') as old, outbox.emit('young', '1', key => 'b') as young, outbox.emit('later', '1', delay => '1 h') as later \gset
update outbox.message set created_at = clock_timestamp() - case id when :old then interval '5 min' when :later then interval '1 day' else interval '1 min' end;
insert into outbox.message (lane, message_id, routing_key, content_type, created_at, emitted_by, body)
select m.lane, gen_random_uuid(), 'extra', 't', clock_timestamp(), 'x', '' from outbox.message as m where m.id = :old;
select ok((select s.oldest_age between '5 min' and '6 min' from outbox.stats() as s), 'oldest_age: of what could leave now');
delete from outbox.message where routing_key = 'extra';
select pg_temp.claim(1) as claimed \gset
select ok((select s.oldest_age between '5 min' and '6 min' from outbox.stats() as s), 'what is in flight has not left');
update outbox.message set due_at = clock_timestamp() - interval '10 min' where id = :later;
insert into outbox.message (lane, due_at, message_id, routing_key, content_type, created_at, emitted_by, body)
select m.lane, clock_timestamp() - interval '1 min', gen_random_uuid(), 'extra', 't', clock_timestamp(), 'x', '' from outbox.message as m where m.id = :later;
select ok((select s.oldest_age between '10 min' and '11 min' from outbox.stats() as s), 'what was due, since it was');
delete from outbox.message where routing_key = 'extra';

-- How sending goes.
delete from outbox.tally;
delete from outbox.tally_minute;
select outbox.mark_sent(pg_temp.token(1), array[:old, :young]) as sent \gset
select is((select s.sent_last_hour from outbox.stats() as s), 2::bigint, 'sent in the last hour');
select ok((select s.mean_time_to_send between '3 min' and '4 min' from outbox.stats() as s), 'mean time to send');
select ok((select s.worst_time_to_send between '5 min' and '6 min' from outbox.stats() as s), 'and the worst');
select is(pg_temp.claim(1), 'later', 'a delayed message');
select is(outbox.mark_sent(pg_temp.token(1), array[:later]), 1, 'is sent');
select ok((select s.worst_time_to_send between '10 min' and '11 min' from outbox.stats() as s), 'its time counts from when it was due');
select is((select s.sent_last_hour from outbox.stats() as s), 3::bigint, 'one more');
select outbox.emit('again', '1', delay => '1 h') as again \gset
update outbox.message set created_at = clock_timestamp() - interval '20 min', due_at = clock_timestamp() - interval '1 min', attempts = 1 where id = :again;
select is(pg_temp.claim(1) || ' ' || outbox.mark_sent(pg_temp.token(1), array[:again]), 'again 1', 'one that was refused before');
select ok((select s.worst_time_to_send between '20 min' and '21 min' from outbox.stats() as s), 'took from its emit until now');
delete from outbox.tally where worst > '15 min';
insert into outbox.tally_minute (minute_at, until_at, sent, took, worst)
values
    (date_trunc('minute', clock_timestamp()) - interval '58 min', clock_timestamp() - interval '58 min', 10, '10 min', '2 h'),
    (clock_timestamp() - interval '61 min', clock_timestamp() - interval '61 min', 100, '10 days', '1 day');
select is((select (s.sent_last_hour, s.worst_time_to_send)::text from outbox.stats() as s), '(13,02:00:00)', 'minutes of the last hour count');
insert into outbox.tally (settled_at, first_id, sent, took, worst) values (clock_timestamp() - interval '61 min', 1, 1000, '1 s', '1 day');
select is((select s.sent_last_hour from outbox.stats() as s), 13::bigint, 'what is older does not');
delete from outbox.tally_minute;
select is((select sent_last_hour from outbox.stats()), (select sum(sent) from outbox.tally where first_id <> 1)::bigint, 'nor before any minute was folded');
delete from outbox.tally;
delete from outbox.tally_minute;
insert into outbox.tally (settled_at, first_id, sent, took, worst) values (clock_timestamp() - interval '2 min', 1, 7, '7 s', '1 s'), (clock_timestamp(), 2, 1, '1 s', '1 s');
select outbox.cleanup() as cleaned \gset
select is((select (s.sent_last_hour, s.mean_time_to_send, s.worst_time_to_send)::text from outbox.stats() as s), '(8,00:00:01,00:00:01)', 'folding into minutes changes nothing');

-- The failing routing keys.
insert into outbox.dead_letter (id, dead_at, reason, lane, message_id, routing_key, content_type, created_at, attempts, emitted_by, parked, body)
select -n, clock_timestamp(), 'rejected', 0, gen_random_uuid(), 'r' || ceil(sqrt(n)), 't', clock_timestamp(), 1, 'x', false, '' from generate_series(1, 144) as n;
insert into outbox.dead_letter (id, dead_at, reason, lane, message_id, routing_key, content_type, created_at, attempts, emitted_by, parked, body)
select -1000 - n, clock_timestamp(), 'rejected', 0, gen_random_uuid(), case when n > 23 then 'r5b' else 'tie' end, 't', clock_timestamp(), 1, 'x', false, ''
from generate_series(1, 32) as n;
insert into outbox.message (lane, due_at, message_id, routing_key, content_type, created_at, emitted_by, attempts, body)
select 5, clock_timestamp() + interval '1 h', gen_random_uuid(), 'r1', 't', clock_timestamp(), 'x', 1, '' from generate_series(1, 100);
insert into outbox.message (lane, message_id, routing_key, content_type, created_at, emitted_by, body)
select 5, gen_random_uuid(), 'fine', 't', clock_timestamp(), 'x', '' from generate_series(1, 200);
select is((select s.top_failing -> 0 from outbox.stats() as s), '{"routing_key": "r1", "retrying": 100, "dead": 1}', 'the routing key with most comes first');
select is(
    (select string_agg(f ->> 'routing_key', ' ' order by n) from outbox.stats() as s, jsonb_array_elements(s.top_failing) with ordinality as f (f, n)),
    'r1 r12 tie r11 r10 r9 r8 r7 r6 r5', 'ten of them, equals by name'
);
delete from outbox.dead_letter;
delete from outbox.message;

-- Exact to 10,000.
insert into outbox.message (lane, message_id, routing_key, content_type, created_at, emitted_by, body)
select n % 64, gen_random_uuid(), 'many', 't', clock_timestamp(), 'x', '' from generate_series(1, 10000) as n;
select is((select (s.waiting, s.exact)::text from outbox.stats() as s), '(10000,t)', '10,000 are counted');
insert into outbox.message (lane, message_id, routing_key, content_type, created_at, emitted_by, body)
select n % 64, gen_random_uuid(), 'many', 't', clock_timestamp(), 'x', '' from generate_series(1, 10000) as n;
insert into outbox.message (lane, due_at, message_id, routing_key, content_type, created_at, emitted_by, body)
select n % 64, clock_timestamp() + interval '1 h', gen_random_uuid(), 'many', 't', clock_timestamp(), 'x', '' from generate_series(1, 10) as n;
select is((select (s.waiting between 13000 and 27000, s.scheduled, s.exact)::text from outbox.stats() as s), '(t,10,f)', 'more are estimated; what can be counted is counted');
update outbox.message set due_at = clock_timestamp() + interval '1 h';
select is((select (s.waiting, s.scheduled between 13000 and 27000, s.exact)::text from outbox.stats() as s), '(0,t,f)', 'so for what is scheduled');
update outbox.message set due_at = 'infinity';
select is((select (s.waiting between 13000 and 27000, s.scheduled, s.exact)::text from outbox.stats() as s), '(t,0,f)', 'so for what is held');
delete from outbox.message;
insert into outbox.dead_letter (id, dead_at, reason, lane, message_id, routing_key, content_type, created_at, attempts, emitted_by, parked, body)
select -n, clock_timestamp() - n * interval '1 s', 'rejected', 0, gen_random_uuid(), case when n > 10000 then 'old' else 'new' end, 't', clock_timestamp(), 1, 'x', false, ''
from generate_series(1, 20000) as n;
select is((select (s.dead >= 10001, s.exact)::text from outbox.stats() as s), '(t,f)', 'so for dead letters');
analyze outbox.dead_letter;
select is((select s.dead from outbox.stats() as s), 20000::bigint, 'as far as analyze knows');
select is((select s.top_failing from outbox.stats() as s), '[{"routing_key": "new", "retrying": 0, "dead": 10000}]', 'the last 10,000 of them tell which routing keys fail');
delete from outbox.dead_letter;
select is((select (s.dead, s.exact)::text from outbox.stats() as s), '(0,t)', 'purged, whatever analyze said');

-- Relays.
select s.relays as before from outbox.stats() as s \gset
select outbox.hello('tap') as relay \gset
select is((select s.relays - :before from outbox.stats() as s), 1, 'a relay that said hello() is counted');
select pg_advisory_unlock(:relay) as unlocked \gset
select is((select s.relays - :before from outbox.stats() as s), 0, 'until its session gives up its lock');

select is((select s.oldest_emitter_pid from outbox.stats() as s), null, 'one''s own transaction is not in the way');

select * from finish();
rollback;
