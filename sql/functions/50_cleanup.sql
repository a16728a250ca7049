-- CODE. Station 50: what has served its time goes, in bounded steps; and the sweep, which mistrusts the floors.

create or replace function outbox.cleanup()
    returns outbox.cleanup_result
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_result       outbox.cleanup_result;
    v_dead_before  timestamptz;
    v_dedup_before timestamptz;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    perform outbox._sweep();
    v_dead_before := clock_timestamp() - outbox._value_of('dead_retention')::interval;
    v_dedup_before := clock_timestamp() - outbox._value_of('dedup_window')::interval;
    v_result.dead_letters := outbox._purge_dead(v_dead_before, 10000);
    with gone as (
        delete from outbox.dedup as d
        where d.dedup_key in (
            select x.dedup_key
            from outbox.dedup as x
            where x.created_at <= v_dedup_before
            order by x.created_at
            limit 10000
            for update skip locked
        )
        returning d.dedup_key
    )
    select count(*)
    into v_result.dedup_keys
    from gone;
    v_result.more := exists (select from outbox.dead_letter as d where d.dead_at <= v_dead_before)
                     or exists (select from outbox.dedup as d where d.created_at <= v_dedup_before);
    return v_result;
end
$function$;

comment on function outbox.cleanup() is
    'Removes what is past its retention, at most 10,000 rows of a kind, and checks the floors; says what it removed and whether more remains.';

create or replace function outbox._sweep()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_horizon outbox.horizon;
    v_last    bigint := coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
    v_low     record;
begin
    -- One sweep at a time: two would refill a lane twice.
    perform pg_advisory_xact_lock('outbox.message'::regclass::oid::integer, 2);
    insert into outbox.lane (lane, version)
    select n, 0
    from generate_series(0, 63) as n
    where not exists (select from outbox.lane as l where l.lane = n::smallint);
    insert into outbox.horizon (version)
    select 0
    where not exists (select from outbox.horizon);

    select h.*
    into v_horizon
    from outbox.horizon as h
    order by h.version desc
    limit 1
    for update;
    if v_last < v_horizon.safe_id then
        -- The sequence was set back (restore, truncate, setval): every proof about ids is void.
        update outbox.horizon as h
        set version = h.version + 1,
            safe_id = 0,
            pending_id = null,
            pending_xid = null,
            noted_id = null,
            noted_xids = null
        where h.version = v_horizon.version;
        update outbox.lane as l
        set version = l.version + 1,
            floor = 0,
            reach = 0;
    elsif v_horizon.pending_xid > pg_current_xact_id()
          or exists (select from unnest(v_horizon.noted_xids) as x (xid) where x.xid > pg_current_xact_id())
    then
        -- Another cluster's transaction ids: they would never be reached, or mean somebody else.
        update outbox.horizon as h
        set version = h.version + 1,
            pending_id = null,
            pending_xid = null,
            noted_id = null,
            noted_xids = null
        where h.version = v_horizon.version;
    end if;

    for v_low in
        select l.lane, low.id
        from outbox._lanes() as l
        cross join lateral (
            select m.id
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at is null
              and m.id < l.floor
            order by m.id
            limit 1
        ) as low
    loop
        update outbox.lane as l
        set version = l.version + 1,
            floor = least(l.floor, v_low.id),
            reach = least(l.reach, v_low.id - 1)
        where l.lane = v_low.lane;
        update outbox.horizon as h
        set version = h.version + 1,
            floor_repairs = h.floor_repairs + 1;
    end loop;

    -- What waits for a message that is nowhere any more, or whose key is not known as held, would wait for ever.
    update outbox.held_key as k
    set head_id = null
    where not exists (select from outbox.message as m where m.id = k.head_id)
      and not exists (select from outbox.dead_letter as d where d.id = k.head_id and d.parked)
      and k.head_id is not null;
    insert into outbox.held_key (lane, key)
    select distinct m.lane, m.key
    from outbox.message as m
    where m.due_at = 'infinity'
    on conflict on constraint held_key_pkey do nothing;
end
$function$;

comment on function outbox._sweep() is
    'Refills lanes, forgets proofs that cannot hold, lowers a floor that hides a ready message: a hole is a minute''s delay, not a loss.';
