-- CODE. Station 20: the next messages of one lane, for a claim that holds its lock.

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
            -- What is proven needs no places: whoever reads from the first to the last finds the same.
            if v_ids[cardinality(v_ids)] > coalesce(_take.safe_id, 0) then
                v_part.tids := v_part.tids || v_tids;
            end if;
            v_part.ids := v_part.ids || v_ids;
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
    select array_agg(r.id order by r.n), array_agg(r.ctid), sum(r.bytes)
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
