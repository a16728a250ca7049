-- The whole story in one session: an order is placed, its events leave, one is refused, one is dead and comes back.
\ir setup.psql
select plan(25);

create function pg_temp.claim(n integer) returns text language plpgsql as $function$
begin
    update outbox.horizon set due_checked_at = '-infinity', version = version + 1;
    return (
        select coalesce(string_agg(c.routing_key, ' ' order by c.id), '') from outbox.claim_batch(pg_temp.token(n)) as c
    );
end
$function$;
create function pg_temp.id_of(routing_key text) returns bigint language sql as 'select m.id from outbox.message as m where m.routing_key = $1';

-- An application: its own tables, triggers, savepoints and caught errors.
create temporary table orders (id integer primary key, state text not null) on commit drop;
create function pg_temp.tell() returns trigger language plpgsql as $function$
begin
    perform outbox.emit_event('order', new.id::text, new.state, to_jsonb(new));
    return null;
end
$function$;
create trigger tell after insert or update on orders for each row execute function pg_temp.tell();
create function pg_temp.place(id integer) returns boolean language plpgsql as $function$
begin
    insert into orders values (place.id, 'placed');
    return true;
exception when unique_violation then
    return false;
end
$function$;

select outbox.set_context('{"tenant": "t"}') as context \gset
select ok(pg_temp.place(1), 'an order is placed');
savepoint before_mistake;
select ok(pg_temp.place(2), 'another one');
rollback to savepoint before_mistake;
savepoint before_error;
insert into orders values (3, 'placed');
release savepoint before_error;
select ok(not pg_temp.place(1), 'the first again: an error, caught');
update orders set state = 'paid' where id = 1;
select outbox.emit('order.reminder', '{"id": 1}', key => 'order:1', delay => '1 day') as reminder, outbox.emit('order.promo', '{}', delay => '1 day') as promo \gset
select is(
    (select string_agg(key || ' ' || routing_key, ', ' order by id) from outbox.message where due_at is null),
    'order:1 order.placed, order:3 order.placed, order:1 order.paid', 'what was rolled back has no message'
);
select is((select array_agg(distinct headers ->> 'tenant') from outbox.message), array['t'], 'the context is with all of them');
select ok(outbox.cancel(:promo), 'the promotion is called off');

-- The first relay.
select is(outbox.next_due() <= clock_timestamp(), true, 'there is work');
select outbox.hello('first') as first \gset
create temporary table batch on commit drop as select * from outbox.claim_batch(pg_temp.token(1), relay => :first) with ordinality;
select is(
    (select array_agg(convert_from(body, 'UTF8')::jsonb ->> 'state' order by ordinality) from batch where key = 'order:1'), array['placed', 'paid'],
    'the events of an order are in order'
);
select is(
    outbox.mark_failed(pg_temp.token(1), (select array_agg(id) from batch where key = 'order:1' and routing_key = 'order.placed'), array['unroutable'], array['unroutable']), 1,
    'the broker returns the first'
);
select is(outbox.mark_sent(pg_temp.token(1), (select array_agg(id) from batch where key = 'order:3')), 1, 'and confirms that of another order');
select is(outbox.release_batch(pg_temp.token(1)), 1, 'the relay is told to stop and gives back the rest');
select is(pg_temp.claim(2), '', 'which waits behind the failing one');

-- The second relay.
update outbox.message set due_at = clock_timestamp() where attempts > 0;
select is(pg_temp.claim(2), 'order.placed', 'which is due');
select is(outbox.mark_failed(pg_temp.token(2), array[pg_temp.id_of('order.placed')], array['never'], array['rejected']), 1, 'and is refused for good');
select is((select reason || ': ' || error from outbox.dead_letter), 'rejected: never', 'it is kept, with the reason');
select is(pg_temp.claim(3), 'order.paid', 'the order goes on without it');
select is(outbox.mark_sent(pg_temp.token(3), array[pg_temp.id_of('order.paid')]), 1, 'and that is sent');
select is((select outbox.requeue_dead(array_agg(id)) from outbox.dead_letter), 1, 'somebody repairs the binding and requeues it');
select is(pg_temp.claim(4), 'order.placed', 'it is handed out again');
select is(outbox.mark_sent(pg_temp.token(4), array[pg_temp.id_of('order.placed')]), 1, 'and sent');

-- What remains.
select is(pg_temp.claim(5), '', 'nothing more is ready');
select is(outbox.cleanup(), row(0, 0, 0, 0, 0, false)::outbox.cleanup_result, 'nothing to clean up');
select is((select array_agg(id) from outbox.message), array[:reminder::bigint], 'only the reminder waits');
select is(outbox.next_due(), (select due_at from outbox.message), 'for its day');
select is(
    (select array[(select count(*) from outbox.dead_letter), (select count(*) from outbox.lane where token is not null), (select floor_repairs from outbox.horizon)]),
    array[0, 0, 0]::bigint[], 'nothing is dead, in flight, or was below a floor'
);

select * from finish();
rollback;
