-- Station 10: what emit() and its siblings take, refuse and write; context, deduplication, cancel.
\ir setup.psql

-- cancel() asks whether a message is of the same transaction, so these are committed before; deleted at the end.
rollback;
\set token '''00000000-0000-0000-0000-000000000001'''
select
    outbox.emit('committed', '1', key => 'k') as head,
    outbox.emit('committed', '1', key => 'k') as follower,
    outbox.emit('committed', '1', key => 'k') as last
\gset
select count(*) as claimed from outbox.claim_batch(:token) \gset
select outbox.mark_failed(:token, array[:head, :follower, :last], array['x', 'x', 'x'], retry_in => array[interval '1 h', '1 h', '1 h']) as failed \gset
select
    outbox.emit('committed', '1') as ready,
    outbox.emit('committed', '1', delay => '1 us') as due,
    outbox.emit('committed', '1', delay => '1 h') as delayed
\gset
-- Emits work at every isolation level.
begin isolation level serializable;
select
    outbox.emit('a', '1', key => 'k', dedup_key => 'd') is not null
    and cardinality(outbox.emit_many('[{"routing_key": "a", "payload": 1}]')) = 1 as serializable
\gset
rollback;
-- So does cancel() for messages of the same transaction.
begin isolation level repeatable read;
create function pg_temp.answer(call text) returns text language plpgsql as $function$
declare
    v_answer text;
begin
    execute call into v_answer;
    return v_answer;
exception when others then
    return sqlstate || ' ' || sqlerrm;
end
$function$;
select outbox.emit('a', '1', delay => '1 h') as id \gset
select pg_temp.answer(format('select outbox.cancel(%s)', :id)) as cancel_own, pg_temp.answer(format('select outbox.cancel(%s)', :delayed)) as cancel_other \gset
rollback;

\ir setup.psql
select plan(208);

-- 'ok', or the code and message of what was refused: the hint must be there too.
create function pg_temp.refusal(call text) returns text language plpgsql as $function$
declare
    v_hint text;
begin
    execute call;
    return 'ok';
exception when others then
    get stacked diagnostics v_hint = pg_exception_hint;
    return sqlstate || ' ' || sqlerrm || case when v_hint = '' then ' (without a hint)' else '' end;
end
$function$;

-- The same message through emit(), emit_bytes() and emit_many().
create function pg_temp.three_ways(message jsonb) returns text[] language sql as $function$
    select array[
        (
            select format('select outbox.emit(%s)', string_agg(format('%I => %L', f.key, case
                when f.key in ('payload', 'headers', 'properties') then f.value::text else f.value #>> '{}'
            end), ', '))
            from jsonb_each(message) as f
        ),
        (
            select format('select outbox.emit_bytes(content_type => ''application/json'', %s)', string_agg(case
                when f.key = 'payload' then format('body => convert_to(%L, ''UTF8'')', f.value)
                when f.key in ('headers', 'properties') then format('%I => %L', f.key, f.value)
                else format('%I => %L', f.key, f.value #>> '{}')
            end, ', '))
            from jsonb_each(message) as f
        ),
        format('select outbox.emit_many(%L)', jsonb_build_array(message))
    ];
$function$;

-- What is refused. One list for all three, so that they cannot drift apart.
create temporary table bad (n serial, rule text, fields jsonb, code text, message text) on commit drop;
insert into bad (rule, fields, code, message)
select v.rule, v.fields, v.code, v.message
from (values
    ('routing_key null', jsonb_build_object('routing_key', null), 'OB001', 'routing_key must not be null'),
    ('routing_key empty', jsonb_build_object('routing_key', ''), 'OB002', 'routing_key must have 1 to 255 bytes'),
    ('routing_key 256 bytes', jsonb_build_object('routing_key', repeat('x', 256)), 'OB002', 'routing_key must have 1 to 255 bytes'),
    ('routing_key 128 characters, 256 bytes', jsonb_build_object('routing_key', repeat('é', 128)), 'OB002',
        'routing_key must have 1 to 255 bytes'),
    ('key empty', jsonb_build_object('key', ''), 'OB002', 'key must have 1 to 255 bytes'),
    ('key 256 bytes', jsonb_build_object('key', repeat('é', 128)), 'OB002', 'key must have 1 to 255 bytes'),
    ('exchange empty', jsonb_build_object('exchange', ''), 'OB002', 'exchange must have 1 to 255 bytes'),
    ('exchange 256 bytes', jsonb_build_object('exchange', repeat('é', 128)), 'OB002', 'exchange must have 1 to 255 bytes'),
    ('dedup_key empty', jsonb_build_object('dedup_key', ''), 'OB002', 'dedup_key must have 1 to 255 bytes'),
    ('dedup_key 256 bytes', jsonb_build_object('dedup_key', repeat('é', 128)), 'OB002', 'dedup_key must have 1 to 255 bytes'),
    ('body 1 MiB and a byte', jsonb_build_object('payload', repeat('x', 1048575)), 'OB004', 'body is larger than max_body_bytes'),
    ('body over 1 MiB in bytes, under it in characters', jsonb_build_object('payload', repeat('é', 600000)), 'OB004',
        'body is larger than max_body_bytes'),
    ('eta and delay', '{"eta": "2020-01-01T00:00:00Z", "delay": "1 s"}', 'OB005', 'eta and delay exclude each other'),
    ('delay negative', jsonb_build_object('delay', interval '-1 us'), 'OB005', 'delay must not be negative'),
    ('delay over 10 years', jsonb_build_object('delay', interval '10 years 1 us'), 'OB005', 'eta and delay must lie within 10 years'),
    ('eta over 10 years', jsonb_build_object('eta', now() + interval '10 years 1 min'), 'OB005', 'eta and delay must lie within 10 years'),
    ('expires_in zero', jsonb_build_object('expires_in', interval '0'), 'OB005', 'expires_in must be positive and at most 10 years'),
    ('expires_in negative', jsonb_build_object('expires_in', interval '-1 us'), 'OB005', 'expires_in must be positive and at most 10 years'),
    ('expires_in over 10 years', jsonb_build_object('expires_in', interval '10 years 1 us'), 'OB005', 'expires_in must be positive and at most 10 years'),
    ('headers a list', '{"headers": []}', 'OB003', 'headers must be an object'),
    ('headers a string', '{"headers": "x"}', 'OB003', 'headers must be an object'),
    ('headers 32 KiB and a byte', jsonb_build_object('headers', jsonb_build_object('a', repeat('x', 32769 - 9))), 'OB003',
        'headers are larger than 32 KiB'),
    ('headers over 32 KiB in bytes, under it in characters', jsonb_build_object('headers', jsonb_build_object('a', repeat('é', 16384))),
        'OB003', 'headers are larger than 32 KiB')
) as v (rule, fields, code, message);
insert into bad (rule, fields, code, message)
select 'header ' || name, jsonb_build_object('headers', jsonb_build_object(name, 1)), 'OB003', 'headers contain a reserved name'
from unnest(array[
    'CC', 'BCC', 'x-death', 'x-delivery-count', 'x-acquired-count', 'x-first-death-queue', 'x-outbox-tracking-ids', 'x-outbox-'
]) as name;
insert into bad (rule, fields, code, message)
select
    'header: ' || v.rule, jsonb_build_object('headers', v.headers), 'OB003',
    'headers contain a name or value that AMQP cannot carry unchanged'
from (values
    ('empty name', '{"": 1}'::jsonb),
    ('name of 129 bytes', jsonb_build_object(repeat('x', 129), 1)),
    ('name of 65 characters, 130 bytes', jsonb_build_object(repeat('é', 65), 1)),
    ('inner name of 129 bytes', jsonb_build_object('a', jsonb_build_object(repeat('x', 129), 1))),
    ('fraction', '{"a": 1.5}'),
    ('whole number written with a fraction', '{"a": 1.0}'),
    ('number far beyond a double', '{"a": 1e400}'),
    ('2^63', '{"a": 9223372036854775808}'),
    ('-2^63 - 1', '{"a": -9223372036854775809}'),
    ('fraction in a list', '{"a": [1, 1.5]}'),
    ('2^63 in an object', '{"a": {"b": 9223372036854775808}}'),
    ('list in a list', '{"a": [1, []]}'),
    ('object in a list', '{"a": [{}]}'),
    ('list in an object', '{"a": {"b": [1]}}'),
    ('object in an object', '{"a": {"b": {"c": 1}}}')
) as v (rule, headers);
insert into bad (rule, fields, code, message)
values ('properties a list', '{"properties": []}', 'OB003', 'properties must be an object');
insert into bad (rule, fields, code, message)
select
    'property: ' || v.rule, jsonb_build_object('properties', v.properties), 'OB003',
    'properties contain a name or value that cannot be sent'
from (values
    ('unknown name', '{"expiration": "1"}'::jsonb),
    ('priority -1', '{"priority": -1}'),
    ('priority 256', '{"priority": 256}'),
    ('priority a fraction', '{"priority": 1.5}'),
    ('priority a string', '{"priority": "5"}'),
    ('priority null', '{"priority": null}'),
    ('type a number', '{"type": 1}'),
    ('type null', '{"type": null}'),
    ('type of 256 bytes', jsonb_build_object('type', repeat('é', 128))),
    ('correlation_id of 256 bytes', jsonb_build_object('correlation_id', repeat('x', 256))),
    ('reply_to of 256 bytes', jsonb_build_object('reply_to', repeat('x', 256))),
    ('reply_to the broker''s own', '{"reply_to": "amq.rabbitmq.reply-to"}'),
    ('app_id of 256 bytes', jsonb_build_object('app_id', repeat('x', 256)))
) as v (rule, properties);

select is(
    array(
        select pg_temp.refusal(c.call)
        from unnest(pg_temp.three_ways('{"routing_key": "a", "payload": 1}' || b.fields)) with ordinality as c (call, n)
        order by c.n
    ),
    array[b.code || ' ' || b.message, b.code || ' ' || b.message, b.code || ' messages[0].' || b.message],
    'refused: ' || b.rule
)
from bad as b
order by b.n;

-- What is taken: the other side of each limit.
create temporary table good (n serial, rule text, fields jsonb) on commit drop;
insert into good (rule, fields)
values
    ('routing_key of a byte', '{"routing_key": "x"}'),
    ('routing_key of 255 bytes', jsonb_build_object('routing_key', repeat('é', 127) || 'x')),
    ('key of a byte', '{"key": "x"}'),
    ('key of 255 bytes', jsonb_build_object('key', repeat('é', 127) || 'x')),
    ('exchange of 255 bytes', jsonb_build_object('exchange', repeat('é', 127) || 'x')),
    ('body of 1 MiB', jsonb_build_object('payload', repeat('x', 1048574))),
    ('delay of 10 years', '{"delay": "10 years"}'),
    ('expires_in of a microsecond', jsonb_build_object('expires_in', interval '1 us')),
    ('expires_in of 10 years', '{"expires_in": "10 years"}'),
    ('no headers', '{"headers": {}}'),
    ('header strings, booleans, null', '{"headers": {"a": "1.5", "b": true, "c": null, "cc": "", "x-outbox": ""}}'),
    ('header integers', '{"headers": {"a": 9223372036854775807, "b": -9223372036854775808, "c": 1e3, "d": -0}}'),
    ('header lists and objects', '{"headers": {"a": [1, "x", null, true], "b": {"c": 1, "CC": "x"}, "d": [], "e": {}}}'),
    ('header name of 128 bytes', jsonb_build_object('headers', jsonb_build_object(repeat('é', 64), 1))),
    ('headers of 32 KiB', jsonb_build_object('headers', jsonb_build_object('a', repeat('x', 32768 - 9)))),
    ('no properties', '{"properties": {}}'),
    ('lowest priority', '{"properties": {"priority": 0, "type": "", "app_id": ""}}'),
    ('highest priority', '{"properties": {"priority": 255}}'),
    ('properties of 255 bytes', jsonb_build_object('properties', jsonb_build_object(
        'type', repeat('é', 127) || 'x', 'correlation_id', repeat('x', 255), 'reply_to', repeat('x', 255), 'app_id', repeat('x', 255)
    ))),
    ('a message_id', '{"message_id": "11111111-1111-4111-8111-111111111111"}');

-- One row for what was written, without what differs each time.
create function pg_temp.written(call text) returns jsonb language plpgsql as $function$
declare
    v_id  bigint;
    v_row jsonb;
begin
    execute case when call like '%emit_many(%' then replace(call, 'outbox.emit_many(', '(outbox.emit_many(') || ')[1]' else call end into v_id;
    select
        to_jsonb(m) - '{id,due_at,created_at,expires_at}'::text[]
        || jsonb_build_object('delay', extract(epoch from m.due_at - m.created_at), 'life', extract(epoch from m.expires_at - m.created_at))
        || case when m.key is null then '{"lane": null}' else '{}'::jsonb end
    into v_row
    from outbox.message as m
    where m.id = v_id;
    return v_row;
end
$function$;

create temporary table written on commit drop as
select g.n, g.rule, g.fields, c.way, pg_temp.written(c.call) as message
from good as g
cross join lateral unnest(pg_temp.three_ways(
    '{"routing_key": "a", "payload": 1, "message_id": "00000000-0000-4000-8000-000000000000"}' || g.fields
)) with ordinality as c (call, way);

select is(
    array_agg(distinct w.message),
    array[
        '{"routing_key": "a", "key": null, "headers": null, "exchange": null, "properties": null, "content_type": "application/json", "attempts": 0,
          "error": null, "dedup_key": null, "message_id": "00000000-0000-4000-8000-000000000000", "delay": null, "life": null, "lane": null}'::jsonb
        || jsonb_build_object('emitted_by', session_user, 'body', convert_to(coalesce(w.fields -> 'payload', '1')::text, 'UTF8'))
        || case when w.fields ? 'key' then jsonb_build_object('lane', hashtextextended(w.fields ->> 'key', 0) & 63) else '{}' end
        || case when w.fields ? 'delay' then jsonb_build_object('delay', extract(epoch from now() + (w.fields ->> 'delay')::interval - now())) else '{}' end
        || case when w.fields ? 'expires_in' then jsonb_build_object('life', extract(epoch from now() + (w.fields ->> 'expires_in')::interval - now())) else '{}' end
        || (w.fields - '{payload,delay,expires_in}'::text[])
    ],
    'taken: ' || w.rule
)
from written as w
group by w.n, w.rule, w.fields
order by w.n;
select is((select count(distinct way) from written where message is not null), 3::bigint, 'by emit(), emit_bytes() and emit_many()');

-- Bodies.
select outbox.emit('body', '{"b": [1, "é"], "a": null}') as id \gset
select is(
    (select convert_from(body, 'UTF8') from outbox.message where id = :id), '{"a": null, "b": [1, "é"]}', 'the payload is sent as UTF-8 JSON'
);
select lives_ok($$select outbox.emit('a', 'null')$$, 'the JSON value null is a payload');
select throws_ok($$select outbox.emit('a', null)$$, 'OB001', 'payload must not be null', 'no payload');
select throws_ok($$select outbox.emit_bytes('a', null)$$, 'OB001', 'body must not be null', 'no body');
select throws_ok($$select outbox.emit_bytes('a', '', null)$$, 'OB001', 'content_type must not be null', 'content_type null');
select throws_ok(
    format($$select outbox.emit_bytes('a', '', %L)$$, content_type), 'OB002', 'content_type must have 1 to 255 bytes', 'content_type ' || rule
)
from (values ('', 'empty'), (repeat('é', 128), 'of 256 bytes')) as v (content_type, rule);
select outbox.emit_bytes('a', '\x00ff', repeat('é', 127) || 'x') as with_type, outbox.emit_bytes('a', '') as without_type \gset
select is((select body from outbox.message where id = :with_type), '\x00ff', 'bytes are kept as they are');
select is(
    (select octet_length(content_type) from outbox.message where id = :with_type), 255, 'content_type of 255 bytes'
);
select results_eq(
    $$select content_type, octet_length(body) from outbox.message where id = $$ || :without_type,
    $$values ('application/octet-stream', 0)$$,
    'an empty body is a body; the default content type of bytes'
);

select outbox.configure('max_body_bytes', '1048577') as configured \gset
select is(
    array(select left(pg_temp.refusal(call), 5) from unnest(pg_temp.three_ways(jsonb_build_object('routing_key', 'a', 'payload', repeat('x', bytes - 2)))) as call),
    array_fill(answer, array[3]), rule
)
from (values (1048577, 'ok', 'a body of max_body_bytes'), (1048578, 'OB004', 'a body of max_body_bytes and a byte')) as v (bytes, answer, rule);
select outbox.configure('max_body_bytes', null) as configured \gset

-- Identity and defaults.
select is((select count(distinct message_id) from outbox.message where id in (:id, :with_type, :without_type)), 3::bigint, 'each has a message_id');
select cmp_ok((select created_at from outbox.message where id = :id), '>', now(), 'created_at is the clock''s time, not the transaction''s');
select is((select attempts from outbox.message where id = :id), 0, 'no attempts yet');
select is((select due_at from outbox.message where id = :id), null, 'ready at once');
select cmp_ok(:with_type, '>', :id, 'later messages have higher ids');
select ok(:'serializable', 'emits work in a serializable transaction');
select throws_ok(
    $$select set_config('transaction_read_only', 'on', true), outbox.emit('a', '1')$$, '25006', null, 'a read-only transaction says so itself'
);
select is_empty(
    $$select p.proname from pg_proc as p where p.pronamespace = 'outbox'::regnamespace and p.proname ~ 'emit' and p.prosrc ~* '\mexception\s+when\M'$$,
    'no exception block in an emit: it would be a subtransaction each'
);

-- Lanes.
select
    outbox.emit('a', '1', key => 'order:1') as plain,
    outbox.emit('a', '1', key => 'order:1', headers => '{}') as with_headers,
    outbox.emit_bytes('a', '', key => 'order:1') as bytes,
    outbox.emit_many('[{"routing_key": "a", "payload": 1, "key": "order:1"}]') as many,
    outbox.emit_event('order', '1', 'placed', '1') as event
\gset
select is(
    (select array_agg(distinct lane) from outbox.message where key = 'order:1'), array[(hashtextextended('order:1', 0) & 63)::smallint],
    'a key has one lane, whichever function emits'
);
select outbox.emit_many((select jsonb_agg(jsonb_build_object('routing_key', 'spread', 'payload', n)) from generate_series(1, 2000) as n)) is not null as spread \gset
select is(
    (select array[min(lane), max(lane), count(distinct lane)] from outbox.message where routing_key = 'spread')::integer[], array[0, 63, 64],
    'without a key messages spread over lanes 0 to 63'
);
do $$ begin for n in 1..100 loop perform outbox.emit('spread one', '1'), pg_sleep(0.004); end loop; end $$;
select cmp_ok(
    (select count(distinct lane) from outbox.message where routing_key = 'spread one' and lane between 0 and 63), '>=', 32::bigint,
    'and so they do one by one, 4 ms apart'
);

-- Time.
select
    outbox.emit('time', '1', delay => '0', expires_in => '1 h') as no_delay,
    outbox.emit('time', '1', eta => '2020-01-01', expires_in => '1 h') as past,
    outbox.emit('time', '1', eta => now() + interval '1 h', expires_in => '1 h') as future,
    outbox.emit('time', '1', delay => '2 h', expires_in => '1 h') as later,
    (outbox.emit_many('[{"routing_key": "time", "payload": 1, "eta": "2020-01-01T00:00:00+02:00", "expires_in": "1 h"}]'))[1] as past_many,
    (outbox.emit_many('[{"routing_key": "time", "payload": 1, "delay": "2 h", "expires_in": "1 h"}]'))[1] as later_many
\gset
select is(
    (select array_agg(due_at is null and expires_at = created_at + interval '1 h' order by id) from outbox.message where id in (:no_delay, :past, :past_many)),
    array[true, true, true], 'no delay and an eta in the past mean now; expiry counts from the emit'
);
select is(
    (select array[due_at, expires_at] from outbox.message where id = :future), array[now() + interval '1 h', now() + interval '2 h'],
    'due at its eta; expiry counts from there'
);
select is(
    (select array_agg(distinct array[due_at - created_at, expires_at - created_at]) from outbox.message where id in (:later, :later_many)),
    array[array[interval '2 h', interval '3 h']], 'due after its delay, by the clock; expiry counts from there'
);

-- emit_many().
select throws_ok($$select outbox.emit_many(null)$$, 'OB001', 'messages must not be null', 'emit_many() of null');
select throws_ok(format($$select outbox.emit_many(%L)$$, messages), 'OB006', 'messages must be an array', 'emit_many() of ' || messages)
from unnest(array['{}', '"x"', 'null']) as messages;
select throws_ok(
    format($$select outbox.emit_many(%L)$$, jsonb_build_array('{"routing_key": "a", "payload": 1}'::jsonb, message::jsonb)),
    'OB006', 'messages[1] is not a message', 'emit_many(): ' || rule
)
from (values
    ('null', 'an element null'),
    ('[]', 'an element that is no object'),
    ('{"routing_key": "a"}', 'neither payload nor body'),
    ('{"routing_key": "a", "payload": 1, "body": ""}', 'payload and body'),
    ('{"routing_key": "a", "payload": 1, "content_type": "text/plain"}', 'content_type of a payload'),
    ('{"routing_key": "a", "payload": 1, "routing": "b"}', 'an unknown field'),
    ('{"routing_key": "a", "payload": 1, "eta": "soon"}', 'an eta that is no time'),
    ('{"routing_key": "a", "payload": 1, "eta": "2026-02-30T00:00:00Z"}', 'an eta that is no day'),
    ('{"routing_key": "a", "payload": 1, "eta": "infinity"}', 'an eta that is no moment'),
    ('{"routing_key": "a", "payload": 1, "eta": "2026-01-01T00:00:00"}', 'an eta without a time zone'),
    ('{"routing_key": "a", "payload": 1, "delay": "long"}', 'a delay that is no interval'),
    ('{"routing_key": "a", "payload": 1, "delay": "1 s 1 s"}', 'a delay that says something twice'),
    ('{"routing_key": "a", "payload": 1, "delay": ""}', 'a delay that is empty'),
    ('{"routing_key": "a", "payload": 1, "delay": 60}', 'a delay that is a number'),
    ('{"routing_key": "a", "payload": 1, "expires_in": "late"}', 'expires_in that is no interval'),
    ('{"routing_key": "a", "payload": 1, "message_id": "secret"}', 'a message_id that is no UUID'),
    ('{"routing_key": "a", "body": "?"}', 'a body that is not base64'),
    ('{"routing_key": "a", "body": "YW?j"}', 'a body with something else between its base64'),
    ('{"routing_key": "a", "body": "YWJ"}', 'a body cut short'),
    ('{"routing_key": "a", "body": "", "content_type": 5}', 'a content_type that is no string'),
    ('{"routing_key": {"a": 1}, "payload": 1}', 'a routing_key that is no string'),
    ('{"routing_key": "a", "payload": 1, "key": ["a"]}', 'a key that is no string')
) as v (message, rule);
select throws_ok(
    $$select outbox.emit_many('[{"routing_key": "a", "payload": 1}, {"routing_key": "", "payload": 1}]')$$,
    'OB002', 'messages[1].routing_key must have 1 to 255 bytes', 'emit_many() counts from 0'
);
select throws_ok(
    $$select outbox.emit_many('[{"payload": 1}]')$$, 'OB001', 'messages[0].routing_key must not be null', 'emit_many() without a routing_key'
);
select throws_ok(
    $$select outbox.emit_many('[{"routing_key": "a", "body": null}]')$$, 'OB006', 'messages[0] is not a message', 'emit_many() with a body null'
);
select lives_ok($$select outbox.emit_many('[{"routing_key": "a", "payload": null}]')$$, 'emit_many() takes the JSON value null as payload, as emit() does');
select is(outbox.emit_many('[]'), '{}', 'emit_many() of nothing');
select outbox.emit_many((
    select jsonb_agg(jsonb_build_object('routing_key', 'many ' || n, 'body', encode(convert_to('é' || n, 'UTF8'), 'base64')) order by n)
    from generate_series(1, 100) as n
)) as many \gset
select is(
    array(
        select m.routing_key || convert_from(m.body, 'UTF8') || m.content_type
        from unnest(:'many'::bigint[]) with ordinality as i (id, n)
        join outbox.message as m on m.id = i.id
        order by i.n
    ),
    array(select 'many ' || n || 'é' || n || 'application/octet-stream' from generate_series(1, 100) as n),
    'emit_many() returns the ids in order; body is base64'
);
select outbox.emit_many('[
    {"routing_key": "a", "body": "AA==", "content_type": "text/plain", "headers": null, "properties": null, "key": null},
    {"routing_key": "a", "payload": 1, "exchange": null, "eta": null, "delay": null, "expires_in": null, "dedup_key": null, "message_id": null}
]') as many \gset
select is(
    (select array_agg(content_type || ' ' || num_nulls(headers, properties, key, exchange, due_at, expires_at, dedup_key) order by id)
     from outbox.message where id = any (:'many')),
    array['text/plain 7', 'application/json 7'], 'a field that is null is a field left out'
);
select lives_ok(
    $$select outbox.emit_many(jsonb_build_array(jsonb_build_object('routing_key', 'a', 'body', encode(convert_to(repeat('x', 200), 'UTF8'), 'base64'))))$$,
    'base64 may be broken into lines, as encode() does'
);

-- Deduplication.
select outbox.emit('first', '1', dedup_key => 'd1') as first \gset
select is(outbox.emit('second', '2', dedup_key => 'd1'), :first::bigint, 'a dedup_key used before: the first one''s id');
select is(outbox.emit_bytes('second', '', dedup_key => 'd1'), :first::bigint, 'for bytes too');
select is(outbox.emit_many('[{"routing_key": "second", "payload": 1, "dedup_key": "d1"}]'), array[:first::bigint], 'and for many');
select is((select count(*) from outbox.message where routing_key = 'second'), 0::bigint, 'and nothing is written');
select isnt(outbox.emit('other', '1', dedup_key => 'd2'), :first::bigint, 'another dedup_key is another message');
select outbox.emit_many('[
    {"routing_key": "x1", "payload": 1, "dedup_key": "d3"}, {"routing_key": "x2", "payload": 1},
    {"routing_key": "x3", "payload": 1, "dedup_key": "d3"}, {"routing_key": "x4", "payload": 1, "dedup_key": "d1"}
]') as many \gset
select ok(
    (:'many'::bigint[])[1] = (:'many'::bigint[])[3] and (:'many'::bigint[])[4] = :first
    and (select array_agg(routing_key order by id) from outbox.message where id = any (:'many')) = '{first,x1,x2}',
    'a dedup_key twice in one emit_many(): the first one''s id'
);
update outbox.dedup set created_at = clock_timestamp() - interval '59 min' where dedup_key = 'd1';
select is(outbox.emit('second', '1', dedup_key => 'd1'), :first::bigint, 'within dedup_window');
update outbox.dedup set created_at = clock_timestamp() - interval '61 min' where dedup_key = 'd1';
select outbox.emit('again', '1', dedup_key => 'd1') as again \gset
select isnt(:again, :first, 'the window is over: a new message');
select is(outbox.emit('again', '1', dedup_key => 'd1'), :again::bigint, 'and a new window begins with it');
select is((select dedup_key from outbox.message where id = :again), 'd1', 'the message keeps its dedup_key');
-- Context and tracking.
create function pg_temp.headers(id bigint) returns jsonb language sql as 'select m.headers from outbox.message as m where m.id = $1';
select lives_ok($$select outbox.set_context('{"tenant": "t", "trace": "1"}')$$, 'set_context()');
select outbox.emit('a', '1') as plain, outbox.emit('a', '1', headers => '{"trace": "2", "own": true}') as own, outbox.emit_bytes('a', '') as bytes,
    (outbox.emit_many('[{"routing_key": "a", "payload": 1, "headers": {"own": 1}}]'))[1] as many,
    (outbox.emit_many('[{"routing_key": "a", "payload": 1, "dedup_key": "context"}]'))[1] as many_dedup,
    outbox.emit_event('order', '2', 'placed', '1') as event \gset
select is(pg_temp.headers(:plain), '{"tenant": "t", "trace": "1"}', 'the context''s headers go with every message');
select is(pg_temp.headers(:own), '{"tenant": "t", "trace": "2", "own": true}', 'explicit headers win over it');
select is(pg_temp.headers(:bytes), '{"tenant": "t", "trace": "1"}', 'emit_bytes() takes the context');
select is(pg_temp.headers(:many), '{"tenant": "t", "trace": "1", "own": 1}', 'emit_many() takes the context');
select is(pg_temp.headers(:many_dedup), '{"tenant": "t", "trace": "1"}', 'emit_many() with dedup_key takes the context');
select is(
    pg_temp.headers(:event), '{"tenant": "t", "trace": "1", "aggregate_type": "order", "aggregate_id": "2", "event_type": "placed"}',
    'emit_event() takes the context'
);
create temporary table sale (n integer) on commit drop;
create function pg_temp.on_sale() returns trigger language plpgsql as $$begin perform outbox.emit('sale', to_jsonb(new.n)); return null; end$$;
create trigger on_sale after insert on sale for each row execute function pg_temp.on_sale();
insert into sale values (1);
select is((select headers ->> 'tenant' from outbox.message where routing_key = 'sale'), 't', 'so do emits in triggers');
select throws_ok(
    format('select outbox.set_context(%L)', headers), 'OB003', message, 'set_context(): ' || message
)
from (values
    ('[]', 'headers must be an object'),
    ('{"CC": "x"}', 'headers contain a reserved name'),
    ('{"a": 1.5}', 'headers contain a name or value that AMQP cannot carry unchanged'),
    (jsonb_build_object('a', repeat('x', 32760))::text, 'headers are larger than 32 KiB')
) as v (headers, message);
select outbox.set_context(jsonb_build_object('a', repeat('x', 20000)));
select throws_ok(
    $$select outbox.emit('a', '1', headers => jsonb_build_object('b', repeat('x', 20000)))$$, 'OB003', 'headers are larger than 32 KiB',
    'context and headers together are measured'
);
select outbox.set_context(null);
select outbox.emit('a', '1') as id \gset
select is(pg_temp.headers(:id), null, 'set_context(null) ends it');
set local outbox.context = '';
select outbox.emit('a', '1', headers => '{"a": 1}') as id \gset
select is(pg_temp.headers(:id), '{"a": 1}', 'an empty outbox.context is none');
select throws_ok(
    format($$select set_config('outbox.context', %L, true), outbox.emit('a', '1')$$, context), 'OB003', message,
    'anybody can set outbox.context, so emit checks it: ' || context
)
from (values
    ('[1]', 'outbox.context is not an object'),
    ('5', 'outbox.context is not an object'),
    ('{"x-death": 1}', 'headers contain a reserved name'),
    ('{"a": 1.5}', 'headers contain a name or value that AMQP cannot carry unchanged')
) as v (context, message);
select throws_ok(
    $$select set_config('outbox.context', '{"a": 1.5}', true), outbox.emit_many('[{"routing_key": "a", "payload": 1}]')$$,
    'OB003', null, 'emit_many() checks the context as well'
);
select throws_ok(
    format($$select set_config('outbox.context', %L, true), outbox.emit('a', '1')$$, context), 'OB003', null, 'outbox.context that is no JSON: ' || context
)
from unnest(array['secret']) as context;
select throws_ok(
    $$select set_config('outbox.tracking', 'secret', true), outbox.emit('a', '1')$$, 'OB003', null, 'outbox.tracking that holds no UUIDs'
);

select set_config('outbox.tracking', string_agg(format('00000000-0000-4000-8000-%s', lpad(n::text, 12, '0')), ',' order by n), true) is null as none
from generate_series(1, 2) as n \gset
select outbox.emit('a', '1', message_id => '00000000-0000-4000-8000-000000000009', headers => '{"a": 1}') as id,
    outbox.emit_many('[{"routing_key": "a", "payload": 1}, {"routing_key": "b", "payload": 1}]') as many \gset
select is(
    pg_temp.headers(:id),
    '{"a": 1, "x-outbox-tracking-ids": ["00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002", "00000000-0000-4000-8000-000000000009"]}',
    'the chain of message ids, its own last'
);
select is(
    (select array_agg(headers -> 'x-outbox-tracking-ids' ->> 2 order by id) from outbox.message where id = any (:'many')),
    (select array_agg(message_id::text order by id) from outbox.message where id = any (:'many')),
    'emit_many() adds each message''s own id'
);
select set_config('outbox.tracking', string_agg(format('00000000-0000-4000-8000-%s', lpad(n::text, 12, '0')), ',' order by n), true) is null as none
from generate_series(1, 120) as n \gset
select outbox.emit('a', '1', message_id => '00000000-0000-4000-8000-000000000999') as id \gset
select is(
    array(select jsonb_array_elements_text(pg_temp.headers(:id) -> 'x-outbox-tracking-ids')),
    array(select format('00000000-0000-4000-8000-%s', lpad(n::text, 12, '0')) from generate_series(22, 120) as n) || '00000000-0000-4000-8000-000000000999'::text,
    'a chain has at most 100 ids: the oldest go'
);
set local outbox.tracking = '';
select outbox.emit('a', '1') as id \gset
select is(pg_temp.headers(:id), null, 'an empty outbox.tracking is none');

-- emit_event().
select outbox.emit_event('order', '7', 'placed', '{"a": 1}', headers => '{"b": 2}', properties => '{"type": "t"}') as id \gset
select is(
    (select jsonb_build_array(routing_key, key, headers, properties, convert_from(body, 'UTF8')) from outbox.message where id = :id),
    '["order.placed", "order:7", {"aggregate_type": "order", "aggregate_id": "7", "event_type": "placed", "b": 2}, {"type": "t"}, "{\"a\": 1}"]',
    'emit_event(): routing key type.event, key type:id, the three as headers'
);
select throws_ok(
    format('select outbox.emit_event(%L, %L, %L, %L)', a, b, c, '1'), 'OB001', 'aggregate_type, aggregate_id and event_type must not be null',
    'emit_event() with a null'
)
from (values (null, 'i', 'e'), ('t', null, 'e'), ('t', 'i', null)) as v (a, b, c);
select throws_ok($$select outbox.emit_event('t', 'i', 'e', null)$$, 'OB001', 'payload must not be null', 'emit_event() without a payload');
select throws_ok($$select outbox.emit_event('t', 'i', 'e', '1', '[1]')$$, 'OB003', 'headers must be an object', 'emit_event() checks headers');
select throws_ok(
    format($$select outbox.emit_event(%L, 'i', 'e', '1')$$, repeat('x', 254)), 'OB002', 'routing_key must have 1 to 255 bytes', 'emit_event() checks lengths'
);

-- cancel().
create function pg_temp.waits(id bigint) returns boolean language sql as 'select exists (select from outbox.message as m where m.id = $1)';
delete from outbox.message where routing_key <> 'committed';
select throws_ok($$select outbox.cancel(null)$$, 'OB001', 'id must not be null', 'cancel() of null');
select ok(not outbox.cancel(0), 'an unknown id: no');
select ok(not outbox.cancel(:ready) and pg_temp.waits(:ready), 'a ready message: no');
select ok(outbox.cancel(:delayed) and not pg_temp.waits(:delayed), 'a delayed one: yes');
select ok(not outbox.cancel(:delayed), 'but only once');

select outbox.emit('own', '1', dedup_key => 'cancelled') as id \gset
select ok(outbox.cancel(:id) and not pg_temp.waits(:id), 'a ready one of the same transaction: yes');
select isnt(outbox.emit('own', '1', dedup_key => 'cancelled'), :id::bigint, 'its dedup_key is free again');
savepoint outer_one;
savepoint inner_one;
select outbox.emit('own', '1') as id \gset
select ok(outbox.cancel(:id), 'one of a savepoint still open: yes');
select outbox.emit('own', '1') as id \gset
release savepoint inner_one;
release savepoint outer_one;
select ok(outbox.cancel(:id), 'one of a released savepoint: yes');
select is(
    (select array_agg(outbox._widen(x.own + d) order by d) from unnest(array[-1000, 0, 1000]) as d),
    (select array_agg((x.own + d)::text::xid8 order by d) from unnest(array[-1000, 0, 1000]) as d),
    'an xid is widened to the nearest one, before or after our own'
)
from (select pg_current_xact_id()::text::bigint as own) as x;
select is(:'cancel_own'::text, 'true', 'in a repeatable read transaction, one of its own: yes');
select is(:'cancel_other'::text, 'OB010 isolation level must be read committed', 'but of another transaction it cannot know');

select format('tap_%s', pg_backend_pid()) as other \gset
create role :"other";
grant usage on schema outbox to :"other";
grant execute on function outbox.cancel(bigint) to :"other";
grant execute on function outbox.emit(text, jsonb, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) to :"other";
select outbox.emit('mine', '1', delay => '1 h') as id \gset
set local session authorization :"other";
select outbox.cancel(:id) as cancelled, outbox.emit('theirs', '1', delay => '1 h') as theirs, outbox.emit('theirs', '1', delay => '1 h') as theirs_too \gset
select outbox.cancel(:theirs_too) as cancelled_theirs \gset
reset session authorization;
select ok(not :'cancelled' and pg_temp.waits(:id), 'another user''s message: no');
select ok(:'cancelled_theirs', 'one''s own without any other right: yes');
select is((select emitted_by from outbox.message where id = :theirs), :'other', 'emitted_by is the session''s user, not the function''s owner');
select ok(outbox.cancel(:theirs), 'the owner of the package cancels anybody''s');

-- head backs off, the other two are held behind it.
select is(
    (select array_agg(due_at = 'infinity' order by id) from outbox.message where key = 'k'), array[false, true, true], 'one backs off, two are held'
);
select ok(outbox.cancel(:last) and not pg_temp.waits(:last), 'a message held behind another: yes');
select ok(outbox.cancel(:head) and not pg_temp.waits(:head), 'one that backs off: yes');
select is(
    (select array_agg(id order by id) from outbox.claim_batch(:token) where routing_key = 'committed'), array[:follower, :ready, :due]::bigint[],
    'and what was held behind it may leave'
);
select ok(not outbox.cancel(:follower) and pg_temp.waits(:follower), 'a held message that is in flight: no');
select ok(not outbox.cancel(:due) and pg_temp.waits(:due), 'a delayed message that is in flight: no');
select is(outbox.mark_sent(:token, array[:follower, :due]), 2, 'they are settled');
select ok(not outbox.cancel(:follower) and not outbox.cancel(:due), 'a sent message: no');

select * from finish();
rollback;
delete from outbox.message where routing_key = 'committed';
delete from outbox.held_key where key = 'k';
