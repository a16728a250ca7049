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
    v_sent_before  timestamptz;
    v_inbox_before timestamptz;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    -- One at a time: the sweep takes a lock that lasts until the transaction ends.
    perform outbox._sweep();
    v_dead_before := clock_timestamp() - outbox._value_of('dead_retention')::interval;
    v_dedup_before := clock_timestamp() - outbox._value_of('dedup_window')::interval;
    v_sent_before := outbox._kept_since();
    v_inbox_before := clock_timestamp() - outbox._value_of('inbox_retention')::interval;
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
    with gone as (
        delete from outbox.archive_default as a
        where (a.id, a.sent_at) in (
            select x.id, x.sent_at
            from outbox.archive_default as x
            where x.sent_at < v_sent_before
            order by x.sent_at
            limit 10000
        )
        returning a.id
    )
    select count(*)
    into v_result.archive_rows
    from gone;
    with gone as (
        delete from outbox.inbox as i
        where (i.consumer, i.message_id) in (
            select x.consumer, x.message_id
            from outbox.inbox as x
            where x.accepted_at <= v_inbox_before
            order by x.accepted_at
            limit 10000
        )
        returning i.message_id
    )
    select count(*)
    into v_result.inbox_rows
    from gone;
    perform outbox._fold_tally();
    v_result.more := exists (select from outbox.dead_letter as d where d.dead_at <= v_dead_before)
                     or exists (select from outbox.dedup as d where d.created_at <= v_dedup_before)
                     or exists (select from outbox.archive_default as a where a.sent_at < v_sent_before)
                     or exists (select from outbox.inbox as i where i.accepted_at <= v_inbox_before);
    -- Last, because dropping a day keeps mark_sent() out of the archive until this transaction ends.
    perform outbox._make_days();
    v_result.archive_days := outbox._drop_days(v_sent_before, 10);
    -- A day that somebody uses is tried again in the next round, not at once: each try keeps mark_sent() waiting.
    v_result.more := v_result.more or v_result.archive_days = 10 and exists (select from outbox._days() as d where d.ends_at <= v_sent_before);
    return v_result;
end
$function$;

comment on function outbox.cleanup() is
    'Removes what is past its retention, at most 10,000 rows of a kind and ten days of the archive, makes the days to come and checks the floors; says what it removed and whether more remains.';

create or replace function outbox._kept_since()
    returns timestamptz
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select case r.retention
        when 'forever' then '-infinity'
        when 'delete' then clock_timestamp()
        else clock_timestamp() - r.retention::interval
    end
    from (select outbox._value_of('retention') as retention) as r;
$function$;

comment on function outbox._kept_since() is
    'The archive keeps what was sent since then.';

create or replace function outbox._days()
    returns table (name name, begins_at timestamptz, ends_at timestamptz)
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select d.relname, d.day at time zone 'UTC', (d.day + interval '1 day') at time zone 'UTC'
    from (
        select c.relname, to_date(substring(c.relname from '^archive_([0-9]{8})$'), 'YYYYMMDD')::timestamp as day
        from pg_inherits as i
        join pg_class as c
            on c.oid = i.inhrelid
        where i.inhparent = 'outbox.archive'::regclass
          and c.relname ~ '^archive_[0-9]{8}$'
    ) as d;
$function$;

comment on function outbox._days() is
    'The days for which the archive has a partition.';

create or replace function outbox._make_days()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    -- What a role may have set for itself must not decide where the table goes.
    set default_tablespace = ''
    set default_table_access_method = 'heap'
    set timezone = 'UTC'
    set datestyle = 'ISO'
    -- While somebody reads the archive no day is made: a later call does it.
    set lock_timeout = '100ms'
as $function$
declare
    v_day   timestamptz;
    v_name  name;
    v_other regrole;
begin
    if outbox._value_of('retention') = 'delete' then
        return;
    end if;
    -- Two would make the same day: whoever comes second, by the lock of the sweep, leaves it to the first.
    lock table outbox.relay in share update exclusive mode nowait;
    for v_day in
        select d.day
        from generate_series(date_trunc('day', clock_timestamp()), clock_timestamp() + interval '3 days', interval '1 day') as d (day)
        -- A day that was detached is there too.
        where to_regclass('outbox.archive_' || to_char(d.day, 'YYYYMMDD')) is null
          -- What the default partition holds of a day keeps that day from being made.
          and not exists (select from outbox.archive_default as a where a.sent_at >= d.day and a.sent_at < d.day + interval '1 day')
    loop
        v_name := 'archive_' || to_char(v_day, 'YYYYMMDD');
        execute format(
            'create table outbox.%I partition of outbox.archive for values from (%L) to (%L)', v_name, v_day, v_day + interval '1 day'
        );
        -- Rows come nearly in the order of id and time, so ranges of pages find them; a B-tree would make keeping a message a
        -- quarter dearer. Several ranges a summary, because a message that was retried comes late.
        execute format(
            'create index %I on outbox.%I using brin (id int8_minmax_multi_ops, sent_at) with (autosummarize = on)', v_name || '_sent', v_name
        );
        -- Default privileges of the owner leak to others.
        for v_other in
            select distinct g.grantee::regrole
            from pg_class as c
            cross join lateral aclexplode(c.relacl) as g
            where c.oid = format('outbox.%I', v_name)::regclass
              and g.grantee <> c.relowner
              and g.grantee <> 0
        loop
            execute format('revoke all on outbox.%I from %s', v_name, v_other);
        end loop;
        execute format('revoke all on outbox.%I from public', v_name);
    end loop;
exception
    -- A row of the day came in meanwhile, or the archive is being read or written: the default partition serves.
    when lock_not_available or check_violation then
        return;
end
$function$;

comment on function outbox._make_days() is
    'Makes the archive''s partitions for today and the next three days, unless nothing is kept.';

create or replace function outbox._drop_days(before timestamptz, most integer)
    returns integer
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    -- Who reads the archive is not disturbed, and mark_sent() waits no longer than this behind us.
    set lock_timeout = '100ms'
as $function$
declare
    v_day     name;
    v_dropped integer := 0;
begin
    for v_day in
        select d.name
        from outbox._days() as d
        where d.ends_at <= _drop_days.before
        order by d.begins_at
        limit _drop_days.most
    loop
        begin
            execute format('drop table outbox.%I', v_day);
        exception
            when lock_not_available then
                exit;
        end;
        v_dropped := v_dropped + 1;
    end loop;
    return v_dropped;
end
$function$;

comment on function outbox._drop_days(timestamptz, integer) is
    'Drops the archive''s partitions that ended before a time, at most so many, oldest first; stops when somebody uses one.';

create or replace function outbox._fold_tally()
    returns void
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    with gone as (
        delete from outbox.tally as t
        where (t.settled_at, t.first_id) in (
            select x.settled_at, x.first_id
            from outbox.tally as x
            where x.settled_at < date_trunc('minute', clock_timestamp())
            order by x.settled_at
            limit 10000
        )
        returning t.*
    )
    insert into outbox.tally_minute as m (minute_at, until_at, sent, took, worst)
    select date_trunc('minute', g.settled_at), max(g.settled_at), sum(g.sent), sum(g.took), max(g.worst)
    from gone as g
    group by 1
    on conflict on constraint tally_minute_pkey do update
        set until_at = greatest(m.until_at, excluded.until_at),
            sent = m.sent + excluded.sent,
            took = m.took + excluded.took,
            worst = greatest(m.worst, excluded.worst);
    delete from outbox.tally_minute as m
    where m.minute_at < clock_timestamp() - interval '1 hour';
$function$;

comment on function outbox._fold_tally() is
    'Folds what mark_sent() noted before this minute into minutes, and forgets those older than an hour.';

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
    -- One sweep at a time: two would refill a lane twice. No advisory lock, which anybody who may connect could hold.
    lock table outbox.relay in share update exclusive mode;
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
            floors = null,
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
            floor_repairs = h.floor_repairs + 1,
            floors = null;
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
