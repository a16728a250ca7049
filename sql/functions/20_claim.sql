-- CODE. Station 20: a relay takes the next messages, and stations around it: sleeping, waking, saying hello.
-- A claim leases lanes to a token and writes nothing on messages. Lane before message, always; lanes are locked in one
-- statement and messages read in a later one, whose snapshot then sees all that the lane's last holder settled.

create or replace function outbox.hello(name text)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_before bigint := nullif(current_setting('outbox.relay', true), '')::bigint;
    v_relay  bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if hello.name is null then
        perform outbox._refuse('OB001', 'name must not be null', 'Pass a name that tells an operator which relay this is.');
    end if;
    if octet_length(hello.name) not between 1 and 255 then
        perform outbox._refuse('OB002', 'name must have 1 to 255 bytes', 'Shorten it.');
    end if;

    -- One hello at a time: two of different kinds would not see each other.
    lock table outbox.relay in share update exclusive mode;
    delete from outbox.relay as r
    where pg_try_advisory_xact_lock_shared(r.relay);
    if exists (select from outbox.relay as r where starts_with(r.name, 'worker: ') <> starts_with(hello.name, 'worker: ')) then
        perform outbox._refuse('OB015', 'messages of this database are delivered by the other kind, relays or workers',
            'A message goes to the broker or straight to listeners, not to both. Stop those that run, or start the kind that does.');
    end if;

    -- Random for each session: a name used twice, or a session that comes back, cannot pass for another.
    v_relay := ('x' || replace(left(gen_random_uuid()::text, 18), '-', ''))::bit(64)::bigint;
    perform pg_advisory_lock(v_relay);
    if v_before is not null and outbox._holds(v_before) then
        perform pg_advisory_unlock(v_before);
    end if;
    perform set_config('outbox.relay', v_relay::text, false);

    insert into outbox.relay (relay, name)
    values (v_relay, hello.name);

    perform outbox._sweep();
    return v_relay;
end
$function$;

comment on function outbox.hello(text) is
    'Registers a relay: takes the life lock of this session and returns its key for claim_batch(). A name that begins with "worker: " is that of a worker, which hands messages to listeners itself; while one kind runs, the other is refused.';

create or replace function outbox._holds(key bigint)
    returns boolean
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return exists (
        select
        from pg_locks as l
        where l.locktype = 'advisory'
          and l.pid = pg_backend_pid()
          and l.objsubid = 1
          and l.classid::bigint = (_holds.key >> 32) & 4294967295
          and l.objid::bigint = _holds.key & 4294967295
          -- as hello() takes it: claim_batch() tries the locks of others, shared
          and l.mode = 'ExclusiveLock'
    );
end
$function$;

comment on function outbox._holds(bigint) is
    'Whether this session holds the advisory lock of a relay.';

create or replace function outbox.relay_settings()
    returns jsonb
    language sql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
    select jsonb_build_object(
        'default_exchange', outbox._value_of('default_exchange'),
        'strict_keys', outbox._value_of('strict_keys') = 'on'
    );
$function$;

comment on function outbox.relay_settings() is
    'What a relay must know of the settings: default_exchange, and strict_keys (publish a key''s next message only after the confirm of the one before).';

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
    v_tids      tid[] := '{}';
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
        fetch v_candidates into v_candidate;
        exit when not found or v_lanes >= 16 or cardinality(v_ids) >= claim_batch.batch_size or v_bytes >= claim_batch.max_bytes;
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
        v_ids := v_ids || v_part.ids;
        v_tids := v_tids || v_part.tids;
        v_bytes := v_bytes + v_part.bytes;
        v_lanes := v_lanes + (v_part.ids <> '{}')::integer;
        exit when v_part.suspects <> '{}' and v_part.ids <> '{}';
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
            or cardinality(v_tids) > 20
            or current_setting('synchronous_standby_names') <> ''
            or exists (select from outbox.message as m where m.ctid = any (v_tids) and age(m.xmin) <= age(v_ended)))
    then
        perform set_config('synchronous_commit', 'on', true);
    end if;

    -- By place, not by id: in lanes that we hold no row moves, and 500 walks down the primary key are saved. In the order of
    -- _take(), lane by lane: what was due, what was held, what is ready. _held_by() sees at once that it is the same.
    v_exchange := outbox._value_of('default_exchange');
    return query
    select
        m.id, m.message_id, coalesce(m.exchange, v_exchange), m.routing_key, m.key, m.body, m.content_type, m.headers, m.properties,
        m.expires_at - v_now, m.attempts, m.created_at
    from outbox.message as m
    where m.ctid = any (v_tids)
    order by m.lane, m.due_at, m.id;
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

create or replace function outbox._take_over(lane outbox.lane)
    returns outbox.lane
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_lane outbox.lane := _take_over.lane;
begin
    -- A lease that ran out accuses nobody while its holder's session lives: that relay is slow, not dead.
    -- (The session that holds the lock would be granted it again, so it does not ask.)
    if outbox._holds(v_lane.relay) or not pg_try_advisory_xact_lock_shared(v_lane.relay) then
        return v_lane;
    end if;
    update outbox.lane as l
    set version = l.version + 1,
        token = null,
        relay = null,
        leased_until = null,
        handed = '{}',
        suspects = l.handed,
        -- By halves a culprit among 500 is alone after 9 deaths, and 500 innocent ones are through after two claims.
        trial = (cardinality(l.handed) + 1) / 2,
        kills = case when l.handed = l.suspects[1:1] then l.kills + 1 else 0 end
    where l.lane = v_lane.lane
      and l.version = v_lane.version
    returning l.*
    into v_lane;
    return v_lane;
end
$function$;

comment on function outbox._take_over(outbox.lane) is
    'Frees a lane whose lease has ended; if its relay died, what was in hand is suspected.';

create or replace function outbox._take_suspects(lane outbox.lane, quota integer, room bigint, at timestamptz)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part outbox._part;
begin
    v_part.ids := '{}';
    v_part.tids := '{}';
    v_part.bytes := 0;
    v_part.reach := (_take_suspects.lane).floor - 1;
    v_part.trial := (_take_suspects.lane).trial;
    perform outbox._bury_expired((_take_suspects.lane).suspects, _take_suspects.at);
    v_part.suspects := array(
        select s.id
        from unnest((_take_suspects.lane).suspects) with ordinality as s (id, n)
        join outbox.message as m
            on m.id = s.id
        left join outbox.held_key as k
            on k.lane = m.lane
            and k.key = m.key
        -- as _take() would: ready or due and not behind a failing one, or held behind one that is out of the way
        where case m.due_at
            when 'infinity' then k.key is not null and k.head_id is null
            else (m.due_at is null or m.due_at <= _take_suspects.at)
                 and (k.key is null or k.head_id >= m.id)
        end
        order by s.n
        for update of m skip locked
    );
    v_part.kills := case when v_part.suspects = (_take_suspects.lane).suspects then (_take_suspects.lane).kills else 0 end;
    if v_part.kills >= 5 then
        perform outbox._bury(v_part.suspects, array['killed_relay'], array['the relay died with it 5 times, nothing else in its hands'], 0);
        raise notice using errcode = 'OB016', message = 'messages were put aside', detail = v_part.suspects::text;
        v_part.suspects := '{}';
        v_part.kills := 0;
    end if;
    return outbox._admit(v_part, v_part.suspects[:least(_take_suspects.quota, v_part.trial)], true, _take_suspects.room, true);
end
$function$;

comment on function outbox._take_suspects(outbox.lane, integer, bigint, timestamptz) is
    'Some of the messages that may have killed their relay; one that did so five times, alone, is dead.';

create or replace function outbox._take(
    lane     outbox.lane,
    quota    integer,
    room     bigint,
    first    boolean,
    at       timestamptz,
    look_due boolean,
    safe_id  bigint
)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_lane       smallint := (_take.lane).lane;
    v_floor      bigint := (_take.lane).floor;
    v_part       outbox._part;
    v_keys       boolean;
    v_key        text;
    v_ids        bigint[];
    v_tids       tid[];
    v_behind     bigint[];
    v_quota      integer;
    v_chunk      integer;
    v_read       bigint;
    v_last       bigint;
    v_bytes      bigint;
    v_expired    boolean;
    v_first_left bigint;
    v_reach      bigint;
begin
    v_part.ids := '{}';
    v_part.tids := '{}';
    v_part.bytes := 0;
    v_part.reach := v_floor - 1;
    v_part.suspects := '{}';
    v_part.trial := 0;
    v_part.kills := 0;
    v_keys := exists (select from outbox.held_key as k where k.lane = v_lane);

    if _take.look_due then
        select array_agg(d.id order by d.due_at, d.id)
        into v_ids
        from (
            select m.id, m.due_at
            from outbox.message as m
            where m.lane = v_lane
              and m.due_at is not null
              and m.due_at <> 'infinity'
              and m.due_at <= _take.at
            order by m.due_at, m.id
            limit _take.quota
            for update skip locked
        ) as d;
        if v_ids is not null then
            v_keys := outbox._bury_expired(v_ids, _take.at) or v_keys;
            if v_keys then
                update outbox.message as m
                set due_at = 'infinity'
                from outbox.held_key as k
                where m.id = any (v_ids)
                  and k.lane = v_lane
                  and k.key = m.key
                  and (k.head_id is null or k.head_id < m.id);
            end if;
            v_part := outbox._admit(v_part, v_ids, false, _take.room, _take.first);
        end if;
    end if;

    -- Keys whose head is out of the way: what was held behind it leaves in order, before anything newer.
    if v_keys then
        for v_key in
            select k.key
            from outbox.held_key as k
            where k.lane = v_lane
              and k.head_id is null
            order by k.key
        loop
            exit when cardinality(v_part.ids) >= _take.quota or v_part.bytes >= _take.room;
            select array_agg(h.id order by h.id)
            into v_ids
            from (
                select m.id
                from outbox.message as m
                where m.lane = v_lane
                  and m.key = v_key
                  and m.due_at = 'infinity'
                order by m.id
                limit _take.quota - cardinality(v_part.ids)
            ) as h;
            if v_ids is null then
                delete from outbox.held_key as k
                where k.lane = v_lane
                  and k.key = v_key;
                continue;
            end if;
            -- One that is being cancelled stops those behind it, in case the cancel is rolled back.
            with locked as (
                select m.id
                from outbox.message as m
                where m.id = any (v_ids)
                for update skip locked
            )
            select array_agg(i.id order by i.id)
            into v_ids
            from unnest(v_ids) as i (id)
            where i.id < all (
                select x.id
                from unnest(v_ids) as x (id)
                where x.id not in (select locked.id from locked)
            );
            -- Burying one may have parked the key.
            continue when outbox._bury_expired(v_ids, _take.at);
            v_part := outbox._admit(v_part, v_ids, true, _take.room, _take.first);
        end loop;
    end if;

    v_quota := _take.quota - cardinality(v_part.ids);
    v_chunk := v_quota;
    v_reach := v_floor - 1;
    for i in 1..10 loop
        exit when v_quota = 0 or v_part.bytes >= _take.room;
        select
            array_agg(r.id) filter (where not r.behind),
            array_agg(r.ctid) filter (where not r.behind),
            array_agg(r.id) filter (where r.behind),
            count(*),
            max(r.id),
            sum(r.bytes) filter (where not r.behind),
            bool_or(r.expires_at <= _take.at) filter (where not r.behind)
        into v_ids, v_tids, v_behind, v_read, v_last, v_bytes, v_expired
        from (
            select
                m.id,
                m.ctid,
                octet_length(m.body) as bytes,
                m.expires_at,
                v_keys and m.key is not null and exists (
                    select
                    from outbox.held_key as k
                    where k.lane = m.lane
                      and k.key = m.key
                      and (k.head_id is null or k.head_id < m.id)
                ) as behind
            from outbox.message as m
            where m.lane = v_lane
              and m.due_at is null
              and m.id > v_reach
            order by m.id
            limit v_chunk
        ) as r;
        if v_expired then
            -- Burying may have parked a key: read again. What somebody has locked by hand stops us.
            exit when not outbox._bury_expired(v_ids, _take.at);
            v_keys := true;
            continue;
        end if;
        if v_behind is not null then
            -- Ready messages of a held key join the others behind its head: one update each, once.
            update outbox.message as m
            set due_at = 'infinity'
            where m.id = any (v_behind);
        end if;
        if cardinality(v_ids) > v_quota then
            v_last := v_ids[v_quota];
            v_read := v_chunk;
            v_ids := v_ids[:v_quota];
            v_tids := v_tids[:v_quota];
        end if;
        if v_bytes > _take.room - v_part.bytes then
            v_part := outbox._admit(v_part, v_ids, true, _take.room, _take.first);
            v_first_left := (select min(i.id) from unnest(v_ids) as i (id) where i.id <> all (v_part.ids));
        elsif v_ids is not null then
            v_part.ids := v_part.ids || v_ids;
            v_part.tids := v_part.tids || v_tids;
            v_part.bytes := v_part.bytes + v_bytes;
        end if;
        -- Everything ready up to here is in our hands or out of the way.
        v_reach := case
            when v_first_left is not null then v_first_left - 1
            when v_read < v_chunk then 9223372036854775807
            else v_last
        end;
        exit when v_ids is not null or v_read < v_chunk;
        -- All had to go behind, and there may be many more: faster. And from the start: what a claim hands out it has seen at
        -- one look, because between two a message may be committed that lies before what the first has read, and another of
        -- its key behind that.
        v_chunk := greatest(v_quota, 1000);
        v_reach := v_floor - 1;
    end loop;
    -- Only what is proven may raise the floor later.
    v_part.reach := greatest(v_part.reach, least(coalesce(_take.safe_id, 0), v_reach));
    return v_part;
end
$function$;

comment on function outbox._take(outbox.lane, integer, bigint, boolean, timestamptz, boolean, bigint) is
    'The next messages of a lane that the caller has locked: due ones, then those behind a freed key, then ready ones.';

create or replace function outbox._bury_expired(ids bigint[], at timestamptz)
    returns boolean
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_expired bigint[];
begin
    select array_agg(e.id)
    into v_expired
    from (
        select m.id
        from outbox.message as m
        where m.id = any (_bury_expired.ids)
          and m.expires_at <= _bury_expired.at
        for update skip locked
    ) as e;
    if v_expired is null then
        return false;
    end if;
    perform outbox._bury(v_expired, array_fill('expired'::text, array[cardinality(v_expired)]), null, 0);
    -- A claim returns only what is to be sent: in this way a relay learns which messages it put aside.
    raise notice using errcode = 'OB016', message = 'messages were put aside', detail = v_expired::text;
    return true;
end
$function$;

comment on function outbox._bury_expired(bigint[], timestamptz) is
    'Moves those messages to dead_letter whose life is over; true if there were any.';

create or replace function outbox._admit(part outbox._part, ids bigint[], held_too boolean, room bigint, first boolean)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part  outbox._part := _admit.part;
    v_ids   bigint[];
    v_tids  tid[];
    v_bytes bigint;
begin
    select array_agg(r.id order by r.n), array_agg(r.ctid order by r.n), sum(r.bytes)
    into v_ids, v_tids, v_bytes
    from (
        select
            i.id,
            i.n,
            m.ctid,
            octet_length(m.body) as bytes,
            v_part.bytes + sum(octet_length(m.body)) over w <= _admit.room
                or _admit.first and v_part.ids = '{}' and row_number() over w = 1 as fits
        from unnest(_admit.ids) with ordinality as i (id, n)
        join outbox.message as m
            on m.id = i.id
        where _admit.held_too
           or m.due_at <> 'infinity'
        window w as (order by i.n rows unbounded preceding)
    ) as r
    where r.fits;
    v_part.ids := v_part.ids || coalesce(v_ids, '{}');
    v_part.tids := v_part.tids || coalesce(v_tids, '{}');
    v_part.bytes := v_part.bytes + coalesce(v_bytes, 0);
    return v_part;
end
$function$;

comment on function outbox._admit(outbox._part, bigint[], boolean, bigint, boolean) is
    'Adds messages, held ones only if told so, to what a claim takes, as far as there is room.';

create or replace function outbox.arm_wakeup()
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_bell integer := 'outbox.message'::regclass::oid::integer;
begin
    if exists (select from outbox._bell_holders() as h where h.pid = pg_backend_pid()) then
        return true;
    end if;
    if pg_try_advisory_lock(v_bell, 1) then
        return true;
    end if;
    -- Refused: by a relay that sleeps already (the next emit rings for both), or by emits in flight.
    return exists (select from outbox._bell_holders());
end
$function$;

comment on function outbox.arm_wakeup() is
    'Before a relay sleeps. True: the next emit will NOTIFY outbox; claim once more, then sleep. False: an emit is in flight; poll again soon.';

create or replace function outbox.disarm_wakeup()
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if exists (select from outbox._bell_holders() as h where h.pid = pg_backend_pid()) then
        perform pg_advisory_unlock('outbox.message'::regclass::oid::integer, 1);
    end if;
end
$function$;

comment on function outbox.disarm_wakeup() is
    'After a relay has woken: emits need not NOTIFY any more.';

create or replace function outbox._bell_holders()
    returns table (pid integer)
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return query
    select l.pid
    from pg_locks as l
    where l.locktype = 'advisory'
      and l.database = (select d.oid from pg_database as d where d.datname = current_database())
      and l.classid = 'outbox.message'::regclass::oid
      and l.objid = 1
      and l.objsubid = 2
      and l.mode = 'ExclusiveLock'
      and l.granted;
end
$function$;

comment on function outbox._bell_holders() is
    'Sessions that sleep until the doorbell rings.';

create or replace function outbox.next_due()
    returns timestamptz
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
begin
    return (
        select min(case
            when ready.found or held.found then coalesce(l.leased_until, clock_timestamp())
            when due.due_at is not null then greatest(due.due_at, l.leased_until)
        end)
        from outbox._lanes() as l
        left join lateral (
            select true as found
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at is null
              and m.id >= l.floor
              and not m.id = any (l.handed)
            order by m.id
            limit 1
        ) as ready on true
        left join lateral (
            select m.due_at
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at is not null
              and m.due_at <> 'infinity'
              and not m.id = any (l.handed)
            order by m.due_at, m.id
            limit 1
        ) as due on true
        left join lateral (
            select true as found
            from outbox.held_key as k
            where k.lane = l.lane
              and k.head_id is null
            limit 1
        ) as held on true
        where not exists (select from outbox.setting as s where s.name = 'paused')
    );
end
$function$;

comment on function outbox.next_due() is
    'When to look again at the latest: the earliest message that waits for a time, or end of a lease that others wait behind; null if nothing waits.';
