-- CODE. Station 10: many messages at once, in one statement.

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
