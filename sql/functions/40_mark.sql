-- CODE. Station 40: the broker has confirmed.
-- Every settling call filters by token: a relay whose lane was taken over settles nothing of it any more.

create or replace function outbox.mark_sent(token uuid, ids bigint[])
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
    v_now  timestamptz := clock_timestamp();
    v_ids  bigint[];
    v_left bigint[];
    v_kept boolean;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if mark_sent.token is null or mark_sent.ids is null then
        perform outbox._refuse('OB001', 'token and ids must not be null', 'Pass the token of the claim and the ids that were confirmed.');
    end if;
    perform outbox._advance_horizon();

    v_ids := outbox._held_by(mark_sent.token, mark_sent.ids);
    if v_ids = '{}' then
        return 0;
    end if;
    -- A failing message that got through at last: its key may go on.
    if exists (select from outbox.held_key) then
        perform outbox._free_keys(array(select l.lane from outbox.lane as l where l.token = mark_sent.token), v_ids);
    end if;
    -- For stats(). Looking at every message would cost half as much again as deleting it: three stand for all.
    insert into outbox.tally (settled_at, first_id, sent, took, worst)
    select v_now, v_ids[1], cardinality(v_ids), avg(s.took) * cardinality(v_ids), max(s.took)
    from (
        select v_now - case when m.due_at is null or m.due_at = 'infinity' or m.attempts > 0 then m.created_at else m.due_at end as took
        from outbox.message as m
        where m.id in (v_ids[1], v_ids[(cardinality(v_ids) + 1) / 2], v_ids[cardinality(v_ids)])
    ) as s
    having count(*) > 0;
    v_kept := exists (select from outbox.setting as s where s.name = 'retention' and s.value <> 'delete');
    v_left := v_ids;
    -- To walk along an index costs less than as many ways down the primary key.
    if cardinality(v_ids) >= 100 then
        v_left := outbox._remove_runs(mark_sent.token, v_ids, case when v_kept then v_now end);
    end if;
    if v_kept then
        perform outbox._archive(v_left, v_now);
    else
        delete from outbox.message as m
        where m.id = any (v_left);
    end if;
    perform outbox._settle(mark_sent.token, v_ids);
    return cardinality(v_ids);
end
$function$;

comment on function outbox.mark_sent(uuid, bigint[]) is
    'Settles messages the broker has confirmed; returns how many. Fewer than given: the lease was lost, or they were settled before.';

create or replace function outbox._remove_runs(token uuid, ids bigint[], kept_at timestamptz)
    returns bigint[]
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part record;
    v_left bigint[] := '{}';
begin
    for v_part in
        select
            l.lane,
            l.floor,
            l.handed,
            l.handed[1] as first,
            l.handed[cardinality(l.handed)] as last,
            sum(cardinality(l.handed)) over () as total
        from outbox.lane as l
        where l.token = _remove_runs.token
    loop
        -- Not all of what was handed out is to go.
        if v_part.total > cardinality(_remove_runs.ids) then
            return _remove_runs.ids;
        end if;
        -- A stretch of the ready index, if it holds what was handed out and nothing else. A few are not worth it.
        if cardinality(v_part.handed) >= 100 and v_part.first >= v_part.floor then
            if _remove_runs.kept_at is null then
                delete from outbox.message as m
                where m.lane = v_part.lane
                  and m.due_at is null
                  and m.id between v_part.first and v_part.last
                  and outbox._is_run(v_part.lane, v_part.handed);
            else
                with gone as (
                    delete from outbox.message as m
                    where m.lane = v_part.lane
                      and m.due_at is null
                      and m.id between v_part.first and v_part.last
                      and outbox._is_run(v_part.lane, v_part.handed)
                    returning m.*
                )
                insert into outbox.archive (
                    id, sent_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at,
                    attempts, emitted_by, dedup_key, body
                )
                select
                    g.id, _remove_runs.kept_at, g.message_id, g.exchange, g.routing_key, g.key, g.content_type, g.headers, g.properties,
                    g.created_at, g.expires_at, g.attempts, g.emitted_by, g.dedup_key, g.body
                from gone as g;
            end if;
            continue when found;
        end if;
        v_left := v_left || v_part.handed;
    end loop;
    return v_left;
end
$function$;

comment on function outbox._remove_runs(uuid, bigint[], timestamptz) is
    'Deletes those of the messages that lie side by side in the index of their lane, or moves them to the archive; returns the others.';

-- Stable: it sees what the statement sees that calls it. (In language sql it would be planned anew each time.)
create or replace function outbox._is_run(lane smallint, ids bigint[])
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return _is_run.ids = array(
        select m.id
        from outbox.message as m
        where m.lane = _is_run.lane
          and m.due_at is null
          and m.id between _is_run.ids[1] and _is_run.ids[cardinality(_is_run.ids)]
        order by m.id
        limit cardinality(_is_run.ids) + 1
    );
end
$function$;

comment on function outbox._is_run(smallint, bigint[]) is
    'Whether the ready messages of a lane from the first of these to the last are these.';

create or replace function outbox._archive(ids bigint[], at timestamptz)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    -- In one statement: each message is looked up once.
    with gone as (
        delete from outbox.message as m
        where m.id = any (_archive.ids)
        returning m.*
    )
    insert into outbox.archive (
        id, sent_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, attempts,
        emitted_by, dedup_key, body
    )
    select
        g.id, _archive.at, g.message_id, g.exchange, g.routing_key, g.key, g.content_type, g.headers, g.properties, g.created_at,
        g.expires_at, g.attempts, g.emitted_by, g.dedup_key, g.body
    from gone as g;
end
$function$;

comment on function outbox._archive(bigint[], timestamptz) is
    'Moves messages that were sent to the archive.';

create or replace function outbox._held_by(token uuid, ids bigint[])
    returns bigint[]
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part   bigint[];
    v_handed bigint[] := '{}';
begin
    -- In the order of lanes, as everybody locks them.
    for v_part in
        select l.handed
        from outbox.lane as l
        where l.token = _held_by.token
        order by l.lane
        for update
    loop
        v_handed := v_handed || v_part;
    end loop;
    -- A relay settles its whole batch, as it was handed out, nearly always.
    if v_handed = _held_by.ids then
        return v_handed;
    end if;
    return array(
        select h.id
        from unnest(v_handed) as h (id)
        where h.id in (select i.id from unnest(_held_by.ids) as i (id))
    );
end
$function$;

comment on function outbox._held_by(uuid, bigint[]) is
    'Locks the lanes of a token and returns those of the ids that they handed out and that are not settled.';

create or replace function outbox._settle(token uuid, ids bigint[])
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    with rest as materialized (
        select
            x.lane,
            case
                -- All of them, nearly always, and then nothing is to be looked for.
                when sum(cardinality(x.handed)) over () = cardinality(_settle.ids) then '{}'
                else array(select h.id from unnest(x.handed) as h (id) where h.id not in (select i.id from unnest(_settle.ids) as i (id)))
            end as handed
        from outbox.lane as x
        where x.token = _settle.token
    )
    update outbox.lane as l
    set version = l.version + 1,
        floor = case when r.handed = '{}' then greatest(l.floor, l.reach + 1) else l.floor end,
        token = case when r.handed <> '{}' then l.token end,
        relay = case when r.handed <> '{}' then l.relay end,
        leased_until = case when r.handed <> '{}' then l.leased_until end,
        handed = r.handed,
        kills = case when l.suspects[1] = any (_settle.ids) then 0 else l.kills end,
        suspects = case
            when l.suspects = '{}' then l.suspects
            else array(select s.id from unnest(l.suspects) with ordinality as s (id, n) where s.id <> all (_settle.ids) order by s.n)
        end
    from rest as r
    where l.lane = r.lane
      and l.token = _settle.token;
end
$function$;

comment on function outbox._settle(uuid, bigint[]) is
    'Strikes ids off the lanes of a token; a lane with nothing left is free and its floor follows.';

create or replace function outbox.release_batch(token uuid)
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
    v_released integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if release_batch.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass the token of the claim.');
    end if;
    perform outbox._advance_horizon();

    perform
    from outbox.lane as l
    where l.token = release_batch.token
    order by l.lane
    for update;
    with released as (
        update outbox.lane as l
        set version = l.version + 1,
            -- The floor stops at the first message given back.
            floor = greatest(l.floor, least(l.reach + 1, r.first_ready)),
            token = null,
            relay = null,
            leased_until = null,
            handed = '{}'
        from (
            select
                x.lane,
                cardinality(x.handed) as open,
                (select min(m.id) from outbox.message as m where m.id = any (x.handed) and m.due_at is null) as first_ready
            from outbox.lane as x
            where x.token = release_batch.token
        ) as r
        where l.lane = r.lane
          and l.token = release_batch.token
        returning r.open
    )
    select coalesce(sum(released.open), 0)
    into v_released
    from released;
    return v_released;
end
$function$;

comment on function outbox.release_batch(uuid) is
    'Gives back what is unfinished of a claim, counting no attempt; returns how many messages.';

create or replace function outbox.extend_lease(token uuid, lease interval)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_relay bigint := nullif(current_setting('outbox.relay', true), '')::bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if extend_lease.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass the token of the claim.');
    end if;
    if (extend_lease.lease between interval '1 second' and interval '1 hour') is not true then
        perform outbox._refuse('OB011', 'lease must lie between 1 second and 1 hour', 'Pass what claim_batch() was called with.');
    end if;

    perform
    from outbox.lane as l
    where l.token = extend_lease.token
    order by l.lane
    for update;
    update outbox.lane as l
    set version = l.version + 1,
        leased_until = clock_timestamp() + extend_lease.lease,
        -- A relay that came back with a new session answers for its lanes with that one.
        relay = case when l.relay is not null and v_relay is not null then v_relay else l.relay end
    where l.token = extend_lease.token;
    return found;
end
$function$;

comment on function outbox.extend_lease(uuid, interval) is
    'Holds a claim for longer, from now. False: nothing is held under this token any more.';

create or replace function outbox.wait_sent(id bigint, timeout interval)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_until timestamptz := clock_timestamp() + wait_sent.timeout;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if wait_sent.id is null then
        perform outbox._refuse('OB001', 'id must not be null', 'Pass the id that emit() returned.');
    end if;
    -- Whoever waits in a function pins the snapshot horizon of the whole server.
    if (wait_sent.timeout between interval '0' and interval '10 s') is not true then
        perform outbox._refuse('OB011', 'timeout must lie between 0 and 10 seconds', 'Call it again to wait for longer.');
    end if;

    loop
        if exists (select from outbox.dead_letter as d where d.id = wait_sent.id) then
            return false;
        end if;
        if not exists (select from outbox.message as m where m.id = wait_sent.id) then
            return wait_sent.id between 1 and coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
        end if;
        exit when clock_timestamp() >= v_until;
        perform pg_sleep(least(0.02, extract(epoch from v_until - clock_timestamp())));
    end loop;
    return false;
end
$function$;

comment on function outbox.wait_sent(bigint, interval) is
    'Waits until a committed message has been sent: true. False: the time is over, or it is dead, or it was never emitted.';
