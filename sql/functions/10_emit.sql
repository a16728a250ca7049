-- CODE. Station 10: a message joins the caller's transaction.
-- emit() only inserts: it reads no row (but of its dedup key), waits for nobody (but another open emit of that key) and
-- has no exception block, so it costs no subtransaction.

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
