-- CODE. Station 10: what a message may be. Whatever AMQP cannot carry is refused here, before it is stored.

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
