-- Station 20: what claim_batch() hands out, to whom, in which order; hello, the doorbell and when to look again.
\ir setup.psql

-- An older snapshot would not see what others settled: only read committed will do.
rollback;
begin isolation level repeatable read;
\ir refusal.psql
select
    pg_temp.refusal('select outbox.claim_batch(gen_random_uuid())') as claim_batch,
    pg_temp.refusal('select outbox.hello(''x'')') as hello
\gset
rollback;
begin isolation level serializable;
\ir refusal.psql
select pg_temp.refusal('select outbox.claim_batch(gen_random_uuid())') as claim_batch_serializable \gset
rollback;

\ir setup.psql
select plan(121);

-- Claims; the routing keys in order.
create function pg_temp.claim(n integer, batch_size integer = 500, max_bytes bigint = 8388608, relay bigint = null) returns text language sql as $$
    select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
    from outbox.claim_batch(pg_temp.token(n), batch_size, max_bytes => max_bytes, relay => relay) with ordinality as c;
$$;
-- Settles all that a token holds.
create function pg_temp.settle(n integer) returns integer language sql as $$
    select outbox.mark_sent(pg_temp.token(n), array(select unnest(l.handed) from outbox.lane as l where l.token = pg_temp.token(n)));
$$;
-- A key of a lane; the second one of it, and so on.
create temporary table lane_key on commit drop as
select hashtextextended('k' || k, 0) & 63 as lane, array_agg('k' || k order by k) as keys from generate_series(1, 2000) as k group by 1;
create function pg_temp.key_of(lane integer, nth integer = 1) returns text language sql as 'select k.keys[$2] from lane_key as k where k.lane = $1';
create function pg_temp.lane(n integer) returns outbox.lane language sql as 'select l from outbox.lane as l where l.lane = n';
-- Claims look for due messages every 100 ms: the next one looks.
create procedure pg_temp.look_again() language sql as $$
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
$$;
-- Every lease is over, by the clock.
create procedure pg_temp.expire() language sql as $$
    update outbox.lane set leased_until = clock_timestamp() - interval '1 ms' where token is not null;
$$;
-- As if nothing had happened.
create procedure pg_temp.start_over() language sql as $$
    delete from outbox.message;
    delete from outbox.held_key;
    delete from outbox.dead_letter;
    update outbox.lane
    set token = null, relay = null, leased_until = null, handed = '{}', suspects = '{}', trial = 0, kills = 0, version = version + 1;
    call pg_temp.look_again();
$$;

-- Arguments.
select is(answer, 'OB010 isolation level must be read committed', rule)
from (values
    (:'claim_batch', 'claim_batch() in repeatable read'), (:'claim_batch_serializable', 'claim_batch() in serializable'), (:'hello', 'hello() in repeatable read')
) as v (answer, rule);
select throws_ok(format('select * from outbox.claim_batch(gen_random_uuid(), %s)', arguments), code, message, 'claim_batch: ' || arguments)
from (values
    ('batch_size => 0', 'OB011', 'batch_size must lie between 1 and 10000'),
    ('batch_size => 10001', 'OB011', 'batch_size must lie between 1 and 10000'),
    ('batch_size => null', 'OB011', 'batch_size must lie between 1 and 10000'),
    ('lease => ''999999 us''', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('lease => ''1 h 1 us''', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('lease => null', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('max_bytes => 0', 'OB011', 'max_bytes must be positive'),
    ('max_bytes => null', 'OB011', 'max_bytes must be positive')
) as v (arguments, code, message);
select throws_ok('select * from outbox.claim_batch(null)', 'OB001', 'token must not be null', 'claim_batch: no token');
select lives_ok(format('select * from outbox.claim_batch(gen_random_uuid(), %s)', arguments), 'claim_batch: ' || arguments)
from unnest(array['1, ''1 s'', 1', '10000, ''1 h'', 9223372036854775807']) as arguments;
select is(pg_temp.claim(1), '', 'nothing waits: nothing is claimed');
select is((select count(*) from outbox.lane where token is not null), 0::bigint, 'and no lane leased');

-- The doorbell, before anything has rung it.
create function pg_temp.bell() returns text language sql as $$
    select string_agg(l.mode, ' ' order by l.mode)
    from pg_locks as l
    where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.classid = 'outbox.message'::regclass and l.objid = 1 and l.objsubid = 2;
$$;
set local outbox.notify = 'off';
select outbox.emit('quiet', '1') as id \gset
select is(pg_temp.bell(), null, 'outbox.notify off: the doorbell is not touched');
set local outbox.notify = 'on';
select ok(outbox.arm_wakeup(), 'nobody emits: armed');
select is(pg_temp.bell(), 'ExclusiveLock', 'by a lock of the session');
select ok(outbox.arm_wakeup(), 'armed already: armed');
select lives_ok('select outbox.disarm_wakeup()', 'disarmed');
select is(pg_temp.bell(), null, 'once, however often it was armed');
select lives_ok('select outbox.disarm_wakeup()', 'disarmed when not armed');
select outbox.emit('loud', '1') as id \gset
select is(pg_temp.bell(), 'ShareLock', 'an emit holds its side of the doorbell until its transaction ends');

-- What is handed out.
call pg_temp.start_over();
select outbox.emit('plain', '{"a": 1}', key => pg_temp.key_of(5)) as plain \gset
select outbox.emit_bytes(
    'full', '\x00ff', 'text/plain', key => pg_temp.key_of(5), headers => '{"h": 1}', exchange => 'x', expires_in => '1 h',
    message_id => '11111111-1111-4111-8111-111111111111', properties => '{"priority": 3}'
) as id \gset
create temporary table claimed on commit drop as select * from outbox.claim_batch(pg_temp.token(1));
select is(
    (select to_jsonb(c) - '{message_id,created_at}'::text[] from claimed as c where routing_key = 'plain'),
    jsonb_build_object(
        'id', :plain, 'exchange', 'outbox', 'routing_key', 'plain', 'key', pg_temp.key_of(5), 'body', convert_to('{"a": 1}', 'UTF8'),
        'content_type', 'application/json', 'headers', null, 'properties', null, 'expires_in', null, 'attempts', 0
    ), 'a plain message; default_exchange stands in for no exchange'
);
select is(
    (select to_jsonb(c) - '{id,expires_in,created_at}'::text[] from claimed as c where routing_key = 'full'),
    jsonb_build_object(
        'message_id', '11111111-1111-4111-8111-111111111111', 'exchange', 'x', 'routing_key', 'full', 'key', pg_temp.key_of(5), 'body', '\x00ff'::bytea,
        'content_type', 'text/plain', 'headers', '{"h": 1}'::jsonb, 'properties', '{"priority": 3}'::jsonb, 'attempts', 0
    ), 'one with everything'
);
select ok(
    (select bool_and(c.message_id = m.message_id and c.created_at = m.created_at) from claimed as c join outbox.message as m using (id)),
    'message_id and created_at are those of the row'
);
select ok(
    (select expires_in < interval '1 h' and expires_in > interval '59 min' from claimed where routing_key = 'full'), 'expires_in is what is left'
);
select is(
    (select array[token::text, handed::text, relay::text] from pg_temp.lane(5)),
    array[pg_temp.token(1)::text, (select array_agg(id order by id)::text from claimed), null], 'the lane is leased to the token, with the ids it handed out'
);
select ok((select leased_until - clock_timestamp() between interval '20 s' and interval '30 s' from pg_temp.lane(5)), 'for 30 s');
select throws_ok(
    'select * from outbox.claim_batch(pg_temp.token(1))', 'OB012', 'token holds lanes already', 'a token that holds lanes may not claim again'
);
select is(pg_temp.claim(2), '', 'what is in flight is not handed out again');
select outbox.emit('behind', '1', key => pg_temp.key_of(5)) as id, outbox.emit('beside', '1', key => pg_temp.key_of(6)) as id2 \gset
select is(pg_temp.claim(2), 'beside', 'a leased lane waits, the others flow');
call pg_temp.expire();
delete from outbox.message where routing_key = 'beside';
select is(pg_temp.claim(3), 'plain full behind', 'the lease is over: they are handed out again, in order');
select is(pg_temp.settle(3), 3, 'and settled by the new token');
select is(pg_temp.claim(3), '', 'a token that has settled everything may claim again');
select outbox.configure('default_exchange', 'elsewhere') as configured, outbox.emit('a', '1') as id \gset
select is((select exchange from outbox.claim_batch(pg_temp.token(3))), 'elsewhere', 'default_exchange is looked up at the claim');
select outbox.configure('default_exchange', null) as configured \gset

-- Order.
call pg_temp.start_over();
select outbox.emit(format('%s%s', letter, n), '1', key => 'key ' || letter) from generate_series(1, 5) as n, unnest(array['a', 'b', 'c']) as letter \g /dev/null
select pg_temp.claim(1, 1000) as claimed \gset
select is(
    (select array_agg(w order by ordinality) from string_to_table(:'claimed', ' ') with ordinality as t (w, ordinality) where w like letter || '%'),
    array(select letter || n from generate_series(1, 5) as n), 'messages of a key leave in order: ' || letter
)
from unnest(array['a', 'b', 'c']) as letter;

-- Bounds: messages, bytes, lanes.
call pg_temp.start_over();
select outbox.emit('m' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 5) as n \g /dev/null
select is(pg_temp.claim(1, batch_size => 2), 'm1 m2', 'at most batch_size messages');
select is(pg_temp.claim(2, batch_size => 2), '', 'the rest of the lane waits with them');
select is(pg_temp.settle(1), 2, 'they are settled');
select is(pg_temp.claim(2, batch_size => 3), 'm3 m4 m5', 'and the rest follows');
call pg_temp.start_over();
select outbox.emit_bytes('b' || n, convert_to(repeat('x', 100), 'UTF8'), key => pg_temp.key_of(1)) from generate_series(1, 4) as n \g /dev/null
select is(pg_temp.claim(1, max_bytes => 299), 'b1 b2', 'at most max_bytes of bodies');
select pg_temp.settle(1) as settled \gset
select is(pg_temp.claim(1, max_bytes => 1), 'b3', 'at least one message, whatever its size');
select pg_temp.settle(1) as settled, outbox.emit_bytes('b4', convert_to(repeat('x', 100), 'UTF8'), key => pg_temp.key_of(2)) as id \gset
select is(pg_temp.claim(1, max_bytes => 199), 'b4', 'and that from one lane only');
call pg_temp.start_over();
create function pg_temp.claims_until(wanted text, busy integer[] = '{3}') returns integer language plpgsql as $function$
begin
    for n in 1..200 loop
        perform outbox.emit('small', '1', key => pg_temp.key_of(b.lane)) from unnest(busy) as b (lane);
        if pg_temp.claim(1, max_bytes => 1000) = wanted then
            return n;
        end if;
        perform pg_temp.settle(1);
    end loop;
    return null;
end
$function$;
select outbox.emit_bytes('big', convert_to(repeat('x', 1000), 'UTF8'), key => pg_temp.key_of(40)) as big \gset
select cmp_ok(pg_temp.claims_until('big'), '<=', 64, 'a message for which there is never room beside others gets its turn');
select pg_temp.settle(1) as settled, outbox.emit_bytes('big', convert_to(repeat('x', 1000), 'UTF8'), key => pg_temp.key_of(40)) as big \gset
select cmp_ok(pg_temp.claims_until('big', '{3,50}'), '<=', 2, 'at once, also between lanes that always have something');

-- Whose turn it is.
call pg_temp.start_over();
select outbox.emit('m', '1', key => pg_temp.key_of(lane)) from unnest(array[0, 63]) as lane, generate_series(1, 10) \g /dev/null
create function pg_temp.take_turns(times integer) returns void language plpgsql as $function$
begin
    for n in 1..times loop
        perform pg_temp.claim(1, batch_size => 1), pg_temp.settle(1);
    end loop;
end
$function$;
select pg_temp.take_turns(10) as turns \gset
select is(
    (select array_agg(c.left order by c.lane) from (select lane, count(*)::integer as left from outbox.message group by lane) as c), array[5, 5],
    'a lane that follows 62 empty ones gets no more turns than the other'
);
call pg_temp.start_over();
select outbox.emit('over', '1', key => pg_temp.key_of(5), expires_in => '1 h') as over, setval('outbox.lane_turn', 64 + 4) as turn \gset
update outbox.message set expires_at = clock_timestamp();
select is(pg_temp.claim(1), '', 'a lane with nothing to hand out');
select is(nextval('outbox.lane_turn') & 63, 6::bigint, 'has had its turn');
call pg_temp.start_over();
select outbox.emit('one', '1', key => pg_temp.key_of(lane)) from generate_series(0, 63) as lane \g /dev/null
select is(length(pg_temp.claim(n)), length('one') * 16 + 15, 'at most a quarter of the lanes for one claim: ' || n) from generate_series(1, 4) as n;
select is((select count(distinct token) from outbox.lane where token is not null), 4::bigint, 'every lane has been leased by the fourth');
call pg_temp.start_over();
select outbox.emit('lane' || n % 64, '1', key => pg_temp.key_of(n % 64)) from generate_series(0, 255) as n \g /dev/null
create function pg_temp.claim_and_settle() returns text language plpgsql as $function$
declare
    v_claimed text := pg_temp.claim(1, batch_size => 1);
begin
    perform pg_temp.settle(1);
    return v_claimed;
end
$function$;
select is(
    (select count(distinct pg_temp.claim_and_settle()) from generate_series(1, 64)), 64::bigint, 'no lane is served twice before all were served once'
);

-- Time.
call pg_temp.start_over();
select
    outbox.emit('ready', '1', key => pg_temp.key_of(1)) as ready,
    outbox.emit('second', '1', key => pg_temp.key_of(1, 2), delay => '1 h') as second,
    outbox.emit('first', '1', key => pg_temp.key_of(1, 3), delay => '1 h') as first
\gset
select is(pg_temp.claim(1), 'ready', 'a delayed message waits');
select pg_temp.settle(1) as settled \gset
update outbox.message set due_at = clock_timestamp() - case routing_key when 'first' then interval '2 s' else interval '1 s' end;
update outbox.horizon set due_checked_at = clock_timestamp() + interval '1 min', version = version + 1;
select is(pg_temp.claim(1), '', 'what is due is looked for every 100 ms');
update outbox.horizon set due_checked_at = clock_timestamp() - interval '101 ms', version = version + 1;
select is(pg_temp.claim(1, batch_size => 1), 'first', 'the one longest due comes first');
select outbox.release_batch(pg_temp.token(1)) as released \gset
select is(pg_temp.claim(1), 'first second', 'due messages leave in the order of their times; a full batch had left some');
select cmp_ok((select due_checked_at from outbox.horizon), '>', now(), 'and the next 100 ms begin');
select pg_temp.settle(1) as settled, outbox.emit('ready', '1', key => pg_temp.key_of(1)) as id, outbox.emit('due', '1', key => pg_temp.key_of(1, 2), delay => '1 h') as due \gset
update outbox.message set due_at = clock_timestamp() where id = :due;
call pg_temp.look_again();
select is(pg_temp.claim(1, batch_size => 1), 'due', 'a due message does not wait behind ready ones');
select pg_temp.settle(1) as settled \gset

-- Expiry.
call pg_temp.start_over();
select
    outbox.emit('expired', '1', key => pg_temp.key_of(1), expires_in => '1 h') as expired,
    outbox.emit('lives', '1', key => pg_temp.key_of(1), expires_in => '1 h') as lives,
    outbox.emit('due expired', '1', key => pg_temp.key_of(2), delay => '1 h', expires_in => '1 h') as due_expired
\gset
update outbox.message set expires_at = clock_timestamp() - interval '1 ms', due_at = case id when :due_expired then clock_timestamp() end
where id in (:expired, :due_expired);
select is(pg_temp.claim(1), 'lives', 'what has expired is not handed out');
select is(
    (select array_agg(array[id::text, reason, attempts::text, error] order by id) from outbox.dead_letter),
    array[array[:expired::text, 'expired', '0', null], array[:due_expired::text, 'expired', '0', null]], 'but dead, and says why'
);
select is((select count(*) from outbox.message), 1::bigint, 'and waits no more');
call pg_temp.start_over();
select outbox.configure('on_dead', 'park') as configured, outbox.emit('expired', '1', key => 'p', expires_in => '1 h') as expired, outbox.emit('parked', '1', key => 'p') as id \gset
update outbox.message set expires_at = clock_timestamp() where id = :expired;
select is(pg_temp.claim(1), '', 'on_dead park: what follows an expired message of its key waits');
select outbox.configure('on_dead', null) as configured \gset

-- Paused.
call pg_temp.start_over();
select outbox.emit('a', '1') as id, outbox.pause() as paused \gset
select is(pg_temp.claim(1), '', 'paused: nothing is handed out');
select outbox.resume() as resumed \gset
select is(pg_temp.claim(1), 'a', 'resumed: it is');
select pg_temp.settle(1) as settled \gset

-- The claim's commit is the fence behind emits with synchronous_commit off.
set local synchronous_commit = off;
select pg_temp.claim(1) as claimed \gset
select is(current_setting('synchronous_commit'), 'off', 'a claim of nothing need not sync');
select outbox.emit('a', '1') as id, pg_temp.claim(1) as claimed \gset
select is(current_setting('synchronous_commit'), 'on', 'one that hands out messages does');
select pg_temp.settle(1) as settled, outbox.emit('a', '1') as id \gset
set local synchronous_commit = remote_apply;
select pg_temp.claim(1) as claimed, pg_temp.settle(1) as settled \gset
select is(current_setting('synchronous_commit'), 'remote_apply', 'and no less than asked for');
set local synchronous_commit = on;

-- The floor: what a claim need not look at.
call pg_temp.start_over();
update outbox.lane set floor = 0, reach = 0, version = version + 1;
update outbox.horizon set safe_id = 0, version = version + 1;
select outbox.emit('f' || n, '1', key => pg_temp.key_of(9)) as id from generate_series(1, 3) as n \g /dev/null
select min(id) as f1 from outbox.message \gset
select pg_temp.claim(1) as claimed, pg_temp.settle(1) as settled \gset
select is((select floor from pg_temp.lane(9)), 1::bigint, 'the floor does not pass what is proven');
select outbox.emit('f' || n, '1', key => pg_temp.key_of(9)) as id from generate_series(4, 6) as n \g /dev/null
select max(id) as last from outbox.message \gset
update outbox.horizon set safe_id = :last - 1, version = version + 1;
select is(pg_temp.claim(1, batch_size => 1), 'f4', 'one of three');
select pg_temp.settle(1) as settled \gset
select is((select floor from pg_temp.lane(9)), :last - 1::bigint, 'the floor follows to the first unfinished message');
select pg_temp.claim(1) as claimed, outbox.release_batch(pg_temp.token(1)) as released \gset
select is((select floor from pg_temp.lane(9)), :last - 1::bigint, 'not past what was given back');
select is(pg_temp.claim(1), 'f5 f6', 'which is handed out again');
select pg_temp.settle(1) as settled \gset
select is((select floor from pg_temp.lane(9)), :last::bigint, 'and up to what is proven when all is settled');
delete from outbox.horizon;
select outbox.emit('h1', '1', key => pg_temp.key_of(9)) as id, pg_temp.claim(1) as claimed, pg_temp.settle(1) as settled,
    outbox.emit('h2', '1', key => pg_temp.key_of(9)) as id \gset
select is(pg_temp.claim(1), 'h2', 'without a horizon nothing is proven, and nothing lost');
select pg_temp.settle(1) as settled from outbox._sweep() \gset

-- hello() and the end of a relay. In one session nobody else holds a lock: a relay number of nobody is a dead relay.
select throws_ok('select outbox.hello(null)', 'OB001', 'name must not be null', 'hello() of null');
select throws_ok(format('select outbox.hello(%L)', name), 'OB002', 'name must have 1 to 255 bytes', 'hello() name ' || rule)
from (values ('', 'empty'), (repeat('é', 128), 'of 256 bytes')) as v (name, rule);
select outbox.hello('tap') as before \gset
select outbox.hello(repeat('é', 127) || 'x') as relay \gset
select is(
    (select array_agg((l.classid::bigint << 32) | l.objid::bigint) from pg_locks as l where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.objsubid = 1
     and l.mode = 'ExclusiveLock'),
    array[:relay::bigint], 'a session holds the life lock of its last hello()'
);
select is((select array_agg(relay) from outbox.relay), array[:relay::bigint], 'and is registered once');

call pg_temp.start_over();
select outbox.emit('a' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 3) as n \g /dev/null
select is(pg_temp.claim(1, relay => :relay), 'a1 a2 a3', 'a claim of a relay');
select is((select relay from pg_temp.lane(1)), :relay::bigint, 'its lanes know it');
select is(pg_temp.claim(2, relay => :relay), '', 'claiming again');
select cmp_ok((select leased_until from pg_temp.lane(1)), '>', clock_timestamp() + interval '20 s', 'does not shorten its own lease');
call pg_temp.expire();
select is(pg_temp.claim(2, relay => :relay), 'a1 a2 a3', 'its lease ran out while it lives');
select is((select suspects from pg_temp.lane(1)), '{}', 'and accuses nobody');
select outbox.release_batch(pg_temp.token(2)) as released \gset
select is(pg_temp.claim(1), 'a1 a2 a3', 'a claim without a relay');
call pg_temp.expire();
select pg_temp.claim(2) as claimed \gset
select is((select suspects from pg_temp.lane(1)), '{}', 'whose lease ran out accuses nobody either');
select outbox.release_batch(pg_temp.token(2)) as released \gset

select is(pg_temp.claim(1, relay => 42), 'a1 a2 a3', 'a relay claims and dies');
select is(pg_temp.claim(2, relay => :relay), '', 'the next claimer finds its life lock free');
select is(
    (select leased_until - clock_timestamp() between interval '0' and interval '3 s' from pg_temp.lane(1)), true, 'and shortens the lease to 3 s'
);
call pg_temp.expire();
select is(pg_temp.claim(2, relay => :relay), 'a1 a2', 'then half of its messages are handed out');
select is(pg_temp.settle(2), 2, 'which turn out harmless');
select is(pg_temp.claim(3, relay => :relay), 'a3', 'and then the other half');
select is(pg_temp.settle(3), 1, 'which is harmless, too');
create function pg_temp.claim_and_die(n integer) returns text language plpgsql as $function$
declare
    v_claimed text := pg_temp.claim(n, relay => 42);
begin
    call pg_temp.expire();
    return v_claimed;
end
$function$;
select outbox.emit('b' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 4) as n \g /dev/null
select is(pg_temp.claim_and_die(1), 'b1 b2 b3 b4', 'the lane is like any other again, and a relay dies with one that kills');
select is(pg_temp.claim_and_die(2), 'b1 b2', 'the next one dies with half of them');
select is(pg_temp.claim_and_die(10 + n), 'b1', format('and with a half of that, alone, %s of 5', n)) from generate_series(1, 5) as n;
select is(pg_temp.claim(6, relay => :relay), '', 'after the fifth it is not handed out again');
select is((select array[routing_key, reason] from outbox.dead_letter), array['b1', 'killed_relay'], 'it is dead');
select is(pg_temp.claim(6, relay => :relay), 'b2 b3 b4', 'and the others are suspected no longer');

-- What is suspect shares a batch with nothing of other lanes.
call pg_temp.start_over();
select outbox.emit('suspect', '1', key => pg_temp.key_of(1)) as id, pg_temp.claim_and_die(1) as claimed, outbox.emit('other', '1', key => pg_temp.key_of(40)) as id2 \gset
create function pg_temp.claims(times integer) returns text[] language plpgsql as $function$
declare
    v_claimed text[] := '{}';
begin
    for n in 1..times loop
        v_claimed := v_claimed || pg_temp.claim(1000 + n);
        perform outbox.release_batch(pg_temp.token(1000 + n));
    end loop;
    return array(select distinct c from unnest(v_claimed) as c order by 1);
end
$function$;
select is(pg_temp.claims(64), array['other', 'suspect'], 'a suspect is handed out alone, whichever lane the claim begins with');

-- The same for what leaves from behind a head that has got through.
call pg_temp.start_over();
select outbox.emit('c' || n, '1', key => pg_temp.key_of(1)) as id from generate_series(1, 3) as n \g /dev/null
select min(id) as head, array_agg(id) as ids from outbox.message \gset
select pg_temp.claim(1) as claimed, outbox.mark_failed(pg_temp.token(1), :'ids', array['x', 'x', 'x'], retry_in => array_fill(interval '0', array[3])) as failed \gset
call pg_temp.look_again();
select pg_temp.claim(1) as claimed, pg_temp.settle(1) as settled \gset
select is(pg_temp.claim_and_die(1), 'c2 c3', 'a relay dies with messages that were held');
select is(pg_temp.claim(2, relay => :relay), 'c2', 'the first of them is handed out alone');

-- When to look again.
call pg_temp.start_over();
select is(outbox.next_due(), null, 'nothing waits: no time');
select outbox.emit('later', '1', key => pg_temp.key_of(1), delay => '2 h') as later, outbox.emit('sooner', '1', key => pg_temp.key_of(2), delay => '1 h') as sooner \gset
select is(outbox.next_due(), (select due_at from outbox.message where id = :sooner), 'the earliest message that waits for a time');
select outbox.emit('ready', '1', key => pg_temp.key_of(1)) as ready \gset
select cmp_ok(outbox.next_due(), '<=', clock_timestamp(), 'now, if something is ready');
select is(pg_temp.claim(1), 'ready', 'it is in flight');
select is(outbox.next_due(), (select due_at from outbox.message where id = :sooner), 'what is in flight is not waited for');
select outbox.emit('behind', '1', key => pg_temp.key_of(1)) as id \gset
select is(outbox.next_due(), (select leased_until from pg_temp.lane(1)), 'the end of a lease that something ready waits behind');
update outbox.message set due_at = clock_timestamp() where id = :sooner;
select cmp_ok(outbox.next_due(), '<=', clock_timestamp(), 'what is due is earlier');
delete from outbox.message where id = :sooner;
select pg_temp.settle(1) as settled, pg_temp.claim(1) as claimed \gset
call pg_temp.look_again();
update outbox.message set due_at = clock_timestamp() where id = :later;
select is(outbox.next_due(), (select leased_until from pg_temp.lane(1)), 'what is due in a leased lane waits for the end of the lease');

select * from finish();
rollback;
