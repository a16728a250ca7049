-- Station 80: a consumer accepts a message once; what was accepted is forgotten after inbox_retention.
\ir setup.psql
select plan(25);

create function pg_temp.id(n integer) returns uuid language sql as $$select format('00000000-0000-0000-0000-%s', lpad(n::text, 12, '0'))::uuid$$;

select is(outbox.accept('stock', pg_temp.id(1)), true, 'the first time');
select is(outbox.accept('stock', pg_temp.id(1)), false, 'not the second time');
select is(outbox.accept('stock', pg_temp.id(2)), true, 'another message');
select is(outbox.accept('mail', pg_temp.id(1)), true, 'another consumer');
select is(outbox.accept('Stock', pg_temp.id(1)), true, 'names are told apart to the letter');
select is(outbox.accept(repeat('é', 127) || 'x', pg_temp.id(1)), true, '255 bytes');
select ok((select i.accepted_at between now() and clock_timestamp() from outbox.inbox as i where i.consumer = 'mail'), 'the time is noted');

savepoint before;
select outbox.accept('stock', pg_temp.id(3)) as accepted \gset
rollback to savepoint before;
select is(outbox.accept('stock', pg_temp.id(3)), true, 'rolled back: not accepted');

-- What is acknowledged afterwards must be on disk.
create function pg_temp.committed(asked text) returns text language plpgsql as $function$
begin
    perform set_config('synchronous_commit', asked, true);
    perform outbox.accept('commit', gen_random_uuid());
    return current_setting('synchronous_commit');
end
$function$;
select is(pg_temp.committed(v.asked), v.got, 'synchronous_commit ' || v.asked)
from (values ('off', 'on'), ('local', 'on'), ('remote_write', 'on'), ('on', 'on'), ('remote_apply', 'remote_apply')) as v (asked, got);

-- bad input
select throws_ok('select outbox.accept(null, pg_temp.id(1))', 'OB001', 'consumer and message_id must not be null', 'no consumer');
select throws_ok('select outbox.accept(''stock'', null)', 'OB001', 'consumer and message_id must not be null', 'no message');
select throws_ok('select outbox.accept('''', pg_temp.id(1))', 'OB002', 'consumer must have 1 to 255 bytes', 'a consumer without a name');
select throws_ok('select outbox.accept(repeat(''é'', 128), pg_temp.id(1))', 'OB002', 'consumer must have 1 to 255 bytes', 'one with a long name');

-- retention
delete from outbox.inbox;
insert into outbox.inbox (consumer, message_id, accepted_at)
values
    ('stock', pg_temp.id(1), clock_timestamp() - interval '7 days 1 min'),
    ('stock', pg_temp.id(2), clock_timestamp() - interval '6 days 23 h 59 min');
select is(outbox.cleanup(), row(0, 0, 0, 0, 1, false)::outbox.cleanup_result, 'one is past');
select is((select array_agg(i.message_id) from outbox.inbox as i), array[pg_temp.id(2)], 'the older one');
select outbox.configure('inbox_retention', '1 h') as configured \gset
select is((outbox.cleanup()).inbox_rows, 1, 'the setting counts');
insert into outbox.inbox (consumer, message_id, accepted_at)
select 'stock', gen_random_uuid(), clock_timestamp() - interval '1 day' - n * interval '1 s' from generate_series(1, 10001) as n;
select is(outbox.cleanup(), row(0, 0, 0, 0, 10000, true)::outbox.cleanup_result, 'at most 10,000 at a time, and more to come');
select is(
    (select array_agg(i.accepted_at < clock_timestamp() - interval '1 day 2 s') from outbox.inbox as i), array[false],
    'the youngest is left'
);
select is(outbox.cleanup(), row(0, 0, 0, 0, 1, false)::outbox.cleanup_result, 'the last of them');
insert into outbox.inbox (consumer, message_id) values ('stock', pg_temp.id(1)), ('mail', pg_temp.id(1));
update outbox.inbox set accepted_at = accepted_at - interval '1 day' where consumer = 'mail';
select is((outbox.cleanup()).inbox_rows, 1, 'of one message accepted twice, the consumer past its time');
select is((select string_agg(i.consumer, ' ') from outbox.inbox as i), 'stock', 'and not the other');

select * from finish();
rollback;
