-- CODE. Station 20: a relay takes the next messages.
-- A claim leases lanes to a token and writes nothing on messages. Lane before message, always; lanes are locked in one
-- statement and messages read in a later one, whose snapshot then sees all that the lane's last holder settled.

create or replace function outbox.claim_batch(
    token      uuid,
    batch_size integer  = 500,
    lease      interval = '30 s',
    max_bytes  bigint   = 8388608,
    relay      bigint   = null
)
    returns setof outbox.claimed_message
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_now       timestamptz := clock_timestamp();
    -- In this order: a transaction that ended before the snapshot had written its WAL before the insert position was read; once
    -- the flush position is as far, it is on disk. And before the turn, which may write. (A replica is refused by the turn.)
    v_ended     xid := pg_snapshot_xmin(pg_current_snapshot())::xid;
    v_written   pg_lsn := case when not pg_is_in_recovery() then pg_current_wal_insert_lsn() end;
    v_turn      bigint := nextval('outbox.lane_turn') & 63;
    v_suspected smallint[] := '{}';
    v_suspect   smallint;
    v_floors    bigint[];
    v_safe_id   bigint;
    v_look_due  boolean;
    v_due       boolean := false;
    v_held      boolean;
    v_candidates refcursor;
    v_candidate record;
    v_lane      outbox.lane;
    v_alive     bigint[] := '{}';
    v_gone      bigint[] := '{}';
    v_quota     integer;
    v_part      outbox._part;
    v_lanes     integer := 0;
    v_waits     boolean := false;
    v_next      integer;
    v_ids       bigint[] := '{}';
    v_bytes     bigint := 0;
    v_exchange  text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if claim_batch.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass a new random UUID for each claim.');
    end if;
    if (claim_batch.batch_size between 1 and 10000) is not true then
        perform outbox._refuse('OB011', 'batch_size must lie between 1 and 10000', 'The default is 500.');
    end if;
    if (claim_batch.lease between interval '1 second' and interval '1 hour') is not true then
        perform outbox._refuse('OB011', 'lease must lie between 1 second and 1 hour', 'The default is 30 seconds.');
    end if;
    if (claim_batch.max_bytes > 0) is not true then
        perform outbox._refuse('OB011', 'max_bytes must be positive', 'The default is 8 MiB.');
    end if;
    if exists (select from outbox.lane as l where l.token = claim_batch.token) then
        perform outbox._refuse('OB012', 'token holds lanes already', 'Use a new token for each claim, or settle and release this one.');
    end if;
    if exists (select from outbox.setting as s where s.name = 'paused') then
        return;
    end if;
    select h.due_checked_at <= v_now - interval '100 ms', h.floors
    into v_look_due, v_floors
    from outbox.horizon as h
    order by h.version desc
    limit 1;
    v_look_due := coalesce(v_look_due, true);
    -- Asked once for all lanes: otherwise each of 64 would be looked into twice.
    if v_look_due then
        v_due := exists (select from outbox.message as m where m.due_at is not null and m.due_at <> 'infinity');
    end if;
    v_held := exists (select from outbox.held_key);
    -- What may have killed a relay leaves alone: taken with empty hands, and nothing beside it until it is settled. Every
    -- other claim begins with it.
    if exists (select from outbox.lane as l where l.suspects <> '{}') then
        v_suspected := array(select l.lane from outbox._lanes() as l where l.suspects <> '{}');
        select l.lane
        into v_suspect
        from outbox._lanes() as l
        where l.lane = any (v_suspected)
          and (l.leased_until is null or l.leased_until <= v_now or l.relay = claim_batch.relay)
        order by (l.lane - v_turn) & 63
        limit 1;
        if found and outbox._has_lanes(claim_batch.relay) then
            return;
        end if;
        -- At random, not in turn: two that take turns with equal steps can miss each other for ever.
        if random() < 0.5 then
            v_turn := coalesce(v_suspect, v_turn);
        end if;
    end if;

    open v_candidates for
        select l.lane, l.relay, l.leased_until > v_now as leased
        -- In turn, and looked into only as far as the loop goes: with a backlog one or two lanes fill the batch. Messages
        -- before the lane itself: most lanes have none, and the row of a lane costs three times as much to read.
        from generate_series(v_turn, v_turn + 63) as n
        cross join lateral (
            select x.lane, x.relay, x.leased_until
            from outbox.lane as x
            where x.lane = (n & 63)::smallint
            order by x.version desc
            limit 1
        ) as l
        -- Each looked for only if the one before it found nothing. (EXISTS might be planned as a hash of the whole table.)
        where coalesce(
                  nullif((n & 63)::smallint = any (v_suspected), false),
                  (
                      select true
                      from outbox.message as m
                      where m.lane = (n & 63)::smallint
                        and m.due_at is null
                        and m.id >= coalesce(v_floors[(n & 63) + 1], 0)
                      limit 1
                  ),
                  case when v_due then (
                      select true
                      from outbox.message as m
                      where m.lane = (n & 63)::smallint
                        and m.due_at is not null
                        and m.due_at <> 'infinity'
                        and m.due_at <= v_now
                      limit 1
                  ) end,
                  case when v_held then (
                      select true
                      from outbox.held_key as k
                      where k.lane = (n & 63)::smallint
                        and k.head_id is null
                      limit 1
                  ) end
              )
          and (l.leased_until is null
               or l.leased_until <= v_now
               -- somebody else's lease: worth a look whether its holder lives
               or l.leased_until > v_now + interval '3 s' and l.relay is not null and l.relay is distinct from claim_batch.relay);
    loop
        exit when v_lanes >= 16 or cardinality(v_ids) >= claim_batch.batch_size or v_bytes >= claim_batch.max_bytes;
        fetch v_candidates into v_candidate;
        exit when not found;
        if v_candidate.leased and not v_candidate.relay = any (v_gone) then
            continue when v_candidate.relay = any (v_alive);
            -- (The session that holds the lock would be granted it again, so it does not ask.)
            if outbox._holds(v_candidate.relay) or not pg_try_advisory_xact_lock_shared(v_candidate.relay) then
                v_alive := v_alive || v_candidate.relay;
                continue;
            end if;
            v_gone := v_gone || v_candidate.relay;
        end if;

        select x.*
        into v_lane
        from outbox.lane as x
        where x.lane = v_candidate.lane
        order by x.version desc
        limit 1
        for update skip locked;
        continue when not found;
        if v_lane.leased_until > clock_timestamp() then
            if v_lane.relay = any (v_gone) and v_lane.leased_until > v_now + interval '3 s' then
                update outbox.lane as x
                set version = x.version + 1,
                    leased_until = v_now + interval '3 s'
                where x.lane = v_lane.lane
                  and x.version = v_lane.version;
            end if;
            continue;
        end if;

        if v_lane.relay is not null then
            v_lane := outbox._take_over(v_lane);
        end if;
        if v_lane.suspects <> '{}' then
            continue when v_ids <> '{}' or outbox._has_lanes(claim_batch.relay);
            v_part := outbox._take_suspects(v_lane, claim_batch.batch_size, claim_batch.max_bytes, v_now);
        else
            -- Read under the lane's lock: the sweep, when it voids the proof, takes that lock as well.
            v_safe_id := (select h.safe_id from outbox.horizon as h order by h.version desc limit 1);
            v_quota := claim_batch.batch_size - cardinality(v_ids);
            v_part := outbox._take(v_lane, v_quota, claim_batch.max_bytes - v_bytes, v_ids = '{}', v_now, v_due, v_safe_id);
        end if;

        update outbox.lane as x
        set version = x.version + 1,
            floor = case when v_part.ids = '{}' then greatest(x.floor, v_part.reach + 1) else x.floor end,
            reach = v_part.reach,
            token = case when v_part.ids <> '{}' then claim_batch.token end,
            relay = case when v_part.ids <> '{}' then claim_batch.relay end,
            leased_until = case when v_part.ids <> '{}' then v_now + claim_batch.lease end,
            handed = v_part.ids,
            suspects = v_part.suspects,
            trial = v_part.trial,
            kills = v_part.kills
        where x.lane = v_lane.lane
          and x.version = v_lane.version;

        -- The next claim begins behind the last lane served, so that one which follows empty lanes gets no more turns than
        -- others; but at the first one that found no room.
        if not v_waits then
            v_waits := v_part.ids = '{}' and v_ids <> '{}';
            v_next := v_lane.lane + (not v_waits)::integer;
        end if;
        continue when v_part.ids = '{}';

        v_ids := v_ids || v_part.ids;
        v_bytes := v_bytes + v_part.bytes;
        v_lanes := v_lanes + 1;
        v_exchange := coalesce(v_exchange, outbox._value_of('default_exchange'));
        -- In the order of _take(): what was due, what was held, what is ready. _held_by() sees at once that it is the same.
        if v_part.tids <> '{}' then
            -- By place: in a lane that we hold no row moves, and walks down the primary key are saved.
            return query
            select
                m.id, m.message_id, coalesce(m.exchange, v_exchange), m.routing_key, m.key, m.body, m.content_type, m.headers,
                m.properties, m.expires_at - v_now, m.attempts, m.created_at
            from outbox.message as m
            where m.ctid = any (v_part.tids)
            order by m.due_at, m.id;
        end if;
        if cardinality(v_part.tids) < cardinality(v_part.ids) then
            -- A stretch of the ready index, and nothing can have appeared in it since: already in order.
            return query
            select
                m.id, m.message_id, coalesce(m.exchange, v_exchange), m.routing_key, m.key, m.body, m.content_type, m.headers,
                m.properties, m.expires_at - v_now, m.attempts, m.created_at
            from outbox.message as m
            where m.lane = v_lane.lane
              and m.due_at is null
              and m.id between v_part.ids[cardinality(v_part.tids) + 1] and v_part.ids[cardinality(v_part.ids)]
            order by m.id;
        end if;
        exit when v_part.suspects <> '{}';
    end loop;
    close v_candidates;
    -- Not when this one began with a suspect: going back to it each time would starve the lanes before it.
    if v_suspect is null and v_next <> v_turn + 1 then
        perform setval('outbox.lane_turn', v_next + 63);
    end if;

    -- A full batch may have left some behind whose time has come: then the next claim looks as well.
    if v_look_due and v_next is not null and cardinality(v_ids) < claim_batch.batch_size then
        update outbox.horizon as h
        set version = h.version + 1,
            due_checked_at = v_now
        where h.version = (
            select x.version
            from outbox.horizon as x
            order by x.version desc
            limit 1
            for update skip locked
        );
    end if;

    if v_ids = '{}' then
        return;
    end if;

    -- This commit is the fence between an emit with synchronous_commit = off and its publishing. It need not sync when all
    -- that it hands out was committed as it began and is on disk by now: the usual case, because emits sync. For many
    -- messages asking costs more.
    -- (A set clause of the function would have ended before the commit.)
    if current_setting('synchronous_commit') in ('off', 'local', 'remote_write')
       and (pg_current_wal_flush_lsn() < v_written
            or cardinality(v_ids) > 20
            or current_setting('synchronous_standby_names') <> ''
            or exists (select from outbox.message as m where m.id = any (v_ids) and age(m.xmin) <= age(v_ended)))
    then
        perform set_config('synchronous_commit', 'on', true);
    end if;
end
$function$;

comment on function outbox.claim_batch(uuid, integer, interval, bigint, bigint) is
    'Leases free lanes to the token and returns their next messages in the order to publish them. Settle them before the lease ends.';

create or replace function outbox._has_lanes(relay bigint)
    returns boolean
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return exists (
        select
        from outbox._lanes() as l
        where l.relay = _has_lanes.relay
          and l.leased_until > clock_timestamp()
    );
end
$function$;

comment on function outbox._has_lanes(bigint) is
    'Whether a relay has messages in its hands; false for one that did not say hello().';
