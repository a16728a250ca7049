-- Station 45: back-off, dead letters, what a failing message does to its key; requeue and purge.
\ir setup.psql

-- Only read committed will do.
rollback;
begin isolation level repeatable read;
\ir refusal.psql
select
    pg_temp.refusal('select outbox.mark_failed(gen_random_uuid(), ''{}'', ''{}'')') as mark_failed,
    pg_temp.refusal('select outbox.requeue_dead(''{}'')') as requeue_dead,
    pg_temp.refusal('select outbox.purge_dead(''0'')') as purge_dead
\gset
rollback;

\ir setup.psql
select plan(152);

-- Claims, after looking for due messages; the routing keys in order.
create function pg_temp.claim(batch_size integer = 500) returns text language plpgsql as $function$
begin
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
    return (
        select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
        from outbox.claim_batch(pg_temp.token(1), batch_size) with ordinality as c
    );
end
$function$;
create function pg_temp.ids_of(routing_keys text[]) returns bigint[] language sql as $$
    select array_agg(m.id order by r.n) from unnest(routing_keys) with ordinality as r (name, n) join outbox.message as m on m.routing_key = r.name;
$$;
create function pg_temp.sent(variadic routing_keys text[]) returns integer language sql as $$
    select outbox.mark_sent(pg_temp.token(1), pg_temp.ids_of(routing_keys));
$$;
-- Fails them, in the order given: to be retried in an hour.
create function pg_temp.failed(variadic routing_keys text[]) returns integer language sql as $$
    select outbox.mark_failed(pg_temp.token(1), pg_temp.ids_of(routing_keys), routing_keys, null, array_fill(interval '1 h', array[cardinality(routing_keys)]));
$$;
create function pg_temp.rejected(variadic routing_keys text[]) returns integer language sql as $$
    select outbox.mark_failed(pg_temp.token(1), pg_temp.ids_of(routing_keys), routing_keys, array_fill('rejected'::text, array[cardinality(routing_keys)]));
$$;
-- Whatever backs off is due now.
create procedure pg_temp.an_hour_later() language sql as $$
    update outbox.message set due_at = clock_timestamp() where due_at <> 'infinity';
$$;
create procedure pg_temp.start_over() language sql as $$
    delete from outbox.message;
    delete from outbox.held_key;
    delete from outbox.dead_letter;
    update outbox.lane set token = null, relay = null, leased_until = null, handed = '{}', suspects = '{}', trial = 0, kills = 0, version = version + 1;
$$;
-- Messages whose names begin with their key; all in one lane, in this order.
create procedure pg_temp.emit(variadic names text[]) language plpgsql as $function$
declare
    v_keys text[] := array(select 'k' || k from generate_series(1, 1000) as k where hashtextextended('k' || k, 0) & 63 = 7 order by k limit 2);
begin
    perform outbox.emit(n.name, '1', key => v_keys[ascii(n.name) - 96])
    from unnest(names) with ordinality as n (name, i)
    order by n.i;
end
$function$;

-- Arguments.
select is(answer, 'OB010 isolation level must be read committed', rule || ' in repeatable read')
from (values (:'mark_failed', 'mark_failed()'), (:'requeue_dead', 'requeue_dead()'), (:'purge_dead', 'purge_dead()')) as v (answer, rule);
select throws_ok(format('select outbox.%s', call), code, message, call)
from (values
    ('mark_failed(null, ''{}'', ''{}'')', 'OB001', 'token, ids, errors, counts and dead must not be null'),
    ('mark_failed(gen_random_uuid(), null, ''{}'')', 'OB001', 'token, ids, errors, counts and dead must not be null'),
    ('mark_failed(gen_random_uuid(), ''{}'', null)', 'OB001', 'token, ids, errors, counts and dead must not be null'),
    ('mark_failed(gen_random_uuid(), ''{}'', ''{}'', counts => null)', 'OB001', 'token, ids, errors, counts and dead must not be null'),
    ('mark_failed(gen_random_uuid(), ''{}'', ''{}'', dead => null)', 'OB001', 'token, ids, errors, counts and dead must not be null'),
    ('mark_failed(gen_random_uuid(), ''{1,2}'', ''{x}'')', 'OB013', 'ids, errors, reasons and retry_in must have the same length'),
    ('mark_failed(gen_random_uuid(), ''{1}'', ''{x,x}'')', 'OB013', 'ids, errors, reasons and retry_in must have the same length'),
    ('mark_failed(gen_random_uuid(), ''{1}'', ''{x}'', ''{}'')', 'OB013', 'ids, errors, reasons and retry_in must have the same length'),
    ('mark_failed(gen_random_uuid(), ''{1}'', ''{x}'', null, ''{1 s,1 s}'')', 'OB013', 'ids, errors, reasons and retry_in must have the same length'),
    ('mark_failed(gen_random_uuid(), ''{1,2}'', ''{x,x}'', ''{null,lost}'')', 'OB014', 'reasons contains an unknown reason'),
    ('mark_failed(gen_random_uuid(), ''{1,2}'', ''{x,x}'', null, ''{null,-1 us}'')', 'OB011', 'retry_in must lie between 0 and 10 years'),
    ('mark_failed(gen_random_uuid(), ''{1}'', ''{x}'', null, ''{10000 years}'')', 'OB011', 'retry_in must lie between 0 and 10 years'),
    ('dead_among(null)', 'OB001', 'ids must not be null'),
    ('requeue_dead(null)', 'OB001', 'ids must not be null'),
    ('purge_dead(null)', 'OB001', 'older_than must not be null'),
    ('purge_dead(''-1 us'')', 'OB011', 'older_than must lie between 0 and 100 years'),
    ('purge_dead(''100 years 1 us'')', 'OB011', 'older_than must lie between 0 and 100 years')
) as v (call, code, message);
select is(outbox.mark_failed(gen_random_uuid(), '{}', '{}', '{}', '{}'), 0, 'nothing failed: 0');

-- Back-off: base * multiplier^n, capped, then jittered; for any n.
create function pg_temp.backoffs(attempts integer) returns table (shortest double precision, longest double precision) language sql as $$
    select min(s.secs), max(s.secs)
    from (select extract(epoch from outbox._backoff(attempts))::double precision as secs from generate_series(1, 200)) as s;
$$;
select ok(
    (select b.shortest between 0.75 * v.seconds and 0.95 * v.seconds and b.longest between 1.05 * v.seconds and 1.25 * v.seconds from pg_temp.backoffs(v.attempts) as b),
    format('after %s failures: %s s, a quarter more or less', v.attempts, v.seconds)
)
from (values (0, 5), (1, 10), (2, 20), (9, 2560), (10, 3600), (1024, 3600), (2147483647, 3600)) as v (attempts, seconds);
select outbox.configure('retry_jitter', '0') as jitter \gset
select is(outbox._backoff(3), interval '40 s', 'without jitter: exactly');
select outbox.configure('retry_multiplier', '1') as multiplier \gset
select is(outbox._backoff(2147483647), interval '5 s', 'a multiplier of 1: always the base');
select outbox.configure('retry_multiplier', '1.5') as multiplier, outbox.configure('retry_base', '100 ms') as base, outbox.configure('retry_cap', '200 ms') as cap \gset
select is(array[outbox._backoff(1), outbox._backoff(2)], array[interval '150 ms', interval '200 ms'], 'the settings count');
select outbox.configure('retry_base', '1 h') as base \gset
select is(outbox._backoff(0), interval '200 ms', 'a base above the cap is capped');
select outbox.configure('retry_jitter', '1') as jitter \gset
select ok((select shortest >= 0 and longest <= 0.4 from pg_temp.backoffs(0)), 'the largest jitter: from nothing to double');
delete from outbox.setting;

-- A refusal is written down.
call pg_temp.emit('a1', 'b1');
select is(pg_temp.claim(), 'a1 b1', 'two are handed out');
select id as a1 from outbox.message where routing_key = 'a1' \gset
select is(outbox.mark_failed(pg_temp.token(2), array[:a1], array['x']), 0, 'another token fails nothing');
select is(outbox.mark_failed(pg_temp.token(1), array[0, null], array['x', 'x']), 0, 'nor the right one what it was not handed');
select clock_timestamp() as began \gset
select is(outbox.mark_failed(pg_temp.token(1), array[:a1], array[repeat('é', 1001)]), 1, 'one has failed');
select is((select array[attempts, length(error)] from outbox.message where id = :a1), array[1, 1000], 'one attempt; the error, trimmed');
select ok((select due_at - :'began' between interval '3.75 s' and interval '6.35 s' from outbox.message where id = :a1), 'it backs off as after no failure');
select is(outbox.mark_failed(pg_temp.token(1), array[:a1], array['x']), 0, 'and is settled once');
select is((select count(*) from outbox.lane where token is not null), 1::bigint, 'the lane waits for the other');
select is(pg_temp.sent('b1'), 1, 'which is sent');
select is((select count(*) from outbox.lane where token is not null), 0::bigint, 'and is free');
select is(pg_temp.claim(), '', 'what backs off is not handed out');
call pg_temp.an_hour_later();
update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
select is((select attempts from outbox.claim_batch(pg_temp.token(1))), 1, 'when it is due it comes with its attempts');
select clock_timestamp() as began \gset
select is(outbox.mark_failed(pg_temp.token(1), array[:a1], array[null]), 1, 'it fails again');
select ok((select due_at - :'began' between interval '7.5 s' and interval '12.6 s' from outbox.message where id = :a1), 'and backs off for longer');

call pg_temp.start_over();
call pg_temp.emit('a1', 'b1');
select pg_temp.claim() as claimed, pg_temp.ids_of(array['a1', 'b1']) as ids, clock_timestamp() as began \gset
select is(outbox.mark_failed(pg_temp.token(1), :'ids', array['x', 'x'], null, array['0', null]::interval[]), 2, 'retry_in, for one of two');
select ok(
    (
        select bool_and(case routing_key when 'a1' then due_at - :'began' < interval '1 s' else due_at - :'began' between interval '3.75 s' and interval '6.35 s' end)
        from outbox.message
    ),
    'stands in for the back-off'
);
select is(pg_temp.claim(), 'a1', 'none at all: due at once');

-- Death.
create function pg_temp.fail_with(reason text, attempts integer, retry_in interval = null, dead boolean = null) returns text language plpgsql as $function$
declare
    v_id bigint;
begin
    call pg_temp.start_over();
    v_id := outbox.emit('x', '1');
    update outbox.message as m set attempts = fail_with.attempts where m.id = v_id;
    perform pg_temp.claim();
    if dead is null then
        perform outbox.mark_failed(pg_temp.token(1), array[v_id], array['no'], case when reason is not null then array[reason] end, array[retry_in]);
    else
        perform outbox.mark_failed(pg_temp.token(1), array[v_id], array['no'], case when reason is not null then array[reason] end, array[retry_in], dead => dead);
    end if;
    return coalesce(
        (select 'retried ' || m.attempts from outbox.message as m where m.id = v_id),
        (select format('%s %s %s', d.reason, d.attempts, d.error) from outbox.dead_letter as d where d.id = v_id)
    );
end
$function$;
select is(pg_temp.fail_with(reason, attempts), outcome, format('%s after %s attempts', coalesce(reason, 'no reason'), attempts))
from (values
    (null, 8, 'retried 9'), (null, 9, 'max_attempts 10 no'), ('max_attempts', 0, 'retried 1'), ('max_attempts', 9, 'max_attempts 10 no'),
    ('unroutable', 8, 'retried 9'), ('unroutable', 9, 'unroutable 10 no'), ('killed_relay', 0, 'retried 1'),
    ('rejected', 0, 'rejected 1 no'), ('expired', 0, 'expired 1 no')
) as v (reason, attempts, outcome);
select outbox.configure('max_attempts', '1') as configured \gset
select is(pg_temp.fail_with(null, 0), 'max_attempts 1 no', 'max_attempts 1: dead at the first');
select outbox.configure('max_attempts', null) as configured \gset
select is(pg_temp.fail_with(reason, 3, dead => true), outcome, format('dead => true: %s', coalesce(reason, 'no reason')))
from (values (null, 'max_attempts 4 no'), ('unroutable', 'unroutable 4 no'), ('max_attempts', 'max_attempts 4 no')) as v (reason, outcome);
select is(pg_temp.fail_with(null, 3, retry_in => '1 h', dead => true), 'max_attempts 4 no', 'dead => true: whatever retry_in says');
select is(pg_temp.fail_with(null, 3, retry_in => '1 h'), 'retried 4', 'dead => false is the default');

call pg_temp.start_over();
select outbox.emit_bytes(
    'x', '\x00ff', 'text/plain', key => 'k', headers => '{"h": 1}', exchange => 'e', expires_in => '1 h', dedup_key => 'dk', properties => '{"type": "t"}'
) as x \gset
create temporary table before on commit drop as select to_jsonb(m) as message from outbox.message as m;
select pg_temp.claim() as claimed, outbox.mark_failed(pg_temp.token(1), array[:x, :x], array['first', 'second'], array['rejected', 'rejected']) as failed \gset
select is(:failed, 1, 'twice the same is once, in death too');
select is(
    (select to_jsonb(d) - '{dead_at,reason,error,parked,attempts}'::text[] from outbox.dead_letter as d), (select message - '{due_at,error,attempts}'::text[] from before),
    'a dead letter is the whole message'
);
select ok((select dead_at > now() and dead_at <= clock_timestamp() from outbox.dead_letter), 'with the time of its death');
select is((select count(*) from outbox.message), 0::bigint, 'and waits no more');
call pg_temp.start_over();
call pg_temp.emit('a1');
select pg_temp.claim() as claimed, pg_temp.failed('a1') as failed \gset
call pg_temp.an_hour_later();
select pg_temp.claim() as claimed, outbox.mark_failed(pg_temp.token(1), pg_temp.ids_of('{a1}'), array[null], array['rejected']) as failed \gset
select is((select error from outbox.dead_letter), 'a1', 'no error given: the last one known');
call pg_temp.start_over();
call pg_temp.emit('a1');
select pg_temp.claim() as claimed, outbox.mark_failed(pg_temp.token(1), pg_temp.ids_of('{a1}'), array[repeat('é', 1001)], array['rejected']) as failed \gset
select is((select length(error) from outbox.dead_letter), 1000, 'the error of a dead letter is trimmed');

-- A failing message holds its key, and nothing else.
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'b1', 'b2');
select is(pg_temp.claim(1), 'a1', 'the head is handed out');
select pg_temp.failed('a1') as failed \gset
call pg_temp.emit('a3', 'b3');
select is(pg_temp.claim(), 'b1 b2 b3', 'it failed: its followers wait, the rest of the lane flows');
select is(pg_temp.sent('b1', 'b2', 'b3'), 3, 'and is sent');
select is(pg_temp.claim(), '', 'the followers wait for their head');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'which is due: alone');
call pg_temp.emit('a4', 'b4');
select pg_temp.failed('a1') as failed \gset
select is(pg_temp.claim(), 'b4', 'it failed again: they still wait');
select pg_temp.sent('b4') as sent \gset
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'it is due again');
select is(pg_temp.sent('a1'), 1, 'and got through');
call pg_temp.emit('a5', 'b5');
select is(pg_temp.claim(2), 'a2 a3', 'its followers leave in order');
select is(pg_temp.sent('a2', 'a3'), 2, 'as many as asked for');
select pg_temp.claim() as claimed \gset
select is(
    (select string_agg(w, ' ' order by n) from string_to_table(:'claimed', ' ') with ordinality as t (w, n) where w like 'a%'), 'a4',
    'the newest joins behind them, not before'
);
select is(outbox.mark_sent(pg_temp.token(1), (select handed from outbox.lane where token = pg_temp.token(1))), 2, 'they are sent');
select is(pg_temp.claim(), 'a5', 'then it comes');
select is(pg_temp.sent('a5'), 1, 'and is sent');
call pg_temp.emit('a6', 'b6', 'a7');
select is(pg_temp.claim(), 'a6 b6 a7', 'and the key is as any other');
select is((select count(*) from outbox.held_key), 0::bigint, 'and forgotten');

-- A follower that fails becomes the head.
select pg_temp.sent('a6', 'b6') as sent, pg_temp.failed('a7') as failed \gset
call pg_temp.emit('a8', 'a9');
select is(pg_temp.claim(), '', 'one held the key');
call pg_temp.an_hour_later();
select pg_temp.claim() as claimed, pg_temp.sent('a7') as sent \gset
select is(pg_temp.claim(), 'a8 a9', 'what was held leaves');
select pg_temp.failed('a8') as failed, pg_temp.sent('a9') as sent \gset
call pg_temp.emit('a10');
select is(pg_temp.claim(), '', 'and fails in its turn: it holds the key');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a8', 'until it is due');

-- Two of a key fail: the first emitted is the head, whichever is told first.
create function pg_temp.head() returns text language sql as $$
    select m.routing_key from outbox.held_key as k join outbox.message as m on m.id = k.head_id;
$$;
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'a3');
select pg_temp.claim() as claimed, pg_temp.failed('a3', 'a1', 'a2') as failed \gset
select is(pg_temp.head(), 'a1', 'all in one call');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'it is the one that is due');
select pg_temp.sent('a1') as sent \gset
select is(pg_temp.claim(), 'a2 a3', 'the others follow in order, whatever their own back-off');
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'a3');
select pg_temp.claim() as claimed, pg_temp.failed('a2') as failed_2, pg_temp.failed('a1') as failed_1, pg_temp.failed('a3') as failed_3 \gset
select is(pg_temp.head(), 'a1', 'one after another');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'only the head is due');
select pg_temp.failed('a1') as failed \gset
call pg_temp.an_hour_later();
select pg_temp.claim() as claimed, pg_temp.sent('a1') as sent \gset
select is(pg_temp.claim(), 'a2 a3', 'and the others are behind it');
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'a3');
select pg_temp.claim() as claimed, pg_temp.failed('a2') as failed, pg_temp.sent('a1', 'a3') as sent \gset
select is(pg_temp.head(), 'a2', 'what was on the wire before and after it is sent: it holds the key alone');

-- Without a key nothing is held; however many wait behind a key, the others flow.
call pg_temp.start_over();
select outbox.emit('u' || n, '1') from generate_series(1, 3) as n \g /dev/null
update outbox.message set lane = 7;
select is(pg_temp.claim(1), 'u1', 'one without a key');
select pg_temp.failed('u1') as failed \gset
select is(pg_temp.claim(), 'u2 u3', 'fails, and holds nothing back');
call pg_temp.start_over();
call pg_temp.emit('a1');
select pg_temp.claim() as claimed, pg_temp.failed('a1') as failed \gset
select outbox.emit_many((
    select jsonb_agg(jsonb_build_object('routing_key', 'a' || n, 'payload', 1, 'key', (select key from outbox.message)) order by n) from generate_series(2, 2500) as n
)) is not null as many \gset
call pg_temp.emit('b1');
select is(pg_temp.claim(1), 'b1', 'behind 2,500 messages of a held key');
call pg_temp.an_hour_later();
select pg_temp.sent('b1') as sent, pg_temp.claim(1) as claimed, pg_temp.sent('a1') as sent_head \gset
select is(pg_temp.claim(2000), (select string_agg('a' || n, ' ' order by n) from generate_series(2, 2001) as n), 'which leave in order when its head got through');

-- A delayed message of a held key is no exception.
call pg_temp.start_over();
call pg_temp.emit('a1');
select pg_temp.claim() as claimed, outbox.emit('a2', '1', key => key, delay => '1 us') as delayed, pg_temp.failed('a1') as failed from outbox.message \gset
call pg_temp.emit('a3');
select is(pg_temp.claim(), '', 'it is due, and waits behind the head');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'which comes alone');
select pg_temp.sent('a1') as sent \gset
select is(pg_temp.claim(), 'a2 a3', 'and then it leaves in its order');

-- Expiry while it backs off.
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2');
select pg_temp.claim(1) as claimed, pg_temp.failed('a1') as failed \gset
update outbox.message set expires_at = clock_timestamp() where routing_key = 'a1';
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a2', 'a head that expired frees its key');
select is((select array[routing_key, reason, error] from outbox.dead_letter), array['a1', 'expired', 'a1'], 'and is dead, with its last error');

-- What happens to the key after a death.
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'a3');
select pg_temp.claim(1) as claimed, pg_temp.failed('a1') as failed, pg_temp.claim() as held \gset
call pg_temp.an_hour_later();
select is(pg_temp.claim(), 'a1', 'on_dead continue: a failing head');
select is(pg_temp.rejected('a1'), 1, 'dies');
select is(pg_temp.claim(), 'a2 a3', 'and its followers leave');

select outbox.configure('on_dead', 'park') as configured \gset
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'b1', 'a3');
select pg_temp.claim(1) as claimed, pg_temp.rejected('a1') as dead \gset
select is(pg_temp.claim(), 'b1', 'on_dead park: the key of a dead message waits, the others flow');
select is(pg_temp.sent('b1'), 1, 'they are sent');
call pg_temp.an_hour_later();
select is(pg_temp.claim(), '', 'and it waits on');
select is(outbox.purge_dead('0'), 1, 'until the dead letter is purged');
select is(pg_temp.claim(), 'a2 a3', 'then it goes on');
select is(pg_temp.rejected('a2', 'a3'), 2, 'two die');
call pg_temp.emit('a4');
select is(pg_temp.claim(), '', 'and their key waits');
select is((select outbox.requeue_dead(array_agg(id)) from outbox.dead_letter where routing_key = 'a2'), 1, 'the first is requeued');
select is(pg_temp.claim(), 'a2', 'and leaves');
select is(pg_temp.sent('a2'), 1, 'it is sent');
select is(pg_temp.claim(), '', 'the key waits for the second');
select is((select outbox.requeue_dead(array_agg(id)) from outbox.dead_letter), 1, 'which is requeued too');
select is(pg_temp.claim(), 'a3', 'and leaves first');
select is(pg_temp.sent('a3'), 1, 'it is sent');
select is(pg_temp.claim(), 'a4', 'then the rest');
call pg_temp.start_over();
call pg_temp.emit('a1', 'a2', 'a3');
select pg_temp.claim(1) as claimed, pg_temp.failed('a1') as failed, pg_temp.claim() as held \gset
update outbox.message set expires_at = clock_timestamp() where routing_key = 'a2';
call pg_temp.an_hour_later();
select pg_temp.claim() as claimed, pg_temp.sent('a1') as sent \gset
select is(pg_temp.claim() || pg_temp.claim(), '', 'a follower that expired parks the key again');
select is((select routing_key from outbox.dead_letter), 'a2', 'it is dead');
select outbox.configure('on_dead', null) as configured \gset

-- requeue_dead().
call pg_temp.start_over();
select outbox.emit('a1', '1', key => 'k', expires_in => '1 h') as a1 \gset
update outbox.message set created_at = created_at - interval '2 h', expires_at = expires_at - interval '2 h';
create temporary table requeued on commit drop as select to_jsonb(m) - '{due_at,attempts,expires_at,error}'::text[] as message from outbox.message as m;
select is(pg_temp.claim(), '', 'an expired message is dead');
update outbox.lane set floor = :a1 + 1, reach = :a1;
update outbox.dead_letter set attempts = 7;
select is(outbox.requeue_dead('{}'), 0, 'none requeued: 0');
select is(outbox.requeue_dead(array[:a1, :a1, 0, null]), 1, 'as many as were dead letters');
select is(outbox.requeue_dead(array[:a1]), 0, 'once');
select is((select count(*) from outbox.dead_letter), 0::bigint, 'it is no dead letter any more');
select is((select to_jsonb(m) - '{due_at,attempts,expires_at,error}'::text[] from outbox.message as m), (select message from requeued), 'but the message it was');
select ok(
    (select due_at <= clock_timestamp() and attempts = 0 and expires_at - clock_timestamp() between interval '59 min' and interval '1 h' from outbox.message),
    'due now, with no attempts, its life begun anew'
);
select is(pg_temp.claim(), 'a1', 'and handed out, though the floor has passed it');

-- purge_dead().
call pg_temp.start_over();
select outbox.emit('d' || n, '1') from generate_series(1, 3) as n \g /dev/null
select length(pg_temp.claim()) as claimed, pg_temp.rejected('d1', 'd2', 'd3') as dead \gset
update outbox.dead_letter set dead_at = clock_timestamp() - interval '1 h' where routing_key = 'd1';
select is(outbox.purge_dead('61 min'), 0, 'nothing died so long ago');
select is(outbox.purge_dead('59 min'), 1, 'one did');
select is((select string_agg(routing_key, ' ' order by id) from outbox.dead_letter), 'd2 d3', 'the others stay');
select is(outbox.purge_dead('0'), 2, 'all that are dead now');
select is(outbox.purge_dead('100 years'), 0, 'and nobody has been dead for 100 years');

-- Not the message's fault: it backs off as usual, and nothing is counted.
select outbox.configure('max_attempts', '1');
select outbox.emit('n', '1', key => 'n');
select is(pg_temp.claim(), 'n', 'a message that a full queue will refuse');
select is(
    outbox.mark_failed(pg_temp.token(1), pg_temp.ids_of('{n}'), '{full}', counts => false), 1,
    'mark_failed(counts => false) settles it'
);
select results_eq(
    $$select attempts, due_at > clock_timestamp(), error from outbox.message where routing_key = 'n'$$,
    $$values (0, true, 'full')$$,
    'it waits, though one counted attempt would have been its last'
);
select is((select count(*) from outbox.held_key where key = 'n'), 1::bigint, 'and holds its key');

-- A relay may ask which of those it reported died of it.
call pg_temp.start_over();
call pg_temp.emit('x', 'y');
select is(pg_temp.claim(), 'x y', 'two messages');
create temporary table asked as select pg_temp.ids_of('{x,y}') as ids;
select is(pg_temp.rejected('x'), 1, 'one is rejected');
select results_eq(
    'select d.id, d.reason from asked as a, outbox.dead_among(a.ids) as d',
    $$select a.ids[1], 'rejected' from asked as a$$,
    'dead_among() names it, with the reason, and not the other'
);

-- And what is to be told about one that it never saw: as claim_batch() would have handed it out, with error and reason.
select bag_eq(
    $$select a.attname::text, format_type(a.atttypid, a.atttypmod) from pg_attribute as a
        where a.attrelid = 'outbox.claimed_message'::regclass and a.attnum > 0 union values ('error', 'text'), ('reason', 'text')$$,
    $$select n, format_type(t, null) from pg_proc as p, unnest(p.proargnames, p.proargmodes, p.proallargtypes) as o (n, m, t)
        where p.oid = 'outbox.dead_among'::regproc and o.m = 't'$$,
    'dead_among() has the fields of claimed_message, and error and reason'
);
call pg_temp.start_over();
select outbox.emit_bytes('plain', '\x01', 'a/b') as plain \gset
select outbox.emit(
    'whole', '1', 'k', '{"a": 1}', 'elsewhere', expires_in => '1 s', message_id => '00000000-0000-0000-0000-00000000000a', properties => '{"priority": 3}'
) as whole \gset
update outbox.message set expires_at = clock_timestamp() - interval '1 s', attempts = 2, error = 'before', created_at = '2026-01-01' where id = :whole;
update outbox.message set expires_at = clock_timestamp() where id = :plain;
select is(pg_temp.claim(), '', 'two that are found expired');
select results_eq(
    format('select exchange, routing_key, key, body, content_type, headers, properties, attempts, error, reason from outbox.dead_among(%L) order by id', array[:plain, :whole]),
    $$values
        ('outbox', 'plain', null, '\x01'::bytea, 'a/b', null, null, 0, null, 'expired'),
        ('elsewhere', 'whole', 'k', '1'::bytea, 'application/json', '{"a": 1}'::jsonb, '{"priority": 3}'::jsonb, 2, 'before', 'expired')$$,
    'dead_among() tells what they were'
);
select results_eq(
    format('select message_id, created_at, expires_in between interval ''-1 min'' and interval ''-1 s'' from outbox.dead_among(%L)', array[:whole]),
    $$values ('00000000-0000-0000-0000-00000000000a'::uuid, '2026-01-01'::timestamptz, true)$$,
    'who they were, and for how long they had been over'
);
update outbox.dead_letter set dead_at = clock_timestamp() - interval '59 s' where id = :whole;
update outbox.dead_letter set dead_at = clock_timestamp() - interval '60 s' where id = :plain;
select is((select array_agg(d.id) from outbox.dead_among(array[:plain, :whole]) as d), array[:whole]::bigint[], 'a minute later it does not tell any more');

select * from finish();
rollback;
