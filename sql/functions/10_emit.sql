-- CODE. Station 10: a message joins the caller's transaction.
-- emit() only inserts: it reads no row (but of its dedup key), waits for nobody (but another open emit of that key) and
-- has no exception block, so it costs no subtransaction.

create or replace function outbox._check_headers(headers jsonb, prefix text)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if jsonb_typeof(_check_headers.headers) <> 'object' then
        perform outbox._refuse('OB003', format('%sheaders must be an object', _check_headers.prefix),
            'Pass a JSON object of header names and values.');
    end if;
    if octet_length(_check_headers.headers::text) > 32768 then
        perform outbox._refuse('OB003', format('%sheaders are larger than 32 KiB', _check_headers.prefix),
            'Move large values into the body.');
    end if;
    if exists (
        select
        from jsonb_object_keys(_check_headers.headers) as k
        where k in ('CC', 'BCC', 'x-death', 'x-delivery-count', 'x-acquired-count')
           or k like 'x-first-death-%'
           or k like 'x-outbox-%'
    ) then
        perform outbox._refuse('OB003', format('%sheaders contain a reserved name', _check_headers.prefix),
            'CC, BCC, x-death, x-first-death-*, x-delivery-count, x-acquired-count and x-outbox-* belong to the broker and to outbox.');
    end if;
    if exists (
        with recursive node (name, value, depth) as (
            select e.key, e.value, 0
            from jsonb_each(_check_headers.headers) as e
            union all
            select c.name, c.value, n.depth + 1
            from node as n
            cross join lateral (
                select e.key as name, e.value
                from jsonb_each(case when jsonb_typeof(n.value) = 'object' then n.value end) as e
                union all
                select null, e.value
                from jsonb_array_elements(case when jsonb_typeof(n.value) = 'array' then n.value end) as e
            ) as c
            where n.depth < 2
        )
        select
        from node as n
        where octet_length(n.name) not between 1 and 128
           or (n.depth > 0 and jsonb_typeof(n.value) in ('object', 'array'))
           or (jsonb_typeof(n.value) = 'number'
               and case
                   when n.value #>> '{}' ~ '^-?[0-9]+$'
                   then (n.value #>> '{}')::numeric not between -9223372036854775808 and 9223372036854775807
                   else true
               end)
    ) then
        perform outbox._refuse('OB003', format('%sheaders contain a name or value that AMQP cannot carry unchanged', _check_headers.prefix),
            'Names have 1 to 128 bytes; values are strings, booleans, 64-bit integers, null, or flat lists and objects of those. Send other numbers as strings.');
    end if;
end
$function$;

comment on function outbox._check_headers(jsonb, text) is
    'Raises unless AMQP carries these headers unchanged.';

create or replace function outbox._check_properties(properties jsonb, prefix text)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if jsonb_typeof(_check_properties.properties) <> 'object' then
        perform outbox._refuse('OB003', format('%sproperties must be an object', _check_properties.prefix),
            'Pass a JSON object with priority, type, correlation_id, reply_to or app_id.');
    end if;
    if exists (
        select
        from jsonb_each(_check_properties.properties) as p
        where case
            when p.key = 'priority'
            then jsonb_typeof(p.value) <> 'number' or p.value #>> '{}' !~ '^([0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])$'
            when p.key = 'reply_to'
            then jsonb_typeof(p.value) <> 'string' or octet_length(p.value #>> '{}') > 255
                 or p.value #>> '{}' like 'amq.rabbitmq.reply-to%'
            when p.key in ('type', 'correlation_id', 'app_id')
            then jsonb_typeof(p.value) <> 'string' or octet_length(p.value #>> '{}') > 255
            else true
        end
    ) then
        perform outbox._refuse('OB003', format('%sproperties contain a name or value that cannot be sent', _check_properties.prefix),
            'priority is an integer from 0 to 255; type, correlation_id, reply_to and app_id are strings of at most 255 bytes; nothing else is taken.');
    end if;
end
$function$;

comment on function outbox._check_properties(jsonb, text) is
    'Raises unless these AMQP properties can be sent.';

create or replace function outbox._check_message(
    prefix       text,
    routing_key  text,
    body_bytes   integer,
    content_type text,
    key          text,
    exchange     text,
    eta          timestamptz,
    delay        interval,
    expires_in   interval,
    dedup_key    text,
    headers      jsonb,
    properties   jsonb
)
    returns void
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if _check_message.routing_key is null then
        perform outbox._refuse('OB001', format('%srouting_key must not be null', _check_message.prefix), 'Pass a routing key such as ''order.placed''.');
    end if;
    if _check_message.content_type is null then
        perform outbox._refuse('OB001', format('%scontent_type must not be null', _check_message.prefix), 'Pass a MIME type such as ''application/json''.');
    end if;
    if octet_length(_check_message.routing_key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%srouting_key must have 1 to 255 bytes', _check_message.prefix), 'Shorten it; bytes count, not characters.');
    end if;
    if octet_length(_check_message.content_type) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%scontent_type must have 1 to 255 bytes', _check_message.prefix), 'Pass a MIME type such as ''application/json''.');
    end if;
    if octet_length(_check_message.exchange) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%sexchange must have 1 to 255 bytes', _check_message.prefix),
            'Name an exchange, or leave it null for the setting default_exchange.');
    end if;
    if octet_length(_check_message.key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%skey must have 1 to 255 bytes', _check_message.prefix), 'Shorten it, or leave it null for no order.');
    end if;
    if octet_length(_check_message.dedup_key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%sdedup_key must have 1 to 255 bytes', _check_message.prefix), 'Shorten it, for instance to a hash.');
    end if;
    if _check_message.body_bytes > 1048576 and _check_message.body_bytes > outbox._value_of('max_body_bytes')::integer then
        perform outbox._refuse('OB004', format('%sbody is larger than max_body_bytes', _check_message.prefix),
            'Send a reference instead, or raise the limit (at most 15 MiB): select outbox.configure(''max_body_bytes'', ...).');
    end if;
    if _check_message.eta is not null and _check_message.delay is not null then
        perform outbox._refuse('OB005', format('%seta and delay exclude each other', _check_message.prefix), 'Pass one of them.');
    end if;
    if _check_message.delay < interval '0' then
        perform outbox._refuse('OB005', format('%sdelay must not be negative', _check_message.prefix), 'Leave it null to send at once.');
    end if;
    if not (isfinite(coalesce(_check_message.eta, 'epoch')) and coalesce(_check_message.delay, '0') <= interval '10 years'
            and coalesce(_check_message.eta, 'epoch') <= clock_timestamp() + interval '10 years') then
        perform outbox._refuse('OB005', format('%seta and delay must lie within 10 years', _check_message.prefix), 'Pass an earlier time.');
    end if;
    if _check_message.expires_in <= interval '0' or _check_message.expires_in > interval '10 years' then
        perform outbox._refuse('OB005', format('%sexpires_in must be positive and at most 10 years', _check_message.prefix), 'Leave it null to keep the message until it is sent.');
    end if;
    if _check_message.headers is not null then
        perform outbox._check_headers(_check_message.headers, _check_message.prefix);
    end if;
    if _check_message.properties is not null then
        perform outbox._check_properties(_check_message.properties, _check_message.prefix);
    end if;
end
$function$;

comment on function outbox._check_message(text, text, integer, text, text, text, timestamptz, interval, interval, text, jsonb, jsonb) is
    'Raises for whatever the broker could not take unchanged: one bad message would close the channel for all in flight.';

create or replace function outbox._with_context(headers jsonb, message_id uuid)
    returns jsonb
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_context  text := current_setting('outbox.context', true);
    v_tracking text := current_setting('outbox.tracking', true);
    v_headers  jsonb := _with_context.headers;
begin
    if v_context <> '' then
        if left(v_context, 1) <> '{' then
            perform outbox._refuse('OB003', 'outbox.context is not an object', 'Set it with set_context(), or to nothing.');
        end if;
        v_headers := v_context::jsonb || coalesce(v_headers, '{}');
    end if;
    if v_headers is not null then
        perform outbox._check_headers(v_headers, '');
    end if;
    if v_tracking <> '' then
        if v_tracking !~ '^[0-9a-fA-F-]{36}(,[0-9a-fA-F-]{36})*$' then
            perform outbox._refuse('OB003', 'outbox.tracking is not a list of message ids', 'Set it to UUIDs separated by commas, or to nothing.');
        end if;
        -- The newest ids matter most: a longer chain loses its beginning.
        v_headers := coalesce(v_headers, '{}') || jsonb_build_object('x-outbox-tracking-ids', (
            select jsonb_agg(c.id order by c.n)
            from (
                select t.id, t.n
                from unnest(string_to_array(v_tracking, ',')::uuid[] || _with_context.message_id) with ordinality as t (id, n)
                order by t.n desc
                limit 100
            ) as c
        ));
    end if;
    return v_headers;
end
$function$;

comment on function outbox._with_context(jsonb, uuid) is
    'Headers as they will travel: what set_context() and tracking add, explicit ones winning.';

create or replace function outbox._emit(
    routing_key  text,
    body         bytea,
    content_type text,
    key          text,
    headers      jsonb,
    exchange     text,
    eta          timestamptz,
    delay        interval,
    expires_in   interval,
    dedup_key    text,
    message_id   uuid,
    properties   jsonb
)
    returns bigint
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now        timestamptz := clock_timestamp();
    v_message_id uuid        := coalesce(_emit.message_id, gen_random_uuid());
    v_headers    jsonb       := _emit.headers;
    v_due_at     timestamptz;
    v_id         bigint;
begin
    perform outbox._check_message('', _emit.routing_key, octet_length(_emit.body), _emit.content_type, _emit.key, _emit.exchange,
        _emit.eta, _emit.delay, _emit.expires_in, _emit.dedup_key, _emit.headers, _emit.properties);

    if coalesce(current_setting('outbox.context', true), '') <> '' or coalesce(current_setting('outbox.tracking', true), '') <> '' then
        v_headers := outbox._with_context(_emit.headers, v_message_id);
    end if;

    v_due_at := coalesce(_emit.eta, v_now + _emit.delay);
    if v_due_at <= v_now then
        v_due_at := null;
    end if;

    if _emit.dedup_key is not null then
        loop
            insert into outbox.dedup as d (dedup_key, created_at)
            values (_emit.dedup_key, v_now)
            on conflict on constraint dedup_pkey do update
                set id = null,
                    created_at = excluded.created_at
                where d.created_at < excluded.created_at - outbox._value_of('dedup_window')::interval;
            exit when found;

            select d.id
            into v_id
            from outbox.dedup as d
            where d.dedup_key = _emit.dedup_key;
            if found then
                return v_id;
            end if;
        end loop;
    end if;

    insert into outbox.message (
        lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, emitted_by,
        dedup_key, body
    )
    values (
        -- The lane: as in emit(), which says why.
        case when _emit.key is null then (date_part('epoch', clock_timestamp()) * 250)::bigint & 63
             else hashtextextended(_emit.key collate "C", 0) & 63 end,
        v_due_at, v_message_id, _emit.exchange, _emit.routing_key, _emit.key, _emit.content_type, v_headers, _emit.properties, v_now,
        coalesce(v_due_at, v_now) + _emit.expires_in, session_user, _emit.dedup_key, _emit.body
    )
    returning id into v_id;

    if _emit.dedup_key is not null then
        update outbox.dedup as d
        set id = v_id
        where d.dedup_key = _emit.dedup_key;
    end if;
    return v_id;
end
$function$;

comment on function outbox._emit(text, bytea, text, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Checks and inserts one message of any kind.';

create or replace function outbox.emit(
    routing_key text,
    payload     jsonb,
    key         text        = null,
    headers     jsonb       = null,
    exchange    text        = null,
    eta         timestamptz = null,
    delay       interval    = null,
    expires_in  interval    = null,
    dedup_key   text        = null,
    message_id  uuid        = null,
    properties  jsonb       = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_body bytea := convert_to(emit.payload::text, 'UTF8');
    v_id   bigint;
begin
    -- The plain message, which most are, goes straight in; _emit() does the same for the others.
    -- (BETWEEN would evaluate its first operand twice: each call here is 1 % of an emit.)
    if octet_length(emit.routing_key) <= 255 and emit.routing_key <> ''
       and octet_length(v_body) <= 1048576
       and (octet_length(emit.key) <= 255 and emit.key <> '') is not false
       and num_nonnulls(emit.headers, emit.exchange, emit.eta, emit.delay, emit.expires_in, emit.dedup_key, emit.properties,
               nullif(current_setting('outbox.context', true), ''), nullif(current_setting('outbox.tracking', true), '')) = 0
    then
        insert into outbox.message (lane, message_id, routing_key, key, content_type, created_at, emitted_by, body)
        values (
            -- Without a key: what is emitted within 4 ms shares a lane. Each lane in a claim costs, and its messages lie on few pages.
            case when emit.key is null then (date_part('epoch', clock_timestamp()) * 250)::bigint & 63
                 else hashtextextended(emit.key collate "C", 0) & 63 end,
            coalesce(emit.message_id, gen_random_uuid()), emit.routing_key, emit.key, 'application/json', clock_timestamp(), session_user,
            v_body
        )
        returning id into v_id;
        return v_id;
    end if;
    if emit.payload is null then
        perform outbox._refuse('OB001', 'payload must not be null', 'The JSON value null is written ''null''::jsonb.');
    end if;
    return outbox._emit(emit.routing_key, v_body, 'application/json', emit.key, emit.headers, emit.exchange, emit.eta, emit.delay,
        emit.expires_in, emit.dedup_key, emit.message_id, emit.properties);
end
$function$;

comment on function outbox.emit(text, jsonb, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Writes a JSON message in the caller''s transaction and returns its id; it leaves if and when the transaction commits.';

create or replace function outbox.emit_bytes(
    routing_key  text,
    body         bytea,
    content_type text        = 'application/octet-stream',
    key          text        = null,
    headers      jsonb       = null,
    exchange     text        = null,
    eta          timestamptz = null,
    delay        interval    = null,
    expires_in   interval    = null,
    dedup_key    text        = null,
    message_id   uuid        = null,
    properties   jsonb       = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if emit_bytes.body is null then
        perform outbox._refuse('OB001', 'body must not be null', 'An empty body is written '''' (no bytes).');
    end if;
    return outbox._emit(emit_bytes.routing_key, emit_bytes.body, emit_bytes.content_type, emit_bytes.key, emit_bytes.headers,
        emit_bytes.exchange, emit_bytes.eta, emit_bytes.delay, emit_bytes.expires_in, emit_bytes.dedup_key, emit_bytes.message_id,
        emit_bytes.properties);
end
$function$;

comment on function outbox.emit_bytes(text, bytea, text, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Writes a message whose body is sent byte for byte; otherwise like emit().';

create or replace function outbox.emit_many(messages jsonb)
    returns bigint[]
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_context boolean     := coalesce(current_setting('outbox.context', true), '') <> ''
                             or coalesce(current_setting('outbox.tracking', true), '') <> '';
    v_bad     bigint;
    v_ids     bigint[];
    -- Looked at before the server reads them: its own errors would show the value.
    v_time     constant text := '^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))'
                                '[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]+)?)?(Z|[+-](0[0-9]|1[0-5])(:?[0-5][0-9])?)$';
    v_interval constant text := regexp_replace(
        '^P(?=.)(#Y)?(#M)?(#W)?(#D)?(T(?=.)(#H)?(#M)?(#S)?)?$|^(?=.)(# ?y(ear)?s? ?)?(# ?mon(th)?s? ?)?(# ?d(ay)?s? ?)?(# ?h(our)?s? ?)?(# ?m(in(ute)?)?s? ?)?(# ?s(ec(ond)?)?s? ?)?'
        '(# ?(ms|milliseconds?) ?)?(# ?microseconds? ?)?(-?[0-9]{1,9}:[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?)?$',
        '#', '-?[0-9]{1,9}([.][0-9]{1,9})?', 'g');
begin
    if emit_many.messages is null then
        perform outbox._refuse('OB001', 'messages must not be null', 'Pass a JSON array of objects with the arguments of emit() as fields.');
    end if;
    if jsonb_typeof(emit_many.messages) <> 'array' then
        perform outbox._refuse('OB006', 'messages must be an array', 'Pass a JSON array of objects with the arguments of emit() as fields.');
    end if;

    select e.n - 1
    into v_bad
    from jsonb_array_elements(emit_many.messages) with ordinality as e (message, n)
    where jsonb_typeof(e.message) <> 'object'
       or (e.message ? 'payload') = (e.message ? 'body')
       or (e.message ? 'content_type') and not (e.message ? 'body')
       -- Nearly all have these fields and no others, and a body without line breaks; only the others are looked at one by one.
       or (e.message - '{payload,body,content_type,routing_key}'::text[] <> '{}'
           or jsonb_typeof(e.message -> 'routing_key') <> 'string'
           or jsonb_typeof(e.message -> 'content_type') <> 'string'
           or jsonb_typeof(e.message -> 'body') <> 'string'
           or octet_length(e.message ->> 'body') % 4 <> 0
           or e.message ->> 'body' !~ '^[A-Za-z0-9+/]*={0,2}$')
          and exists (
              select
              from jsonb_each(e.message) as f
              where case f.key
                  when 'payload' then false
                  when 'body' then jsonb_typeof(f.value) <> 'string'
                       or translate(f.value #>> '{}', E' \r\n', '') !~ '^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
                  when 'headers' then false
                  when 'properties' then false
                  else jsonb_typeof(f.value) not in ('string', 'null')
                       or case f.key
                           when 'routing_key' then false
                           when 'content_type' then false
                           when 'key' then false
                           when 'exchange' then false
                           when 'dedup_key' then false
                           when 'message_id' then f.value #>> '{}' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                           when 'eta' then f.value #>> '{}' !~ v_time
                           when 'delay' then f.value #>> '{}' !~ v_interval
                           when 'expires_in' then f.value #>> '{}' !~ v_interval
                           else true
                       end
              end
          )
    order by e.n
    limit 1;
    if found then
        perform outbox._refuse('OB006', format('messages[%s] is not a message', v_bad),
            'Each is an object with the arguments of emit() as fields, times and intervals as text, and either payload, or body (base64) and content_type.');
    end if;

    if emit_many.messages @? '$[*].dedup_key' then
        perform outbox._check_message(format('messages[%s].', m.n - 1), m.routing_key, octet_length(m.body), m.content_type, m.key,
            m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties)
        from outbox._message_rows(emit_many.messages) as m;
        select array_agg(outbox._emit(m.routing_key, m.body, m.content_type, m.key, m.headers, m.exchange, m.eta, m.delay, m.expires_in,
            m.dedup_key, m.message_id, m.properties) order by m.n)
        into v_ids
        from outbox._message_rows(emit_many.messages) as m;
        return coalesce(v_ids, '{}');
    end if;

    with made as (
        insert into outbox.message (
            lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, emitted_by, body
        )
        select
            -- As emit() does, but in runs of 8: many at once must not fill one lane.
            case when m.key is null then (date_part('epoch', v_now) * 250)::bigint + m.n / 8 & 63
                 else hashtextextended(m.key collate "C", 0) & 63 end,
            d.due_at,
            m.message_id,
            m.exchange,
            m.routing_key,
            m.key,
            m.content_type,
            case when v_context then outbox._with_context(m.headers, m.message_id) else m.headers end,
            m.properties,
            v_now,
            coalesce(d.due_at, v_now) + m.expires_in,
            session_user,
            m.body
        from outbox._message_rows(emit_many.messages) as m
        cross join lateral (
            select case when coalesce(m.eta, v_now + m.delay) > v_now then coalesce(m.eta, v_now + m.delay) end as due_at
        ) as d
        -- What passes the first test needs no closer look; the second raises or returns nothing.
        where (octet_length(m.routing_key) between 1 and 255
               and octet_length(m.body) <= 1048576
               and octet_length(m.content_type) between 1 and 255
               and (m.key is null or octet_length(m.key) between 1 and 255)
               and num_nonnulls(m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties) = 0) is true
           or outbox._check_message(format('messages[%s].', m.n - 1), m.routing_key, octet_length(m.body), m.content_type, m.key,
                  m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties)::text = ''
        returning id
    )
    select coalesce(array_agg(made.id order by made.id), '{}')
    into v_ids
    from made;
    return v_ids;
end
$function$;

comment on function outbox.emit_many(jsonb) is
    'Writes an array of messages in one statement and returns their ids in the same order; fields are the arguments of emit().';

create or replace function outbox._message_rows(messages jsonb)
    returns table (
        n            bigint,
        routing_key  text,
        body         bytea,
        content_type text,
        key          text,
        headers      jsonb,
        exchange     text,
        eta          timestamptz,
        delay        interval,
        expires_in   interval,
        dedup_key    text,
        message_id   uuid,
        properties   jsonb
    )
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select
        m.n,
        m.routing_key,
        -- No body means there is a payload, and if that reads as null it is the JSON value.
        case when m.body is null then convert_to(coalesce(m.payload, 'null')::text, 'UTF8') else decode(m.body, 'base64') end,
        case when m.body is null then 'application/json' else coalesce(m.content_type, 'application/octet-stream') end,
        m.key,
        nullif(m.headers, 'null'),
        m.exchange,
        m.eta,
        m.delay,
        m.expires_in,
        m.dedup_key,
        coalesce(m.message_id, gen_random_uuid()),
        nullif(m.properties, 'null')
    from rows from (
        jsonb_to_recordset(_message_rows.messages) as (
            routing_key text, payload jsonb, body text, content_type text, key text, headers jsonb, exchange text, eta timestamptz,
            delay interval, expires_in interval, dedup_key text, message_id uuid, properties jsonb
        )
    ) with ordinality as m (routing_key, payload, body, content_type, key, headers, exchange, eta, delay, expires_in, dedup_key, message_id, properties, n);
$function$;

comment on function outbox._message_rows(jsonb) is
    'The objects of emit_many() as rows, in order.';

create or replace function outbox.emit_event(
    aggregate_type text,
    aggregate_id   text,
    event_type     text,
    payload        jsonb,
    headers        jsonb = null,
    properties     jsonb = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if emit_event.aggregate_type is null or emit_event.aggregate_id is null or emit_event.event_type is null then
        perform outbox._refuse('OB001', 'aggregate_type, aggregate_id and event_type must not be null', 'Pass all three, or use emit().');
    end if;
    return outbox.emit(
        routing_key => emit_event.aggregate_type || '.' || emit_event.event_type,
        payload     => emit_event.payload,
        key         => emit_event.aggregate_type || ':' || emit_event.aggregate_id,
        headers     => jsonb_build_object(
                           'aggregate_type', emit_event.aggregate_type,
                           'aggregate_id', emit_event.aggregate_id,
                           'event_type', emit_event.event_type
                       ) || coalesce(nullif(emit_event.headers, 'null'), '{}'),
        properties  => emit_event.properties
    );
end
$function$;

comment on function outbox.emit_event(text, text, text, jsonb, jsonb, jsonb) is
    'emit() for a domain event: routing key type.event, ordering key type:id, the three fields as headers.';

create or replace function outbox.set_context(headers jsonb)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if set_context.headers is not null then
        perform outbox._check_headers(set_context.headers, '');
    end if;
    perform set_config('outbox.context', coalesce(set_context.headers::text, ''), true);
end
$function$;

comment on function outbox.set_context(jsonb) is
    'For the rest of the transaction: headers merged into every later emit, triggers included; null clears them.';

create or replace function outbox._in_flight(lane smallint, id bigint)
    returns boolean
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select _in_flight.id = any (l.handed)
    from outbox.lane as l
    where l.lane = _in_flight.lane
    order by l.version desc
    limit 1;
$function$;

comment on function outbox._in_flight(smallint, bigint) is
    'Whether a message of a lane is in the hands of a relay.';

create or replace function outbox.cancel(id bigint)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_message record;
    v_own     boolean;
begin
    if cancel.id is null then
        perform outbox._refuse('OB001', 'id must not be null', 'Pass the id that emit() returned.');
    end if;

    -- Without a lock at first: whoever gets false as answer must not keep a relay waiting.
    select m.lane, m.due_at, m.key, m.dedup_key, m.emitted_by, m.xmin::text::bigint as xmin
    into v_message
    from outbox.message as m
    where m.id = cancel.id;
    if not found then
        return false;
    end if;
    if v_message.emitted_by <> session_user
       and not has_column_privilege(session_user, 'outbox.access', 'admin', 'references') then
        return false;
    end if;
    -- Visible and in progress: written by this very transaction, in whatever savepoint. Nobody else can have seen it.
    v_own := pg_xact_status(outbox._widen(v_message.xmin)) is not distinct from 'in progress';
    if v_message.due_at is null and not v_own then
        return false;
    end if;
    if not v_own then
        if current_setting('transaction_isolation') <> 'read committed' then
            perform outbox._refuse_isolation();
        end if;
        if outbox._in_flight(v_message.lane, cancel.id) then
            return false;
        end if;
        -- claim_batch() locks what it takes from behind a time or a failing key, so this lock decides between the two.
        perform
        from outbox.message as m
        where m.id = cancel.id
        for update;
        if not found or outbox._in_flight(v_message.lane, cancel.id) then
            return false;
        end if;
    end if;

    delete from outbox.message as m
    where m.id = cancel.id;
    delete from outbox.dedup as d
    where d.dedup_key = v_message.dedup_key
      and d.id = cancel.id;
    perform outbox._free_keys(array[v_message.lane], array[cancel.id]);
    return true;
end
$function$;

comment on function outbox.cancel(bigint) is
    'True: the message will not be sent. False: it is ready, in flight, sent, unknown, or another user''s.';

create or replace function outbox._ring()
    returns trigger
    language plpgsql
    volatile
    -- No search_path of its own: it runs under that of the function that emits, and pinning it again is 4 % of an emit.
as $function$
begin
    -- Got it: no relay sleeps, and until commit the lock tells a relay about to sleep that this emit is in flight.
    -- Refused: a relay sleeps, holding it. NOTIFY takes an instance-wide lock at commit, so it is only for then.
    if (pg_catalog.current_setting('outbox.notify', true) operator(pg_catalog.=) 'off') is not true
       and not pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::integer, 1)
    then
        perform pg_catalog.pg_notify('outbox', '');
    end if;
    return null;
end
$function$;

comment on function outbox._ring() is
    'The doorbell: NOTIFY outbox, but only when a relay sleeps.';
