-- CODE. Station 45: the broker has refused. Back-off, dead letters, and the way back from there.
-- A message that failed waits in due_at and holds its key: what follows it waits behind it, in order.

create or replace function outbox._backoff(attempts integer)
    returns interval
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_base       double precision := extract(epoch from outbox._value_of('retry_base')::interval);
    v_multiplier double precision := outbox._value_of('retry_multiplier')::double precision;
    v_cap        double precision := extract(epoch from outbox._value_of('retry_cap')::interval);
    v_jitter     double precision := outbox._value_of('retry_jitter')::double precision;
begin
    -- Compared as logarithms: the power itself overflows long before attempts does.
    if ln(v_base) + _backoff.attempts * ln(v_multiplier) < ln(v_cap) then
        v_cap := v_base * power(v_multiplier, _backoff.attempts);
    end if;
    return make_interval(secs => v_cap * (1 + v_jitter * (2 * random() - 1)));
end
$function$;

comment on function outbox._backoff(integer) is
    'How long to wait after a failure with this many before it: base * multiplier^n, capped, then jittered.';

create or replace function outbox._bury(ids bigint[], reasons text[], errors text[], attempt integer)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_park  boolean := outbox._value_of('on_dead') = 'park';
    v_lanes smallint[];
begin
    with gone as (
        delete from outbox.message as m
        where m.id = any (_bury.ids)
        returning m.*
    ),
    buried as (
        insert into outbox.dead_letter (
            id, dead_at, reason, error, lane, message_id, exchange, routing_key, key, content_type, headers, properties, created_at,
            expires_at, attempts, emitted_by, dedup_key, parked, body
        )
        select
            g.id, clock_timestamp(), d.reason, coalesce(left(d.error, 1000), g.error), g.lane, g.message_id, g.exchange, g.routing_key,
            g.key, g.content_type, g.headers, g.properties, g.created_at, g.expires_at, g.attempts + _bury.attempt, g.emitted_by,
            g.dedup_key, v_park and g.key is not null, g.body
        from gone as g
        join unnest(_bury.ids, _bury.reasons, _bury.errors) as d (id, reason, error)
            on d.id = g.id
        returning id, lane, key, parked
    ),
    parked as (
        insert into outbox.held_key as k (lane, key, head_id)
        select b.lane, b.key, min(b.id)
        from buried as b
        where b.parked
        group by b.lane, b.key
        on conflict on constraint held_key_pkey do update
            set head_id = least(k.head_id, excluded.head_id)
    )
    select array_agg(distinct b.lane)
    into v_lanes
    from buried as b;
    if not v_park then
        perform outbox._free_keys(v_lanes, _bury.ids);
    end if;
end
$function$;

comment on function outbox._bury(bigint[], text[], text[], integer) is
    'Moves messages to dead_letter; their keys go on or are parked, as the setting on_dead says.';

create or replace function outbox._free_keys(lanes smallint[], heads bigint[])
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if not exists (select from outbox.held_key as k where k.lane = any (_free_keys.lanes)) then
        return;
    end if;
    -- The next obstacle may be a message of the key that died behind this one, and was parked.
    update outbox.held_key as k
    set head_id = (
        select min(d.id)
        from outbox.dead_letter as d
        where d.lane = k.lane
          and d.key = k.key
          and d.parked
    )
    where k.lane = any (_free_keys.lanes)
      and k.head_id in (select h.id from unnest(_free_keys.heads) as h (id));
end
$function$;

comment on function outbox._free_keys(smallint[], bigint[]) is
    'Lets the keys in these lanes go on that waited for one of these messages.';

create or replace function outbox.mark_failed(
    token    uuid,
    ids      bigint[],
    errors   text[],
    reasons  text[]     = null,
    retry_in interval[] = null,
    counts   boolean    = true,
    dead     boolean    = false
)
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_ids     bigint[];
    v_most    integer := outbox._value_of('max_attempts')::integer;
    v_dead    bigint[];
    v_reasons text[];
    v_errors  text[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if mark_failed.token is null or mark_failed.ids is null or mark_failed.errors is null
       or mark_failed.counts is null or mark_failed.dead is null
    then
        perform outbox._refuse('OB001', 'token, ids, errors, counts and dead must not be null', 'Pass the token of the claim, the ids that failed and an error for each.');
    end if;
    if cardinality(mark_failed.errors) <> cardinality(mark_failed.ids)
       or cardinality(mark_failed.reasons) <> cardinality(mark_failed.ids)
       or cardinality(mark_failed.retry_in) <> cardinality(mark_failed.ids)
    then
        perform outbox._refuse('OB013', 'ids, errors, reasons and retry_in must have the same length', 'Pass one element for each id; null stands for none.');
    end if;
    if exists (
        select
        from unnest(mark_failed.reasons) as r (reason)
        where r.reason not in ('max_attempts', 'unroutable', 'rejected', 'expired', 'killed_relay')
    ) then
        perform outbox._refuse('OB014', 'reasons contains an unknown reason', 'Reasons are max_attempts, unroutable, rejected, expired and killed_relay.');
    end if;
    if exists (select from unnest(mark_failed.retry_in) as r (retry_in) where r.retry_in not between interval '0' and interval '10 years') then
        perform outbox._refuse('OB011', 'retry_in must lie between 0 and 10 years', 'Pass null for the usual back-off.');
    end if;
    perform outbox._advance_horizon();

    v_ids := outbox._held_by(mark_failed.token, mark_failed.ids);
    if v_ids = '{}' then
        return 0;
    end if;

    select array_agg(d.id), array_agg(coalesce(d.reason, 'max_attempts')), array_agg(d.error)
    into v_dead, v_reasons, v_errors
    from (
        select distinct on (f.id) f.id, f.reason, f.error
        from unnest(mark_failed.ids, mark_failed.errors, mark_failed.reasons) as f (id, error, reason)
        join outbox.message as m
            on m.id = f.id
        where f.id = any (v_ids)
          and (f.reason in ('rejected', 'expired') or mark_failed.dead or mark_failed.counts and m.attempts + 1 >= v_most)
    ) as d;
    if v_dead is not null then
        perform outbox._bury(v_dead, v_reasons, v_errors, mark_failed.counts::integer);
    end if;

    -- The first failing message of a key becomes its head; the others of the key wait behind it, also one that was the head
    -- before and had a time of its own to wait for.
    with failed as (
        select m.id, m.lane, m.key
        from outbox.message as m
        where m.id = any (v_ids)
          and m.key is not null
    ),
    before as (
        select k.lane, k.key, k.head_id
        from outbox.held_key as k
        where (k.lane, k.key) in (select f.lane, f.key from failed as f)
    ),
    after as (
        insert into outbox.held_key as k (lane, key, head_id)
        select f.lane, f.key, min(f.id)
        from failed as f
        group by f.lane, f.key
        on conflict on constraint held_key_pkey do update
            set head_id = least(k.head_id, excluded.head_id)
        returning k.lane, k.key, k.head_id
    )
    update outbox.message as m
    set due_at = 'infinity'
    from before as b
    join after as a
        on a.lane = b.lane
        and a.key = b.key
    where m.id = b.head_id
      and a.head_id < b.head_id;
    -- Others of the key that are in the same hands and unsettled: should they come back, older ones go before the new
    -- head, younger ones stand in line behind it, among those that failed.
    update outbox.message as m
    set due_at = case when m.id < k.head_id then v_now else 'infinity' end
    from outbox.held_key as k
    where m.id in (
          select h.id
          from outbox.lane as l
          cross join lateral unnest(l.handed) as h (id)
          where l.token = mark_failed.token
      )
      and m.id <> all (v_ids)
      and k.lane = m.lane
      and k.key = m.key
      and k.head_id = any (v_ids);

    update outbox.message as m
    set attempts = m.attempts + mark_failed.counts::integer,
        error = coalesce(left(f.error, 1000), m.error),
        due_at = case
            when m.key is not null and not exists (
                select
                from outbox.held_key as k
                where k.lane = m.lane
                  and k.key = m.key
                  and k.head_id = m.id
            ) then 'infinity'
            else v_now + coalesce(f.retry_in, outbox._backoff(m.attempts))
        end
    from unnest(
        mark_failed.ids, mark_failed.errors,
        coalesce(mark_failed.retry_in, array_fill(null::interval, array[cardinality(mark_failed.ids)]))
    ) as f (id, error, retry_in)
    where m.id = f.id
      and f.id = any (v_ids);

    perform outbox._settle(mark_failed.token, v_ids);
    return cardinality(v_ids);
end
$function$;

comment on function outbox.mark_failed(uuid, bigint[], text[], text[], interval[], boolean, boolean) is
    'Settles messages the broker refused: each is retried after a back-off, or dead. counts => false: no attempt is counted, for what is not the message''s fault. dead => true: none is retried. Returns how many; fewer than given as for mark_sent().';

create or replace function outbox.dead_among(ids bigint[])
    returns table (
        id           bigint,
        message_id   uuid,
        exchange     text,
        routing_key  text,
        key          text,
        body         bytea,
        content_type text,
        headers      jsonb,
        properties   jsonb,
        expires_in   interval,
        attempts     integer,
        created_at   timestamptz,
        error        text,
        reason       text
    )
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if dead_among.ids is null then
        perform outbox._refuse('OB001', 'ids must not be null', 'Pass ids of messages.');
    end if;
    return query
        select
            d.id, d.message_id, coalesce(d.exchange, outbox._value_of('default_exchange')), d.routing_key, d.key, d.body, d.content_type,
            d.headers, d.properties, d.expires_at - d.dead_at, d.attempts, d.created_at, d.error, d.reason
        from outbox.dead_letter as d
        where d.id = any (dead_among.ids)
          -- what a relay has just seen die; older ones are none of its business
          and d.dead_at > clock_timestamp() - interval '1 minute';
end
$function$;

comment on function outbox.dead_among(bigint[]) is
    'Which of these messages died within the last minute, and why: for a relay that tells others. The fields are those of claimed_message, and error and reason.';

create or replace function outbox.requeue_dead(ids bigint[])
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now      timestamptz := clock_timestamp();
    v_requeued integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if requeue_dead.ids is null then
        perform outbox._refuse('OB001', 'ids must not be null', 'Pass ids of outbox.dead_letter.');
    end if;
    with gone as (
        delete from outbox.dead_letter as d
        where d.id = any (requeue_dead.ids)
        returning d.*
    )
    insert into outbox.message (
        id, lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, attempts,
        emitted_by, dedup_key, error, body
    )
    select
        -- due now, never ready: the lane's floor may have passed its id
        g.id, g.lane, v_now, g.message_id, g.exchange, g.routing_key, g.key, g.content_type, g.headers, g.properties, g.created_at,
        v_now + (g.expires_at - g.created_at), 0, g.emitted_by, g.dedup_key, g.error, g.body
    from gone as g;
    get diagnostics v_requeued = row_count;
    return v_requeued;
end
$function$;

comment on function outbox.requeue_dead(bigint[]) is
    'Puts dead letters back, due now, with no attempts counted; returns how many there were.';

create or replace function outbox.purge_dead(older_than interval)
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if purge_dead.older_than is null then
        perform outbox._refuse('OB001', 'older_than must not be null', 'Pass interval ''0'' to remove all dead letters.');
    end if;
    if purge_dead.older_than not between interval '0' and interval '100 years' then
        perform outbox._refuse('OB011', 'older_than must lie between 0 and 100 years', 'Pass interval ''0'' to remove all dead letters.');
    end if;
    return outbox._purge_dead(clock_timestamp() - purge_dead.older_than, null);
end
$function$;

comment on function outbox.purge_dead(interval) is
    'Removes dead letters that died longer ago than this; returns how many. Keys parked behind them go on.';

create or replace function outbox._purge_dead(before timestamptz, most integer)
    returns integer
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_purged integer;
    v_lanes  smallint[];
    v_parked bigint[];
begin
    with gone as (
        delete from outbox.dead_letter as d
        where d.id in (
            select x.id
            from outbox.dead_letter as x
            where x.dead_at <= _purge_dead.before
            order by x.dead_at
            limit _purge_dead.most
            for update skip locked
        )
        returning d.id, d.lane, d.parked
    )
    select count(*), array_agg(distinct g.lane) filter (where g.parked), array_agg(g.id) filter (where g.parked)
    into v_purged, v_lanes, v_parked
    from gone as g;
    perform outbox._free_keys(v_lanes, v_parked);
    return v_purged;
end
$function$;

comment on function outbox._purge_dead(timestamptz, integer) is
    'Removes dead letters that died before a time, at most so many; keys parked behind them go on.';
