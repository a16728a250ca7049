-- CODE. Station 40: the floor, how far down a claim need not look, and what proves it.

create or replace function outbox._advance_horizon()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_last    bigint;
    v_fresh   boolean;
    v_horizon outbox.horizon;
    v_before  bigint;
    v_xmin    xid8;
begin
    if exists (
        select
        from (select h.checked_at, h.safe_id, h.pending_id from outbox.horizon as h order by h.version desc limit 1) as h
        -- When the last look found nothing to prove, only the floors are to be noted, and claims can wait for those.
        where h.checked_at > v_now - case when h.pending_id > h.safe_id then interval '20 ms' else interval '100 ms' end
    ) then
        return;
    end if;

    -- The sequence first, the xid after it: whoever drew an id up to v_last drew its xid before that, so it is older
    -- than ours. Locking the row draws ours; a transaction that has one already can prove nothing new.
    v_fresh := pg_current_xact_id_if_assigned() is null;
    v_last := coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
    select h.*
    into v_horizon
    from outbox.horizon as h
    order by h.version desc
    limit 1
    for update skip locked;
    if not found then
        return;
    end if;

    v_before := v_horizon.safe_id;
    v_xmin := pg_snapshot_xmin(pg_current_snapshot());
    if v_horizon.pending_xid <= v_xmin then
        v_horizon.safe_id := greatest(v_horizon.safe_id, v_horizon.pending_id);
        v_horizon.pending_id := null;
        v_horizon.pending_xid := null;
    end if;
    if v_horizon.noted_xids is not null and not outbox._any_in_progress(v_horizon.noted_xids) then
        v_horizon.safe_id := greatest(v_horizon.safe_id, v_horizon.noted_id);
        v_horizon.noted_id := null;
        v_horizon.noted_xids := null;
    end if;
    if v_horizon.safe_id > v_before then
        v_horizon.moved_at := v_now;
    end if;

    if v_horizon.pending_id is null and v_fresh then
        v_horizon.pending_id := v_last;
        v_horizon.pending_xid := pg_current_xact_id();
    end if;
    -- The xid proof waits for every transaction of the database server. When it stands still, ask only about those
    -- that can have drawn an id: they hold a lock on the table until they end.
    if v_horizon.noted_xids is null
       and v_horizon.safe_id < v_last
       and v_horizon.moved_at < v_now - interval '500 ms'
       and v_horizon.noted_at < v_now - interval '500 ms'
    then
        v_horizon.noted_id := v_last;
        v_horizon.noted_xids := outbox._emitter_xids();
        v_horizon.noted_at := v_now;
    end if;

    update outbox.horizon as h
    set version = h.version + 1,
        safe_id = v_horizon.safe_id,
        moved_at = v_horizon.moved_at,
        checked_at = v_now,
        pending_id = v_horizon.pending_id,
        pending_xid = v_horizon.pending_xid,
        noted_id = v_horizon.noted_id,
        noted_xids = v_horizon.noted_xids,
        noted_at = v_horizon.noted_at,
        -- For claims, which then need not read lanes without messages. A sweep lowers floors only under the lock we have.
        floors = (select array_agg(l.floor order by l.lane) from outbox._lanes() as l having count(*) = 64)
    where h.version = v_horizon.version;
end
$function$;

comment on function outbox._advance_horizon() is
    'Moves on the id up to which every transaction that drew one has ended. Called first by whatever settles.';

create or replace function outbox._any_in_progress(xids xid8[])
    returns boolean
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select exists (
        select
        from unnest(_any_in_progress.xids) as x (xid)
        where case when x.xid < pg_snapshot_xmax(pg_current_snapshot()) then pg_xact_status(x.xid) = 'in progress' else true end
    );
$function$;

comment on function outbox._any_in_progress(xid8[]) is
    'Whether one of these transactions is still open, prepared ones included.';

create or replace function outbox._emitter_xids()
    returns xid8[]
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_xids xid8[] := '{}';
begin
    -- Twice, because PREPARE TRANSACTION moves a transaction's locks one after the other to another owner (with the same
    -- virtual id): one look may miss one of them in the middle, two cannot.
    for i in 1..2 loop
        v_xids := v_xids || array(
            select outbox._widen(x.transactionid::text::bigint)
            from pg_locks as r
            join pg_locks as x
                on x.virtualtransaction = r.virtualtransaction
            where r.locktype = 'relation'
              and r.database = (select d.oid from pg_database as d where d.datname = current_database())
              and r.relation = 'outbox.message'::regclass
              and r.mode = 'RowExclusiveLock'
              and x.locktype = 'transactionid'
              and x.mode = 'ExclusiveLock'
              and x.granted
              and x.transactionid <> coalesce(pg_current_xact_id_if_assigned()::xid, '0')
        );
    end loop;
    return v_xids;
end
$function$;

comment on function outbox._emitter_xids() is
    'Open transactions, prepared ones included, that may have drawn a message id.';
