-- Station 40: what is sent, given back, held for longer; and how far the floors are proven.
\ir setup.psql

-- Only read committed will do.
rollback;
begin isolation level repeatable read;
\ir refusal.psql
select
    pg_temp.refusal('select outbox.mark_sent(gen_random_uuid(), ''{}'')') as mark_sent,
    pg_temp.refusal('select outbox.release_batch(gen_random_uuid())') as release_batch,
    pg_temp.refusal('select outbox.extend_lease(gen_random_uuid(), ''1 min'')') as extend_lease,
    pg_temp.refusal('select outbox.wait_sent(1, ''0'')') as wait_sent
\gset
rollback;

\ir setup.psql
select plan(100);

-- Claims; the routing keys in order.
create function pg_temp.claim(n integer, batch_size integer = 500, relay bigint = null) returns text language sql as $$
    select coalesce(string_agg(c.routing_key, ' ' order by c.ordinality), '')
    from outbox.claim_batch(pg_temp.token(n), batch_size, relay => relay) with ordinality as c;
$$;
create function pg_temp.waiting() returns text language sql as $$
    select coalesce(string_agg(m.routing_key, ' ' order by m.id), '') from outbox.message as m;
$$;
create function pg_temp.key_of(lane integer) returns text language sql as $$
    select 'k' || k from generate_series(1, 1000) as k where hashtextextended('k' || k, 0) & 63 = lane order by k limit 1;
$$;
-- Four messages in a lane, and one in another.
create procedure pg_temp.start_over() language sql as $$
    delete from outbox.message;
    update outbox.lane set token = null, relay = null, leased_until = null, handed = '{}', suspects = '{}', trial = 0, kills = 0, version = version + 1;
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
    select outbox.emit('m' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 4) as n;
    select outbox.emit('other', '1', key => pg_temp.key_of(2));
$$;
create function pg_temp.id_of(routing_key text) returns bigint language sql as 'select m.id from outbox.message as m where m.routing_key = $1';
create procedure pg_temp.expire() language sql as $$
    update outbox.lane set leased_until = clock_timestamp() - interval '1 ms' where token is not null;
$$;

-- Arguments.
select is(answer, 'OB010 isolation level must be read committed', rule || ' in repeatable read')
from (values
    (:'mark_sent', 'mark_sent()'), (:'release_batch', 'release_batch()'), (:'extend_lease', 'extend_lease()'), (:'wait_sent', 'wait_sent()')
) as v (answer, rule);
select throws_ok(call, code, message, call)
from (values
    ('select outbox.mark_sent(null, ''{}'')', 'OB001', 'token and ids must not be null'),
    ('select outbox.mark_sent(gen_random_uuid(), null)', 'OB001', 'token and ids must not be null'),
    ('select outbox.release_batch(null)', 'OB001', 'token must not be null'),
    ('select outbox.extend_lease(null, ''1 min'')', 'OB001', 'token must not be null'),
    ('select outbox.extend_lease(gen_random_uuid(), null)', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('select outbox.extend_lease(gen_random_uuid(), ''999999 us'')', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('select outbox.extend_lease(gen_random_uuid(), ''1 h 1 us'')', 'OB011', 'lease must lie between 1 second and 1 hour'),
    ('select outbox.wait_sent(null, ''0'')', 'OB001', 'id must not be null'),
    ('select outbox.wait_sent(1, null)', 'OB011', 'timeout must lie between 0 and 10 seconds'),
    ('select outbox.wait_sent(1, ''-1 us'')', 'OB011', 'timeout must lie between 0 and 10 seconds'),
    ('select outbox.wait_sent(1, ''10 s 1 us'')', 'OB011', 'timeout must lie between 0 and 10 seconds')
) as v (call, code, message);

-- mark_sent() settles what the token was handed out, once.
call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m2') as m2, pg_temp.id_of('m3') as m3, pg_temp.id_of('m4') as m4, pg_temp.id_of('other') as other \gset
delete from outbox.message where id = :other;
select is(pg_temp.claim(1, batch_size => 3), 'm1 m2 m3', 'three of four are handed out');
select is(outbox.mark_sent(pg_temp.token(1), '{}'), 0, 'nothing is marked: 0');
select is(outbox.mark_sent(pg_temp.token(2), array[:m1, :m2]), 0, 'another token settles nothing');
select is(outbox.mark_sent(pg_temp.token(1), array[:m4]), 0, 'nor the right one what it was not handed');
select is(pg_temp.waiting(), 'm1 m2 m3 m4', 'and all still wait');
select is(outbox.mark_sent(pg_temp.token(1), array[:m2, null, :m2, 0]), 1, 'twice the same is once; what is no id is none');
select is(pg_temp.waiting(), 'm1 m3 m4', 'a message that is sent is gone');
select is(outbox.mark_sent(pg_temp.token(1), array[:m2]), 0, 'and is settled once');
select is((select handed from outbox.lane where token = pg_temp.token(1)), array[:m1, :m3]::bigint[], 'the lane knows what is open');
select is(pg_temp.claim(2), '', 'and waits for it');
select is(outbox.mark_sent(pg_temp.token(1), array[:m1, :m2, :m3, :m4]), 2, 'the rest of what was handed out');
select is((select count(*) from outbox.lane where token is not null), 0::bigint, 'with the last the lane is free');
select is(pg_temp.claim(2), 'm4', 'and what was not handed out is next');
select is(outbox.mark_sent(pg_temp.token(2), array[:m4]), 1, 'it is settled');

call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m4') as m4, pg_temp.id_of('other') as other \gset
select length(pg_temp.claim(1)) as claimed \gset
select is(outbox.mark_sent(pg_temp.token(1), array[:other]), 1, 'one of two lanes is done');
select outbox.emit('next', '1', key => pg_temp.key_of(2)) as next, outbox.emit('behind', '1', key => pg_temp.key_of(1)) as behind \gset
select is(pg_temp.claim(2), 'next', 'each lane is free on its own');
select is(outbox.mark_sent(pg_temp.token(1), array[:next]), 0, 'and what it hands out then is the other token''s');

call pg_temp.expire();
select is(outbox.mark_sent(pg_temp.token(1), array[:m1]), 1, 'a mark after the lease counts while nobody has taken over');
select count(*) as claimed from outbox.claim_batch(pg_temp.token(3)) \gset
select is(:claimed, 5, 'somebody takes over what is left');
select is(outbox.mark_sent(pg_temp.token(1), array[:m4]), 0, 'then it counts no more');
select ok(pg_temp.id_of('m4') is not null, 'and the message stays with who has it now');
select is(outbox.mark_sent(pg_temp.token(3), array[:m4]), 1, 'who settles it');

call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m2') as m2, pg_temp.id_of('m3') as m3, pg_temp.id_of('m4') as m4 \gset
delete from outbox.message where routing_key = 'other';
update outbox.horizon set safe_id = :m4, version = version + 1;
select pg_temp.claim(1) as claimed, outbox.mark_sent(pg_temp.token(1), array[:m2, :m4]) as sent \gset
call pg_temp.expire();
select is(pg_temp.claim(2), 'm1 m3', 'while a lane is half settled its floor stays');

-- release_batch() gives back what is open.
call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m2') as m2, pg_temp.id_of('other') as other \gset
delete from outbox.message where id = :other;
select pg_temp.claim(1) as claimed, outbox.mark_sent(pg_temp.token(1), array[:m1]) as sent \gset
select is(outbox.release_batch(pg_temp.token(2)), 0, 'another token gives back nothing');
select is(outbox.release_batch(pg_temp.token(1)), 3, 'released: what was open');
select is(outbox.release_batch(pg_temp.token(1)), 0, 'once');
select is((select count(*) from outbox.lane where num_nonnulls(token, relay, leased_until) > 0 or handed <> '{}'), 0::bigint, 'no lane is leased');
select is((select sum(attempts) from outbox.message), 0::bigint, 'no attempt is counted');
select is(pg_temp.claim(2), 'm2 m3 m4', 'they come again, in order');
select is(outbox.mark_sent(pg_temp.token(1), array[:m2]), 0, 'the old token cannot settle them any more');
call pg_temp.expire();
select is(pg_temp.claim(3), 'm2 m3 m4', 'somebody takes over');
select is(outbox.release_batch(pg_temp.token(2)), 0, 'then the old token has nothing to give back');
select is(pg_temp.claim(4), '', 'and frees nobody''s lane');
call pg_temp.start_over();
delete from outbox.message;
select outbox.emit('due', '1', delay => '1 h') as due \gset
update outbox.message set due_at = clock_timestamp() where id = :due;
select pg_temp.claim(1) as claimed, outbox.release_batch(pg_temp.token(1)) as released \gset
update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
select is(:'claimed' || ' ' || pg_temp.claim(1), 'due due', 'a due message that was given back comes again');

-- extend_lease().
call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m2') as m2, pg_temp.id_of('other') as other \gset
select is(outbox.extend_lease(pg_temp.token(1), '1 s'), false, 'a token that holds nothing: false');
select length(pg_temp.claim(1)) as claimed \gset
select is(outbox.extend_lease(pg_temp.token(1), '1 h'), true, 'one that holds lanes: true');
select is(
    (select array_agg(l.leased_until - clock_timestamp() between interval '59 min' and interval '1 h') from outbox.lane as l where l.token = pg_temp.token(1)),
    array[true, true], 'all its lanes are held for so long from now'
);
select is(outbox.extend_lease(pg_temp.token(2), '1 s'), false, 'another token: false');
select is(outbox.extend_lease(pg_temp.token(1), '1 s'), true, 'a lease may get shorter');
select cmp_ok((select max(leased_until) from outbox.lane), '<=', clock_timestamp() + interval '1 s', 'and does');
call pg_temp.expire();
select is(outbox.extend_lease(pg_temp.token(1), '1 min'), true, 'a lease that ran out, while nobody has taken over: true');
select is(pg_temp.claim(2), '', 'and it holds again');
call pg_temp.expire();
select length(pg_temp.claim(2)) as claimed \gset
select is(outbox.extend_lease(pg_temp.token(1), '1 min'), false, 'taken over: false');
select outbox.mark_sent(pg_temp.token(2), array(select m.id from outbox.message as m)) as sent \gset
select is(outbox.extend_lease(pg_temp.token(2), '1 min'), false, 'all settled: false');
call pg_temp.start_over();
select length(pg_temp.claim(1, relay => 42)) as claimed, outbox.hello('tap') as relay \gset
select outbox.extend_lease(pg_temp.token(1), '1 min') as extended \gset
select is((select array_agg(distinct relay) from outbox.lane where token is not null), array[:relay::bigint], 'a new session answers for the lanes it extends');

-- wait_sent().
call pg_temp.start_over();
select pg_temp.id_of('m1') as m1, pg_temp.id_of('m2') as m2, clock_timestamp() as began \gset
select is(outbox.wait_sent(:m1, '60 ms'), false, 'not sent within the time: false');
select cmp_ok(clock_timestamp() - :'began', '>=', interval '60 ms', 'after waiting for it');
select pg_temp.claim(1) as claimed, outbox.mark_sent(pg_temp.token(1), array[:m1]) as sent,
    outbox.mark_failed(pg_temp.token(1), array[:m2], array['x'], array['rejected']) as dead, clock_timestamp() as began \gset
select is(outbox.wait_sent(:m1, '10 s'), true, 'sent: true');
select is(outbox.wait_sent(:m2, '10 s'), false, 'dead: false');
select is(outbox.wait_sent(id, '10 s'), false, 'never emitted: ' || id)
from (select last_value + 1 as id from outbox.message_id_seq union all values (0), (-1)) as v;
select cmp_ok(clock_timestamp() - :'began', '<', interval '5 s', 'all at once');

-- Many of a lane go by its index: only what was handed out, all of it, and only if the mark is for all of it.
create procedure pg_temp.start_with_many() language sql as $$
    call pg_temp.start_over();
    delete from outbox.message where routing_key <> 'other';
    select outbox.emit('m' || n, '1', key => pg_temp.key_of(1)) from generate_series(1, 120) as n;
$$;
create function pg_temp.mark_handed(but text = '') returns integer language sql as $$
    select outbox.mark_sent(pg_temp.token(1), array(
        select h.id from outbox.lane as l cross join unnest(l.handed) as h (id) left join outbox.message as m on m.id = h.id
        where m.routing_key is distinct from but order by l.lane, h.id
    ));
$$;
call pg_temp.start_with_many();
select pg_temp.claim(1) as claimed \gset
select is(pg_temp.mark_handed(), 121, 'many and one of another lane are marked');
select is(pg_temp.waiting(), '', 'and gone');
call pg_temp.start_with_many();
select pg_temp.claim(1) as claimed \gset
select is(pg_temp.mark_handed(but => 'm60'), 120, 'all but one are marked');
select is(pg_temp.waiting(), 'm60', 'that one stays');
select is(pg_temp.mark_handed(), 1, 'until it is marked');
call pg_temp.start_with_many();
select pg_temp.claim(1) as claimed \gset
select is(pg_temp.mark_handed(but => 'other'), 120, 'all of a lane, and not of the other');
select is(pg_temp.waiting(), 'other', 'which stays');
call pg_temp.start_with_many();
create temporary table late on commit drop as select * from outbox.message where routing_key = 'm60';
delete from outbox.message where routing_key = 'm60';
select pg_temp.claim(1) as claimed \gset
insert into outbox.message select * from late;
select is(pg_temp.mark_handed(), 120, 'one that was not handed out has appeared among them');
select is(pg_temp.waiting(), 'm60', 'and stays');
call pg_temp.start_with_many();
truncate late;
insert into late select * from outbox.message where routing_key in ('m1', 'm60', 'm61');
delete from outbox.message where routing_key in ('m1', 'm60', 'm61');
select pg_temp.claim(1) as claimed \gset
update late set lane = 3 where routing_key = 'm60';
update late set due_at = 'infinity' where routing_key = 'm61';
insert into outbox.message select * from late;
select outbox.emit('m121', '1', key => pg_temp.key_of(1)) as next \gset
select is(pg_temp.mark_handed(), 118, 'others lie just before, in another lane, are not ready, or come next');
select is(pg_temp.waiting(), 'm1 m60 m61 m121', 'and stay');
call pg_temp.start_with_many();
select pg_temp.claim(1) as claimed \gset
delete from outbox.message where routing_key = 'm60';
select is(pg_temp.mark_handed(), 121, 'one of them is gone already');
select is(pg_temp.waiting(), '', 'the others go');
call pg_temp.start_with_many();
update outbox.message set due_at = clock_timestamp() where routing_key in ('m1', 'm120');
select pg_temp.claim(1) as claimed \gset
select is(pg_temp.mark_handed(), 121, 'some came by their time');
select is(pg_temp.waiting(), '', 'all go');

-- The same when they are kept: they are in the archive then, each of them once.
select outbox.configure('retention', '1 day') as retention \gset
call pg_temp.start_with_many();
truncate late;
insert into late select * from outbox.message where routing_key in ('m1', 'm60', 'm61');
delete from outbox.message where routing_key in ('m1', 'm60', 'm61');
select pg_temp.claim(1) as claimed \gset
update late set lane = 3 where routing_key = 'm60';
update late set due_at = 'infinity' where routing_key = 'm61';
insert into outbox.message select * from late;
select outbox.emit('m121', '1', key => pg_temp.key_of(1)) as next \gset
create temporary table sent on commit drop as
select m.* from outbox.message as m join outbox.lane as l on m.id = any (l.handed);
select is(pg_temp.mark_handed(), 118, 'kept: others lie just before, in another lane, are not ready, or come next');
select is(pg_temp.waiting(), 'm1 m60 m61 m121', 'and stay');
select is(
    (select count(*) from outbox.archive as a join sent as s using (
        id, message_id, routing_key, key, content_type, created_at, attempts, emitted_by, body
    ) where a.sent_at >= now() and (a.exchange, a.headers, a.properties, a.expires_at, a.dedup_key) is not distinct from
        (s.exchange, s.headers, s.properties, s.expires_at, s.dedup_key)),
    118::bigint, 'the archive has them'
);
select is((select count(*) from outbox.archive), 118::bigint, 'and nothing else');
call pg_temp.start_with_many();
truncate late;
insert into late select * from outbox.message where routing_key = 'm60';
delete from outbox.message where routing_key = 'm60';
select pg_temp.claim(1) as claimed \gset
insert into outbox.message select * from late;
select is(pg_temp.mark_handed(), 120, 'kept: one that was not handed out has appeared among them');
select is(pg_temp.waiting(), 'm60', 'and stays');
delete from outbox.archive;
select outbox.configure('retention', null) as retention \gset

-- The horizon: proof by those who may have drawn an id, and by the oldest open transaction.
call pg_temp.start_over();
select max(id) as last from outbox.message \gset
create procedure pg_temp.look(safe bigint, noted bigint, xids xid8[], pending xid8 = null, moved timestamptz = '-infinity', checked timestamptz = '-infinity') language sql as $$
    update outbox.horizon
    set safe_id = safe, noted_id = noted, noted_xids = xids, noted_at = '-infinity', pending_id = case when pending is not null then 5 end, pending_xid = pending,
        moved_at = moved, checked_at = checked, version = version + 1;
    select outbox.mark_sent(gen_random_uuid(), '{}');
$$;
create function pg_temp.safe_id() returns bigint language sql as 'select safe_id from outbox.horizon';
create function pg_temp.noted_id() returns bigint language sql as 'select noted_id from outbox.horizon';
call pg_temp.look(1, null, null);
select is(pg_temp.noted_id(), :last::bigint, 'a settling call notes the last id drawn');
select is(pg_temp.safe_id(), 1::bigint, 'which proves nothing yet');
call pg_temp.look(1, null, null, moved => clock_timestamp());
select is(pg_temp.noted_id(), null, 'it does not while the horizon moves on without it');
call pg_temp.look(:last, null, null);
select is(pg_temp.noted_id(), null, 'nor when all is proven');
call pg_temp.look(1, 2, array[pg_current_xact_id()]);
select is(pg_temp.safe_id(), 1::bigint, 'nothing is proven while one that was open then still is');
call pg_temp.look(1, 2, '{}', checked => clock_timestamp() + interval '1 min');
select is(pg_temp.safe_id(), 1::bigint, 'nor by a look so soon after another');
call pg_temp.look(1, 2, '{}');
select is(pg_temp.safe_id(), 2::bigint, 'but once all have ended');
call pg_temp.look(3, 2, '{}');
select is(pg_temp.safe_id(), 3::bigint, 'and never backwards');
call pg_temp.look(1, null, null, pending => (pg_current_xact_id()::text::bigint + 1)::text::xid8);
select is(pg_temp.safe_id(), 1::bigint, 'proof by xid: not while an older transaction is open');
call pg_temp.look(1, null, null, pending => '3');
select is(pg_temp.safe_id(), 5::bigint, 'but when all older ones have ended');
call pg_temp.look(6, null, null, pending => '3');
select is(pg_temp.safe_id(), 6::bigint, 'and never backwards');

select * from finish();
rollback;
