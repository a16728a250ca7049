-- Conditions that the stories of the other files do not need, one by one: each is here because without it no test would fail.
\ir setup.psql
select plan(165);

-- Claims; the routing keys in order.
create function pg_temp.claim(n integer, batch_size integer = 500, relay bigint = null) returns text language sql as $$
    select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
    from outbox.claim_batch(pg_temp.token(n), batch_size, relay => relay) with ordinality as c;
$$;
create function pg_temp.settle(n integer) returns integer language sql as $$
    select outbox.mark_sent(pg_temp.token(n), array(select unnest(l.handed) from outbox.lane as l where l.token = pg_temp.token(n)));
$$;
create temporary table lane_key on commit drop as
select hashtextextended('k' || k, 0) & 63 as lane, array_agg('k' || k order by k) as keys from generate_series(1, 2000) as k group by 1;
create function pg_temp.key_of(lane integer, nth integer = 1) returns text language sql as 'select k.keys[$2] from lane_key as k where k.lane = $1';
create function pg_temp.lane(n integer) returns outbox.lane language sql as 'select l from outbox.lane as l where l.lane = n';
create procedure pg_temp.look_again() language sql as $$
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
$$;
create procedure pg_temp.expire() language sql as $$
    update outbox.lane set leased_until = clock_timestamp() - interval '1 ms' where token is not null;
$$;
create procedure pg_temp.start_over() language sql as $$
    delete from outbox.message;
    delete from outbox.held_key;
    delete from outbox.dead_letter;
    delete from outbox.dedup;
    update outbox.lane
    set token = null, relay = null, leased_until = null, handed = '{}', suspects = '{}', trial = 0, kills = 0, version = 1000;
    call pg_temp.look_again();
$$;
create function pg_temp.due_checked_at() returns timestamptz language sql as 'select due_checked_at from outbox.horizon';

-- Emit.
select throws_ok(call, code, null, rule)
from (values
    ($$select outbox.emit('a', '1', properties => '{"reply_to": 1}')$$, 'OB003', 'reply_to that is no string'),
    ($$select outbox.emit('a', '1', eta => '-infinity')$$, 'OB005', 'eta before all time'),
    ($$select outbox.emit_many('["payload"]')$$, 'OB006', 'emit_many() of a string that is named like a field'),
    ($$select outbox.emit_many('[["payload"]]')$$, 'OB006', 'emit_many() of a list that holds the name of a field'),
    ($$select outbox.emit_many('[{"routing_key": "a", "body": "", "content_type": ""}]')$$, 'OB002', 'emit_many() with an empty content_type'),
    (format($$select outbox.emit_many('[{"routing_key": "a", "body": "", "content_type": "%s"}]')$$, repeat('x', 256)), 'OB002', 'emit_many() with a content_type of 256 bytes')
) as v (call, code, rule);
select throws_ok(
    $$select outbox.emit_many('[{"routing_key": "a", "payload": 1}, {"b": 1}, {"c": 1}]')$$, 'OB006', 'messages[1] is not a message', 'of several the first is named'
);
create role outbox_tap_guest;
grant usage on schema outbox to outbox_tap_guest;
grant execute on all functions in schema outbox to outbox_tap_guest;
set session authorization outbox_tap_guest;
select outbox.emit('plain', '1') as plain, outbox.emit('full', '1', headers => '{"a": 1}') as full, outbox.emit_many('[{"routing_key": "many", "payload": 1}]') as many \gset
reset session authorization;
select is((select emitted_by from outbox.message where routing_key = name), 'outbox_tap_guest', 'emitted_by is who logged in: ' || name)
from unnest(array['plain', 'full', 'many']) as name;

-- A key whose window is over belongs to whoever emitted with it last.
call pg_temp.start_over();
select outbox.emit('first', '1', dedup_key => 'd') as first \gset
update outbox.dedup set created_at = created_at - interval '2 h';
select outbox.emit('second', '1', dedup_key => 'd') as second \gset
select ok(outbox.cancel(:first), 'the first message with a key is cancelled');
select is(outbox.emit('third', '1', dedup_key => 'd'), :second::bigint, 'the second keeps the key');

-- Which lock makes a relay.
select pg_advisory_lock(4294967298 * 3), pg_advisory_lock(7, 9), pg_advisory_lock_shared(77) \g /dev/null
select is(outbox._holds(key), held, rule)
from (values
    (4294967298 * 3, true, 'the lock that is held'),
    (4294967298 * 3 + 1, false, 'one with another lower half'),
    (4294967298 * 3 + 4294967296, false, 'one with another upper half'),
    ((7::bigint << 32) | 9, false, 'one of two numbers is another lock'),
    (77, false, 'a shared one is somebody else''s question')
) as v (key, held, rule);

-- Claim: bounds over several lanes.
call pg_temp.start_over();
select outbox.emit('m', '1', key => pg_temp.key_of(lane)) from generate_series(1, 3) as lane, generate_series(1, 3) \g /dev/null
select is((select count(*) from outbox.claim_batch(pg_temp.token(1), 4)), 4::bigint, 'batch_size counts over all lanes');
select is(outbox.mark_sent(pg_temp.token(1), array(select id from outbox.message)), 4, 'and no more are in flight');

-- Claim: what it writes down about its look for due messages.
call pg_temp.start_over();
select outbox.emit('later', '1', delay => '1 h') as later \gset
select is(pg_temp.claim(1), '', 'an idle claim');
select is(pg_temp.due_checked_at(), '-infinity', 'writes nothing down');
delete from outbox.message;
select outbox.emit('ready', '1') as ready \gset
select is(pg_temp.claim(1), 'ready', 'a claim that finds nothing due');
-- else each would walk what an old snapshot keeps of those that were
select isnt(pg_temp.due_checked_at(), '-infinity', 'says that it has looked');
select pg_temp.settle(1) as settled \gset
update outbox.horizon set due_checked_at = clock_timestamp() + interval '1 min', version = version + 1;
select pg_temp.due_checked_at() as looked, outbox.emit('ready', '1') as ready \gset
select is(pg_temp.claim(1), 'ready', 'a claim that does not look');
select is(pg_temp.due_checked_at(), :'looked', 'does not say that it has looked');
select pg_temp.settle(1) as settled, outbox.emit('due', '1', delay => '1 h') as due \gset
update outbox.message set due_at = clock_timestamp();
delete from outbox.horizon;
select is(pg_temp.claim(1), 'due', 'without a horizon it looks');
select pg_temp.settle(1) as settled from outbox._sweep() \gset

-- Claim: a key that holds nothing any more costs a look, no lease.
call pg_temp.start_over();
insert into outbox.held_key (lane, key) values (1, pg_temp.key_of(1));
select is(pg_temp.claim(1, relay => 42), '', 'a held key without messages');
select is((select array[token::text, relay::text] from pg_temp.lane(1)), array[null, null], 'its lane stays free');
select is((select count(*) from outbox.held_key), 0::bigint, 'and the key is forgotten');

-- Claim: the lease of a dead relay is cut, and no other.
call pg_temp.start_over();
select outbox.emit('a', '1', key => pg_temp.key_of(1)) as a, outbox.emit('b', '1', key => pg_temp.key_of(2)) as b \gset
select length(pg_temp.claim(1, relay => 42)) as claimed \gset
update outbox.lane set relay = null where lane = 2;
update outbox.lane set version = 2000 where lane in (1, 2);
select is(pg_temp.claim(2), '', 'two lanes are leased, one of them to a dead relay');
select is(
    (select array_agg(leased_until < clock_timestamp() + interval '4 s' order by lane) from outbox.lane where lane in (1, 2)), array[true, false], 'only that one is cut'
);

-- Claim: about every other one begins with a suspect. The turns are known: 3, 4, 5 ...; lane 1 comes before lane 2 in each.
create function pg_temp.claims(times integer, died boolean) returns text language plpgsql as $function$
declare
    v_claimed text := '';
begin
    for n in 1..times loop
        v_claimed := v_claimed || ' ' || pg_temp.claim(1000 + n, relay => 42);
        if died then
            call pg_temp.expire();
        else
            perform outbox.release_batch(pg_temp.token(1000 + n));
        end if;
    end loop;
    return v_claimed;
end
$function$;
call pg_temp.start_over();
select outbox.emit('other', '1', key => pg_temp.key_of(1)) as other, outbox.emit('suspect', '1', key => pg_temp.key_of(2)) as suspect \gset
update outbox.lane set suspects = array[:suspect], trial = 1 where lane = 2;
select setseed(0.5), setval('outbox.lane_turn', 64 * 1000 + 2) as turn \gset
select is(
    (select array_agg(distinct c) from unnest(string_to_array(trim(pg_temp.claims(40, false)), ' ')) as c),
    array['other', 'suspect'], 'suspects and others both get their turns when they are given back'
);

-- Alone: with empty hands, and nothing beside it.
call pg_temp.start_over();
select outbox.emit('s1', '1', key => pg_temp.key_of(2)) as s1, outbox.emit('s2', '1', key => pg_temp.key_of(2)) as s2 \gset
select is(pg_temp.claim(1, relay => 42), 's1 s2', 'a relay dies with two messages in its hands');
call pg_temp.expire();
select outbox.emit('other', '1', key => pg_temp.key_of(1)) as other \gset
update outbox.lane set token = pg_temp.token(9), leased_until = clock_timestamp() + interval '1 min', relay = 43, handed = array[:other] where lane = 1;
select is(pg_temp.claim(2, relay => 43), '', 'a relay that holds something does not get them');
select is((select row(suspects, trial, kills, token)::text from pg_temp.lane(2)), format('("{%s,%s}",1,0,)', :s1, :s2), 'but they are suspected from now on');
select is(pg_temp.claim(2, relay => 43), '', 'nor does it get anything else, while they wait');
select is(pg_temp.claim(3, relay => 44), 's1', 'a relay with empty hands gets half of them');
select outbox.emit('third', '1', key => pg_temp.key_of(3)) as third \gset
select is(pg_temp.claim(4, relay => 44), '', 'and nothing beside them');
select is(pg_temp.claim(4, relay => 43), 'third', 'which is nothing to other relays');
select pg_temp.settle(3) as settled \gset
select is(pg_temp.claim(5, relay => 44), 's2', 'when it has settled them it gets the other half');
select pg_temp.settle(5) as settled \gset
select is((select row(suspects, kills)::text from pg_temp.lane(2)), '({},0)', 'and then the lane is like any other');

call pg_temp.start_over();
select
    outbox.emit('held', '1', key => pg_temp.key_of(1)) as held,
    outbox.emit('suspect', '1', key => pg_temp.key_of(2)) as suspect,
    outbox.emit('third', '1', key => pg_temp.key_of(3)) as third
\gset
update outbox.lane set token = pg_temp.token(1), leased_until = clock_timestamp() + interval '1 min', relay = 43, handed = array[:held] where lane = 1;
update outbox.lane
set token = pg_temp.token(2), leased_until = clock_timestamp() - interval '1 s', handed = array[:suspect], suspects = array[:suspect], trial = 1
where lane = 2;
select is(pg_temp.claim(3, relay => 43), '', 'a lease of suspects that has ended: a relay that holds something gets nothing');

call pg_temp.start_over();
select
    outbox.emit('held', '1', key => pg_temp.key_of(1)) as held,
    outbox.emit('suspect', '1', key => pg_temp.key_of(2)) as suspect,
    outbox.emit('third', '1', key => pg_temp.key_of(3)) as third
\gset
update outbox.lane set token = pg_temp.token(1), leased_until = clock_timestamp() + interval '1 min', relay = 43, handed = array[:held] where lane = 1;
update outbox.lane set suspects = array[:suspect], trial = 1 where lane = 2;
select is(pg_temp.claim(3, relay => 43), '', 'nor while suspects wait in a free lane');

-- A claim that found suspects leaves the turn to others as it was.
call pg_temp.start_over();
update outbox.lane set suspects = array[0], trial = 1 where lane = 2;
select outbox.emit('far', '1', key => pg_temp.key_of(20)) as far, setval('outbox.lane_turn', 64 * 1000) as turn \gset
select is(pg_temp.claim(1), 'far', 'a claim passes by suspects that are gone');
select is((select last_value from outbox.lane_turn), 64 * 1000 + 1::bigint, 'and the next one begins where it would have begun');

-- Whose message found no room is first in turn, whatever followed it.
call pg_temp.start_over();
create function pg_temp.claim_100(n integer) returns text language sql as $$
    select string_agg(c.routing_key, ' ' order by c.ordinality) from outbox.claim_batch(pg_temp.token(n), max_bytes => 100) with ordinality as c;
$$;
select
    outbox.emit('before', '1', key => pg_temp.key_of(10)) as before,
    outbox.emit('large', to_jsonb(repeat('x', 200)), key => pg_temp.key_of(11)) as large,
    outbox.emit('after', '1', key => pg_temp.key_of(12)) as after,
    setval('outbox.lane_turn', 64 * 1000 + 9) as turn
\gset
select is(pg_temp.claim_100(1), 'before after', 'a large message does not fit beside another');
select is(pg_temp.settle(1), 2, 'those beside it leave');
select outbox.emit('before', '1', key => pg_temp.key_of(10)) as before \gset
select is(pg_temp.claim_100(2), 'large', 'then it is the first, and others wait for it');

-- Suspects that are gone, in a lane with nothing else: they hold up nobody for longer than a claim.
call pg_temp.start_over();
update outbox.lane set suspects = array[0], trial = 1 where lane = 2;
select is(pg_temp.claim(1, relay => 43), '', 'nothing is left of the suspects');
select is((select suspects from pg_temp.lane(2)), '{}', 'and nothing is suspected any more');

-- Suspects say nothing of the ready messages before them.
call pg_temp.start_over();
update outbox.lane set floor = 0, reach = 0;
select outbox.emit('ready', '1', key => pg_temp.key_of(1)) as ready, outbox.emit('due', '1', key => pg_temp.key_of(1, 2), delay => '1 h') as due \gset
update outbox.message set due_at = clock_timestamp() - interval '1 s' where id = :due;
update outbox.lane set suspects = array[:due], trial = 1 where lane = 1;
select is(pg_temp.claim(1), 'due', 'a suspect whose time has come');
select is(pg_temp.settle(1), 1, 'is settled');
select is(pg_temp.claim(2), 'ready', 'and what was emitted before it leaves');

-- Between the look that takes messages and the one that reads them another may be committed, but none up to the proven id. All others
-- are read by their places.
create function pg_temp.places(safe_id bigint, look_due boolean = false) returns text language sql as $$
    select format('%s of %s', cardinality(p.tids), cardinality(p.ids))
    from outbox.lane as l
    cross join lateral outbox._take(l, 500, 1000000, true, clock_timestamp(), look_due, safe_id) as p
    where l.lane = 1;
$$;
call pg_temp.start_over();
update outbox.lane set floor = 0, reach = 0;
select
    outbox.emit('m1', '1', key => pg_temp.key_of(1)) as m1,
    outbox.emit('due', '1', key => pg_temp.key_of(1, 2), delay => '1 h') as due,
    outbox.emit('m2', '1', key => pg_temp.key_of(1)) as m2
\gset
select is(pg_temp.places(:m2), '0 of 2', 'all that is ready, and proven: a stretch of the index');
select is(pg_temp.places(:m2 - 1), '2 of 2', 'one of them is not proven');
select is(pg_temp.places(null), '2 of 2', 'nothing is proven');
update outbox.message set due_at = clock_timestamp() - interval '1 s' where id = :due;
select is(pg_temp.places(:m2, look_due => true), '1 of 3', 'one of them was due');
update outbox.horizon set safe_id = :m2, version = version + 1;
call pg_temp.look_again();
select is(pg_temp.claim(1), 'due m1 m2', 'by its place, then by the index: in the order to publish them');
select outbox.release_batch(pg_temp.token(1)) as released \gset
update outbox.message set due_at = clock_timestamp() + interval '1 h' where id = :due;
call pg_temp.look_again();
select is(pg_temp.claim(2), 'm1 m2', 'by the index: what is not ready stays');
call pg_temp.start_over();
select setval('outbox.lane_turn', 64) as turn \gset
select
    outbox.emit('m1', '1', key => pg_temp.key_of(1)) as m1,
    outbox.emit('elsewhere', '1', key => pg_temp.key_of(2)) as elsewhere,
    outbox.emit('m2', '1', key => pg_temp.key_of(1)) as m2
\gset
update outbox.horizon set safe_id = :m2, version = version + 1;
select is(pg_temp.claim(1, 2), 'm1 m2', 'so does what is in another lane');

-- Where there is room for one, the one that was due first, and of those the first.
create function pg_temp.small_claim(batch_size integer) returns text language sql as $$
    select string_agg(c.routing_key, ' ') from outbox.claim_batch(pg_temp.token(1), batch_size, max_bytes => 1) as c;
$$;
call pg_temp.start_over();
select outbox.emit('m' || n, '1', key => pg_temp.key_of(1, n), delay => '1 h') from generate_series(1, 3) as n \g /dev/null
update outbox.message set due_at = clock_timestamp() - case when routing_key = 'm1' then interval '1 s' else interval '2 s' end;
update outbox.message set due_at = (select due_at from outbox.message where routing_key = 'm2') where routing_key = 'm3';
select is(pg_temp.small_claim(500), 'm2', 'the first of those that were due first');

-- What is not handed out takes up neither room nor a place among the lanes of a claim. From lane 2 on to lane 1.
call pg_temp.start_over();
select setval('outbox.lane_turn', 65) as turn \gset
insert into outbox.held_key (lane, key, head_id) values (2, pg_temp.key_of(2), 0);
select outbox.emit('behind', '1', key => pg_temp.key_of(2)) from generate_series(1, 2) \g /dev/null
select outbox.emit('m1', '1', key => pg_temp.key_of(2, 2)), outbox.emit('m2', '1', key => pg_temp.key_of(1)) \g /dev/null
select is(pg_temp.small_claim(2), 'm1', 'what is held takes up no room, what is not does');
call pg_temp.start_over();
select setval('outbox.lane_turn', 65) as turn \gset
select outbox.emit('expired', '1', key => pg_temp.key_of(n), expires_in => '1 h') from generate_series(2, 20) as n \g /dev/null
update outbox.message set expires_at = clock_timestamp() - interval '1 s';
select outbox.emit('m1', '1', key => pg_temp.key_of(1)) \g /dev/null
select is(pg_temp.claim(1), 'm1', 'behind 19 lanes with nothing but what has expired');

-- The first suspect that may leave, as it would leave otherwise.
create function pg_temp.suspects(ids bigint[], died integer = 3, together integer = 1, quota integer = 500, room bigint = 1000000)
    returns text language sql as $$
    select format('%s of %s, %s', p.ids, p.suspects, p.kills)
    from outbox.lane as l
    cross join lateral outbox._take_suspects(
        jsonb_populate_record(l, jsonb_build_object('suspects', ids, 'trial', together, 'kills', died)), quota, room, clock_timestamp()
    ) as p
    where l.lane = 1;
$$;
call pg_temp.start_over();
select
    outbox.emit('elsewhere', '1', key => pg_temp.key_of(2)) as elsewhere,
    outbox.emit('head', '1', key => pg_temp.key_of(1)) as head,
    outbox.emit('later', '1', key => pg_temp.key_of(1, 2), delay => '1 h') as later,
    outbox.emit('held', '1', key => pg_temp.key_of(1)) as held,
    outbox.emit('lost', '1', key => pg_temp.key_of(1, 3)) as lost,
    outbox.emit('behind', '1', key => pg_temp.key_of(1)) as behind,
    outbox.emit('free', '1', key => pg_temp.key_of(1, 4)) as free,
    outbox.emit('expired', '1', key => pg_temp.key_of(1, 5), expires_in => '1 h') as expired
\gset
insert into outbox.held_key (lane, key, head_id) values (1, pg_temp.key_of(1), :head);
update outbox.message set due_at = 'infinity' where id in (:held, :lost);
select is(pg_temp.suspects(array[:free]), format('{%s} of {%s}, 3', :free, :free), 'a ready one is handed out, and no other message');
select is(pg_temp.suspects(array[:later, :free]), format('{%s} of {%s}, 0', :free, :free), 'one before its time is passed by, and what it was accused of');
select is(pg_temp.suspects(array[:held, :free]), format('{%s} of {%s}, 0', :free, :free), 'so is one that is held');
select is(pg_temp.suspects(array[:lost, :free]), format('{%s} of {%s}, 0', :free, :free), 'and one whose key is not known as held');
select is(pg_temp.suspects(array[:behind, :free]), format('{%s} of {%s}, 0', :free, :free), 'and a ready one behind a failing one');
update outbox.message set due_at = clock_timestamp() - interval '1 s' where id in (:later, :head);
select is(pg_temp.suspects(array[:later, :free]), format('{%s} of {%s,%s}, 3', :later, :later, :free), 'one whose time has come is handed out');
select is(pg_temp.suspects(array[:later, :free], together => 2, quota => 1), format('{%s} of {%s,%s}, 3', :later, :later, :free), 'no more than the batch takes');
select is(pg_temp.suspects(array[:later, :free], together => 2, room => 1), format('{%s} of {%s,%s}, 3', :later, :later, :free), 'no more than there is room for');
select is(pg_temp.suspects(array[:later, :free], together => 2, room => 0), format('{%s} of {%s,%s}, 3', :later, :later, :free), 'but the first, however large');
select is(pg_temp.suspects(array[:head, :free]), format('{%s} of {%s,%s}, 3', :head, :head, :free), 'so is the failing one itself');
update outbox.held_key set head_id = null;
select is(pg_temp.suspects(array[:held, :free]), format('{%s} of {%s,%s}, 3', :held, :held, :free), 'and one that was held, when nothing is before it any more');
update outbox.message set expires_at = clock_timestamp() where id = :expired;
select is(pg_temp.suspects(array[:expired, :free]), format('{%s} of {%s}, 0', :free, :free), 'one past its time is passed by');
select is((select array_agg(reason) from outbox.dead_letter where id = :expired), array['expired'], 'and dead');
select is(pg_temp.suspects(array[:expired, 0]), '{} of {}, 0', 'when none is left the lane is no longer suspect');

-- Due at the same time: in the order of emission.
create function pg_temp.ids_of(names text[]) returns bigint[] language sql as $$
    select array_agg(m.id order by m.id) from outbox.message as m where m.routing_key = any (names);
$$;
create procedure pg_temp.fail(n integer, names text[], after interval = '0') language sql as $$
    select outbox.mark_failed(
        pg_temp.token(n), pg_temp.ids_of(names), array_fill('x'::text, array[cardinality(names)]), retry_in => array_fill(after, array[cardinality(names)])
    );
    call pg_temp.look_again();
$$;
call pg_temp.start_over();
select outbox.emit('e' || n, '1', key => pg_temp.key_of(1), eta => clock_timestamp() + interval '1 h') from generate_series(1, 3) as n \g /dev/null
update outbox.message set due_at = clock_timestamp() - interval '1 s';
update outbox.message set due_at = (select min(due_at) from outbox.message);
select is(pg_temp.claim(1, 1), 'e1', 'of three that are due at the same time the first');
select pg_temp.settle(1) as settled \gset
call pg_temp.look_again();
select is(pg_temp.claim(1), 'e2 e3', 'then the others, in order');

-- A message fails: what its key has in the same hands, and what not.
call pg_temp.start_over();
select
    outbox.emit('delayed', '1', key => pg_temp.key_of(1), delay => '1 h') as delayed,
    outbox.emit('other', '1', key => pg_temp.key_of(1, 2)) as other,
    outbox.emit('older', '1', key => pg_temp.key_of(1)) as older,
    outbox.emit('failed', '1', key => pg_temp.key_of(1)) as failed,
    outbox.emit('after', '1', key => pg_temp.key_of(1)) as after,
    outbox.emit('due', '1', key => pg_temp.key_of(1, 3)) as due,
    outbox.emit('due too', '1', key => pg_temp.key_of(1, 4)) as due_too
\gset
select is(pg_temp.claim(1), 'other older failed after due due too', 'six are handed out');
call pg_temp.fail(1, '{due,due too}');
call pg_temp.fail(1, '{failed}');
select ok((select due_at > clock_timestamp() + interval '30 min' from outbox.message where id = :delayed), 'an older one that waits for its time goes on waiting');
select is(
    (select array_agg(routing_key order by id) from outbox.message where due_at is null), array['other'], 'another key stays as it is, a newer one stands behind'
);
select is((select due_at from outbox.message where id = :after), 'infinity', 'it waits for the one that failed, not for a time');
select outbox.release_batch(pg_temp.token(1)) as released \gset
select is(pg_temp.claim(1), 'due due too older failed other', 'an older one comes back before it, a newer one waits');

call pg_temp.start_over();
select outbox.emit('older', '1', key => pg_temp.key_of(1)) as older, outbox.emit('head', '1', key => pg_temp.key_of(1), delay => '1 h') as head \gset
insert into outbox.held_key (lane, key, head_id) values (1, pg_temp.key_of(1), :head);
select is(pg_temp.claim(1), 'older', 'a ready one that is older than the head of its key does not wait for it');
call pg_temp.start_over();
select
    outbox.emit('first', '1', key => pg_temp.key_of(1)) as first, outbox.emit('second', '1', key => pg_temp.key_of(1), delay => '1 h') as second \gset
insert into outbox.held_key (lane, key) values (1, pg_temp.key_of(1));
update outbox.message set due_at = case id when :first then 'infinity' else clock_timestamp() end;
select is(pg_temp.claim(1), 'first second', 'one whose time has come stays behind what its key still holds');

-- Keys that go on and keys that wait, in one lane.
call pg_temp.start_over();
select outbox.emit(letter || n, '1', key => pg_temp.key_of(1, ascii(letter) - 96)) from generate_series(1, 2) as n, unnest(array['a', 'b', 'c']) as letter \g /dev/null
select outbox.emit('elsewhere', '1', key => pg_temp.key_of(2), delay => '1 h') as elsewhere, pg_temp.claim(1) as claimed \gset
call pg_temp.fail(1, '{a1,a2,b1,b2,c1,c2}');
update outbox.message set due_at = clock_timestamp() + interval '1 h' where routing_key = 'c1';
select is(pg_temp.claim(1), 'a1 b1', 'the heads of two keys come again, that of the third does not');
select pg_temp.settle(1) as settled \gset
select pg_temp.claim(1, 1) as one \gset
select is((select count(*) from outbox.message where xmax::text = pg_current_xact_id()::xid::text and routing_key = 'elsewhere'), 0::bigint, 'a claim of what was held locks nothing else');
select pg_temp.settle(1) as settled, pg_temp.claim(1) as other \gset
select is(array[least(:'one', :'other'), greatest(:'one', :'other')], array['a2', 'b2'], 'what waited behind the two leaves, a key at a time');
select pg_temp.settle(1) as settled, pg_temp.claim(1) as claimed \gset
select is(:'claimed'::text, '', 'what is behind the third waits');
select is((select array_agg(key) from outbox.held_key), array[pg_temp.key_of(1, 3)], 'and its key is known as held');

-- Ready messages of a held key among others: what a claim reads, takes and leaves.
create procedure pg_temp.hold() language plpgsql as $function$
begin
    call pg_temp.start_over();
    perform outbox.emit('head', '1', key => pg_temp.key_of(1));
    insert into outbox.held_key (lane, key, head_id) select m.lane, m.key, m.id from outbox.message as m;
    update outbox.message set due_at = clock_timestamp() + interval '1 h';
end
$function$;
-- One message for each name; those that begin with "a" are behind the head; x is 1, o is 100 bytes.
create procedure pg_temp.emit(names text) language sql as $$
    select outbox.emit_bytes(
        name, convert_to(repeat('x', case when name like '%o' then 100 else 1 end), 'UTF8'),
        key => case when name like 'a%' then pg_temp.key_of(1) else pg_temp.key_of(1, 2) end
    )
    from unnest(string_to_array(names, ' ')) as name;
$$;
create function pg_temp.claim_bytes(batch_size integer, max_bytes bigint) returns text language sql as $$
    select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
    from outbox.claim_batch(pg_temp.token(1), batch_size, max_bytes => max_bytes) with ordinality as c;
$$;
call pg_temp.hold();
call pg_temp.emit('a1 a2 a3 b1 b2 b3');
select is(pg_temp.claim(1, 2), 'b1 b2', 'a batch behind more than a batch of a held key');
call pg_temp.hold();
call pg_temp.emit('a1 b1 b2 b3');
select is(pg_temp.claim(1, 2), 'b1', 'a batch comes from one look, though a part of that has to go behind');
call pg_temp.hold();
call pg_temp.emit('a1');
select outbox.emit_bytes('c' || n, 'xxx', key => pg_temp.key_of(2)), setval('outbox.lane_turn', 64 + 0) from generate_series(1, 2) as n \g /dev/null
select is(pg_temp.claim_bytes(3, 4), 'c1', 'a lane in which all goes behind uses up no room, and makes none');
call pg_temp.hold();
call pg_temp.emit('a1 bo b2o b3 b4');
select is(pg_temp.claim_bytes(3, 150), 'bo', 'what finds no room is not overtaken in a later step');
select pg_temp.settle(1) as settled \gset
select is(pg_temp.claim_bytes(3, 150), 'b2o b3 b4', 'and comes next');
call pg_temp.hold();
call pg_temp.emit('a1 a2 b1');
update outbox.message set expires_at = clock_timestamp() where routing_key = 'a1';
select is(pg_temp.claim(1), 'b1', 'one past its time behind a head frees nobody');
select is((select string_agg(routing_key, ' ' order by id) from outbox.message), 'head a1 a2 b1', 'and waits like the others until it is its turn');

-- The bound of bytes counts what is due, too.
call pg_temp.start_over();
call pg_temp.emit('do o');
update outbox.message set due_at = clock_timestamp() where routing_key = 'do';
select is(pg_temp.claim_bytes(3, 150), 'do', 'a due message leaves no room for a ready one');
-- A burial concerns the messages at hand.
call pg_temp.start_over();
select outbox.emit('one', '1', key => pg_temp.key_of(1), expires_in => '1 h') as one, outbox.emit('two', '1', key => pg_temp.key_of(2), expires_in => '1 h') as two \gset
select pg_temp.claim(1, 1) as claimed \gset
update outbox.message set expires_at = clock_timestamp();
select is(pg_temp.claim(2), '', 'a claim finds a message past its time');
select is((select count(*) from outbox.message where routing_key = :'claimed'), 1::bigint, 'and leaves alone one that somebody else has in hand');

-- Which lock is the bell.
select outbox.disarm_wakeup() as disarmed, 'outbox.message'::regclass::oid::integer as bell \gset
select
    pg_advisory_lock(:bell, 2), pg_advisory_lock(:bell + 1, 1), pg_advisory_lock((:bell::bigint << 32) | 1), pg_advisory_lock_shared(:bell, 1)
\g /dev/null
select is((select count(*) from outbox._bell_holders()), 0::bigint, 'other locks with its numbers, and emits in flight, are no sleepers');

-- When to look again.
call pg_temp.start_over();
select outbox.emit('m', '1', key => pg_temp.key_of(1)) as m, pg_temp.claim(1) as claimed \gset
select is(outbox.next_due(), null, 'nothing waits behind what is in flight');
insert into outbox.held_key (lane, key) values (1, pg_temp.key_of(1, 2));
select is(outbox.next_due(), (select leased_until from pg_temp.lane(1)), 'a key that goes on waits for the lease of its lane');
select pg_temp.settle(1) as settled \gset
select cmp_ok(outbox.next_due(), '<=', clock_timestamp(), 'and for nothing when there is none');
update outbox.held_key set head_id = 0;
select outbox.emit('held', '1', key => pg_temp.key_of(1, 2)) as held \gset
update outbox.message set due_at = 'infinity';
select is(outbox.next_due(), null, 'a key that is held waits for no time');
select outbox.emit('later', '1', key => pg_temp.key_of(1), delay => '2 h') as later, outbox.emit('sooner', '1', key => pg_temp.key_of(1), delay => '1 h') as sooner \gset
select is(outbox.next_due(), (select due_at from outbox.message where id = :sooner), 'the earliest of a lane');
select outbox.configure('max_attempts', '5') as configured \gset
select is(outbox.next_due(), (select due_at from outbox.message where id = :sooner), 'whatever is configured');
select outbox.pause() as paused \gset
select is(outbox.next_due(), null, 'but nothing while it is paused');
select outbox.resume() as resumed, outbox.configure('max_attempts', null) as configured \gset
delete from outbox.message where id <> :sooner;
update outbox.message set due_at = clock_timestamp();
call pg_temp.look_again();
select is(pg_temp.claim(1), 'sooner', 'a due message is in flight');
select is(outbox.next_due(), null, 'then nobody waits for it');

-- The proof by xid: only a transaction that had no xid before can begin one, and this one has.
update outbox.horizon
set safe_id = 1, pending_id = null, pending_xid = null, noted_id = 2, noted_xids = '{}', moved_at = '-infinity', checked_at = '-infinity', version = version + 1;
select is(outbox.mark_sent(gen_random_uuid(), '{}'), 0, 'a settling call');
select is((select pending_id from outbox.horizon), null, 'in a transaction that has written begins no proof by xid');
select is((select safe_id from outbox.horizon), 2::bigint, 'it ends one by lock holders');
select cmp_ok((select moved_at from outbox.horizon), '>', clock_timestamp() - interval '1 min', 'and says when');
update outbox.horizon
set safe_id = 1, noted_id = 2, noted_xids = array[pg_current_xact_id()], noted_at = '-infinity', moved_at = '-infinity', checked_at = '-infinity', version = version + 1;
select outbox.mark_sent(gen_random_uuid(), '{}') as settled \gset
select is((select noted_id from outbox.horizon), 2::bigint, 'one under way is not begun anew');
update outbox.horizon
set noted_id = null, noted_xids = null, noted_at = clock_timestamp() + interval '1 min', moved_at = '-infinity', checked_at = '-infinity', version = version + 1;
select outbox.mark_sent(gen_random_uuid(), '{}') as settled \gset
select is((select noted_id from outbox.horizon), null, 'nor so soon after another');
savepoint later;
create temporary table later (n integer) on commit drop;
rollback to savepoint later;
select is(outbox._any_in_progress(xids), answer, rule)
from (values
    ('{}'::xid8[], false, 'none is in progress'),
    (array['3'::xid8], false, 'nor is one that has ended long ago'),
    (array[pg_current_xact_id()], true, 'this one is, and younger ones have ended'),
    (array['3'::xid8, '1000000000000'], true, 'so is one that is still to come')
) as v (xids, answer, rule);
select ok(not pg_current_xact_id() = any (outbox._emitter_xids()), 'the own transaction is not waited for');

-- How often: soon while there is something to prove, later when only the floors are to be noted.
create function pg_temp.looked_again(pending bigint, ago interval) returns boolean language plpgsql as $$
declare
    v_then timestamptz := clock_timestamp() - ago;
begin
    update outbox.horizon as h
    set safe_id = 1, pending_id = pending, pending_xid = pg_current_xact_id(), checked_at = v_then, version = h.version + 1;
    perform outbox.mark_sent(gen_random_uuid(), '{}');
    return (select h.checked_at <> v_then from outbox.horizon as h);
end
$$;
-- (Five times each: the server may take its time between two statements.)
select is(not exists (select from generate_series(1, 5) where not pg_temp.looked_again(pending, ago)), looked, rule)
from (values
    (2, '21 ms'::interval, true, 'something is to be proven: after 20 ms'),
    (2, '-1 s', false, 'not before'),
    (1, '21 ms', false, 'nothing is: not so soon'),
    (1, '101 ms', true, 'but after 100 ms')
) as v (pending, ago, looked, rule);

-- Settling.
create function pg_temp.locked_lanes() returns bigint language sql as $$
    select count(*) from outbox.lane as l where l.xmax::text = pg_current_xact_id()::xid::text;
$$;
select pg_temp.locked_lanes() as locked \gset
select outbox.extend_lease(pg_temp.token(2), '1 min'), outbox.release_batch(pg_temp.token(2)), outbox.mark_sent(pg_temp.token(2), '{1}') \g /dev/null
select is(pg_temp.locked_lanes(), :locked::bigint, 'a token that holds nothing locks nothing');
call pg_temp.start_over();
select outbox.emit('m' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 3) as n \g /dev/null
select outbox.emit('other', '1', key => pg_temp.key_of(2)) as other, length(pg_temp.claim(1, relay => 42)) as claimed \gset
select is(outbox.mark_sent(pg_temp.token(1), pg_temp.ids_of('{m2}')), 1, 'one of a lane is settled');
select is((select relay from pg_temp.lane(1)), 42::bigint, 'the lane still knows its relay');
select set_config('outbox.relay', '', true) as relay, outbox.extend_lease(pg_temp.token(1), '1 min') as extended \gset
select is((select relay from pg_temp.lane(1)), 42::bigint, 'extended by a session that is no relay: the same');
update outbox.lane set relay = null;
select set_config('outbox.relay', '43', true) as relay, outbox.extend_lease(pg_temp.token(1), '1 min') as extended \gset
select is((select relay from pg_temp.lane(1)), null, 'a lease without a relay stays without one');
select is(outbox.release_batch(pg_temp.token(1)), 3, 'released: two of one lane and one of another');

-- The floor of a lane that is given back.
call pg_temp.start_over();
update outbox.lane set floor = 0, reach = 0;
update outbox.horizon set safe_id = 0, noted_id = null, noted_xids = null, checked_at = clock_timestamp() + interval '1 min', version = version + 1;
select outbox.emit('m1', '1', key => pg_temp.key_of(1)) as m1, pg_temp.claim(1) as claimed, outbox.release_batch(pg_temp.token(1)) as released \gset
select is((select floor from pg_temp.lane(1)), 1::bigint, 'it stays where nothing is proven');
update outbox.horizon set safe_id = 5, version = version + 1;
update outbox.message set due_at = clock_timestamp();
call pg_temp.look_again();
select is(pg_temp.claim(1), 'm1', 'a due message is handed out');
select outbox.release_batch(pg_temp.token(1)) as released \gset
select is((select floor from pg_temp.lane(1)), 6::bigint, 'and given back: it follows the proof, and no further');

-- The first suspect is settled: the next ones are accused of nothing, and stay in order.
call pg_temp.start_over();
select outbox.emit('s1', '1', key => pg_temp.key_of(1)) as s1, outbox.emit('s2', '1', key => pg_temp.key_of(1)) as s2, outbox.emit('s3', '1', key => pg_temp.key_of(1)) as s3 \gset
update outbox.lane set suspects = array[:s1, :s2, :s3], trial = 1, kills = 3 where lane = 1;
select is(pg_temp.claim(1), 's1', 'the first suspect is handed out');
select pg_temp.settle(1) as settled \gset
select is((select row(suspects, kills) from pg_temp.lane(1))::text, format('("{%s,%s}",0)', :s2, :s3), 'and settled: the count begins anew');

-- Dead and parked.
select throws_ok(
    $$select outbox.mark_failed(gen_random_uuid(), '{1}', '{x}', retry_in => '{10 years 1 us}')$$, 'OB011', 'retry_in must lie between 0 and 10 years', 'retry_in over 10 years'
);
create function pg_temp.head_of(key text) returns bigint language sql as 'select k.head_id from outbox.held_key as k where k.key = $1';
select outbox.configure('on_dead', 'park') as configured \gset
call pg_temp.start_over();
select
    outbox.emit('none', '1') as none,
    outbox.emit('p1', '1', key => pg_temp.key_of(1)) as p1, outbox.emit('p2', '1', key => pg_temp.key_of(1)) as p2, outbox.emit('p3', '1', key => pg_temp.key_of(1)) as p3,
    outbox.emit('q1', '1', key => pg_temp.key_of(1, 2)) as q1, outbox.emit('q2', '1', key => pg_temp.key_of(1, 2)) as q2
\gset
select outbox._bury(array[:none], '{rejected}', '{x}', 1) \g /dev/null
select is((select parked from outbox.dead_letter where id = :none), false, 'a message without a key parks nothing');
select outbox._bury(array[:p1, :q1, :q2], '{rejected,rejected,rejected}', '{x,x,x}', 1) \g /dev/null
select outbox._bury(array[:p3], '{expired}', null, 0) \g /dev/null
select outbox._bury(array[:p2], '{expired}', null, 0) \g /dev/null
select is(pg_temp.head_of(pg_temp.key_of(1)), :p1::bigint, 'a key waits for the first that died');
update outbox.dead_letter set dead_at = clock_timestamp() - interval '1 h' where id = :p1;
select is(outbox.purge_dead('30 min'), 1, 'that is purged');
select is(pg_temp.head_of(pg_temp.key_of(1)), :p2::bigint, 'then it waits for the next');
update outbox.dead_letter set dead_at = clock_timestamp() - interval '1 h' where key = pg_temp.key_of(1);
select is(outbox.purge_dead('30 min'), 2, 'all are purged');
select is(pg_temp.head_of(pg_temp.key_of(1)), null, 'then for nothing, whatever other keys wait for');
select is(pg_temp.head_of(pg_temp.key_of(1, 2)), :q1::bigint, 'and they still do');
select outbox.configure('on_dead', null) as configured \gset
select outbox._purge_dead(clock_timestamp() + interval '1 h', 1) as purged \gset
select is((select array_agg(id order by id) from outbox.dead_letter), array[:q1, :q2]::bigint[], 'the longest dead go first');

-- What a failure changes, and what not.
create procedure pg_temp.hand_out(n integer, ids bigint[]) language sql as $$
    update outbox.lane
    set token = pg_temp.token(n), leased_until = clock_timestamp() + interval '1 min', handed = ids, version = version + 1
    where lane = 1;
$$;
create function pg_temp.state(name text) returns text language sql as $$
    select case m.due_at when 'infinity' then 'held' else case when m.due_at is null then 'ready' else 'due' end end || ' ' || m.attempts
    from outbox.message as m
    where m.routing_key = name;
$$;
call pg_temp.start_over();
select outbox.emit('keyless', '1') as keyless \gset
update outbox.message set lane = 1;
select
    outbox.emit('a1', '1', key => pg_temp.key_of(1)) as a1, outbox.emit('a2', '1', key => pg_temp.key_of(1)) as a2,
    outbox.emit('b1', '1', key => pg_temp.key_of(1, 2)) as b1, outbox.emit('b2', '1', key => pg_temp.key_of(1, 2)) as b2,
    outbox.emit('foreign', '1', key => pg_temp.key_of(2)) as foreign
\gset
update outbox.message set attempts = 9 where id = :foreign;
call pg_temp.hand_out(1, array[:keyless, :a2, :b1]);
select is(outbox.mark_failed(pg_temp.token(1), array[:keyless, :a2, :b1, :foreign], '{x,x,x,x}', '{null,null,null,rejected}'), 3, 'three of four are failed by who has them');
select is(pg_temp.state('keyless'), 'due 1', 'one without a key waits for its time');
select is(pg_temp.state('a2'), 'due 1', 'so does the first of a key');
select is(pg_temp.state('foreign'), 'ready 9', 'what somebody else has is left alone');
call pg_temp.hand_out(1, array[:a1, :b2]);
select is(outbox.mark_failed(pg_temp.token(1), array[:a1, :b2], '{x,x}'), 2, 'an older one of the first key fails, a newer one of the second');
select is(
    array(select name || ' ' || pg_temp.state(name) from unnest(array['a1', 'a2', 'b1', 'b2', 'foreign']) as name),
    array['a1 due 1', 'a2 held 1', 'b1 due 1', 'b2 held 1', 'foreign ready 9'], 'each key waits for its oldest, and no other message'
);

-- The sweep lets go of keys that wait for nothing, and of no other.
select outbox._sweep() \g /dev/null
select is(array[pg_temp.head_of(pg_temp.key_of(1)), pg_temp.head_of(pg_temp.key_of(1, 2))], array[:a1, :b1]::bigint[], 'it leaves a key that waits for a failing message');
select outbox.configure('on_dead', 'park') as configured, outbox._bury(array[:foreign], '{rejected}', '{x}', 1) as buried, outbox.configure('on_dead', null) as configured_too \gset
insert into outbox.held_key (lane, key, head_id) values (3, pg_temp.key_of(3), 0);
select outbox._sweep() \g /dev/null
select is(pg_temp.head_of(pg_temp.key_of(2)), :foreign::bigint, 'and one that waits for a dead one');
select is(pg_temp.head_of(pg_temp.key_of(3)), null, 'but not one that waits for nothing');
update outbox.dead_letter set parked = false;
select outbox._sweep() \g /dev/null
select is(pg_temp.head_of(pg_temp.key_of(2)), null, 'nor for a dead one that holds nothing');
-- The sequence was set back: nothing that was noted before holds.
update outbox.horizon set safe_id = 1000000000000, noted_id = 1000000000000, noted_xids = '{}', version = version + 1;
update outbox.lane set reach = 1000000000000;
select outbox._sweep() \g /dev/null
select is((select noted_id from outbox.horizon), null, 'a proof by lock holders is forgotten');
select is((select max(reach) from outbox.lane), 0::bigint, 'and how far claims in flight had read');
-- A floor that is too high: the sweep lowers what a claim has read, and never raises it.
select outbox.emit('low', '1', key => pg_temp.key_of(2)) as low \gset
update outbox.lane set floor = :low + 1, reach = 7 where lane = 2;
select outbox._sweep() \g /dev/null
select is((select array[floor, reach] from outbox.lane where lane = 2), array[:low, 7]::bigint[], 'a reach below the message found stays');

-- Going back to the default concerns one setting.
select outbox.configure('max_attempts', '5') as one, outbox.configure('retry_jitter', '0') as other, outbox.configure('max_attempts', null) as back \gset
select outbox.pause() as paused, outbox.resume() as resumed \gset
select is((select array_agg(name || ' ' || value) from outbox.setting), array['retry_jitter 0'], 'the others stay as they are');
select ok(not (outbox.stats()).paused, 'and none of them is a pause');
select throws_ok(format('select outbox.configure(%L, %L)', name, value), 'OB020', format('value cannot be taken for %s', name), format('%s %s', name, value))
from (values ('dedup_window', '999999 us'), ('dedup_window', '365 days 1 us'), ('retention', '-1 us'), ('dead_retention', '-1 us')) as v (name, value);

select * from finish();
rollback;
