-- CODE. Station 60: what an operator asks.

create or replace function outbox._parked(lane smallint, key text)
    returns boolean
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select exists (
        select
        from outbox.held_key as k
        join outbox.dead_letter as d
            on d.id = k.head_id
        where k.lane = _parked.lane
          and k.key = _parked.key
          and d.parked
    );
$function$;

comment on function outbox._parked(smallint, text) is
    'Whether a key waits until a dead letter is requeued or purged.';

create or replace function outbox._first(kind text, most integer)
    returns table (id bigint, lane smallint, key text, due_at timestamptz, attempts integer, error text, routing_key text)
    language sql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $function$
    select m.*
    from outbox._lanes() as l
    cross join lateral (
        (
            select x.id, x.lane, x.key, x.due_at, x.attempts, x.error, x.routing_key
            from outbox.message as x
            where _first.kind = 'ready'
              and x.lane = l.lane
              and x.due_at is null
              and x.id >= l.floor
            order by x.id
            limit _first.most
        )
        union all
        (
            select x.id, x.lane, x.key, x.due_at, x.attempts, x.error, x.routing_key
            from outbox.message as x
            where _first.kind = 'due'
              and x.lane = l.lane
              and x.due_at is not null
              and x.due_at <> 'infinity'
            order by x.due_at, x.id
            limit _first.most
        )
        union all
        (
            select x.id, x.lane, x.key, x.due_at, x.attempts, x.error, x.routing_key
            from outbox.message as x
            where _first.kind = 'held'
              and x.lane = l.lane
              and x.due_at = 'infinity'
            order by x.key, x.id
            limit _first.most
        )
    ) as m
    limit _first.most;
$function$;

comment on function outbox._first(text, integer) is
    'Some messages that are ready, due at a time, or held: each by its index, and no further than asked for.';

create or replace function outbox.stats()
    returns outbox.stats_result
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
as $function$
declare
    v_now    timestamptz := clock_timestamp();
    v_most   constant integer := 10000;
    v_stats  outbox.stats_result;
    v_parked boolean := exists (select from outbox.dead_letter as d where d.parked);
    -- Whether each kind can be counted.
    v_ready  boolean := v_most >= (select count(*) from outbox._first('ready', v_most + 1));
    v_due    boolean := v_most >= (select count(*) from outbox._first('due', v_most + 1));
    v_held   boolean := v_most >= (select count(*) from outbox._first('held', v_most + 1));
    -- What cannot is estimated from about 500 pages, wherever vacuum and analyze stand.
    v_share  double precision := least(
        100, 50000.0 * current_setting('block_size')::integer / (pg_relation_size('outbox.message') + 1)
    );
begin
    with flying as materialized (
        select h.id
        from outbox._lanes() as l
        cross join lateral unnest(l.handed) as h (id)
        where l.leased_until > v_now
    ),
    seen as (
        select m.*, 1.0::double precision as weight
        from outbox._first('ready', v_most) as m
        where v_ready
        union all
        select m.*, 1.0
        from outbox._first('due', v_most) as m
        where v_due
        union all
        select m.*, 1.0
        from outbox._first('held', v_most) as m
        where v_held
        union all
        select m.id, m.lane, m.key, m.due_at, m.attempts, m.error, m.routing_key, 100 / v_share
        from outbox.message as m tablesample system (v_share)
        where not (v_ready and v_due and v_held)
          and case
              when m.due_at is null then not v_ready
              when m.due_at = 'infinity' then not v_held
              else not v_due
          end
    ),
    -- The words of message_status.
    told as (
        select
            s.routing_key,
            s.weight,
            case
                when v_parked and outbox._parked(s.lane, s.key) then 'parked'
                when s.attempts > 0 then 'retrying'
                when s.due_at > v_now and s.due_at <> 'infinity' then case when s.error is null then 'scheduled' else 'retrying' end
                else 'waiting'
            end as status
        from seen as s
        where s.id not in (select f.id from flying as f)
    ),
    failing as (
        select
            f.routing_key,
            sum(f.weight) as total,
            coalesce(sum(f.weight) filter (where f.status = 'retrying'), 0) as retrying,
            coalesce(sum(f.weight) filter (where f.status = 'dead'), 0) as dead
        from (
            select t.routing_key, t.status, t.weight
            from told as t
            where t.status = 'retrying'
            union all
            (
                select d.routing_key, 'dead', 1.0
                from outbox.dead_letter as d
                order by d.dead_at desc
                limit v_most
            )
        ) as f
        group by f.routing_key
        order by sum(f.weight) desc, f.routing_key
        limit 10
    )
    select
        coalesce(sum(t.weight) filter (where t.status = 'waiting'), 0)::bigint,
        coalesce(sum(t.weight) filter (where t.status = 'scheduled'), 0)::bigint,
        coalesce(sum(t.weight) filter (where t.status = 'retrying'), 0)::bigint,
        coalesce(sum(t.weight) filter (where t.status = 'parked'), 0)::bigint,
        (select count(*) from flying),
        (
            select coalesce(
                jsonb_agg(
                    jsonb_build_object('routing_key', f.routing_key, 'retrying', f.retrying::bigint, 'dead', f.dead::bigint)
                    order by f.total desc, f.routing_key
                ),
                '[]'
            )
            from failing as f
        )
    into v_stats.waiting, v_stats.scheduled, v_stats.retrying, v_stats.parked, v_stats.in_flight, v_stats.top_failing
    from told as t;

    select count(*)
    into v_stats.dead
    from (select from outbox.dead_letter as d limit v_most + 1) as x;
    v_stats.exact := v_ready and v_due and v_held and v_stats.dead <= v_most;
    if v_stats.dead > v_most then
        v_stats.dead := greatest(v_stats.dead, (select c.reltuples::bigint from pg_class as c where c.oid = 'outbox.dead_letter'::regclass));
    end if;

    select coalesce(v_now - min(h.since_at), interval '0')
    into v_stats.oldest_age
    from outbox._lanes() as l
    cross join lateral (
        (
            select m.created_at as since_at
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at is null
              and m.id >= l.floor
              and not (v_parked and outbox._parked(m.lane, m.key))
            order by m.id
            limit 1
        )
        union all
        (
            select m.due_at
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at <= v_now
              and m.due_at <> 'infinity'
            order by m.due_at, m.id
            limit 1
        )
    ) as h;

    select count(distinct r.relay)
    into v_stats.relays
    from outbox.relay as r
    join pg_locks as l
        on l.classid::bigint = (r.relay >> 32) & 4294967295
        and l.objid::bigint = r.relay & 4294967295
    where l.locktype = 'advisory';

    select coalesce(sum(t.sent), 0)::bigint, sum(t.took) / sum(t.sent)::double precision, max(t.worst)
    into v_stats.sent_last_hour, v_stats.mean_time_to_send, v_stats.worst_time_to_send
    from (
        select m.sent, m.took, m.worst
        from outbox.tally_minute as m
        where m.minute_at > v_now - interval '1 hour'
        union all
        select x.sent, x.took, x.worst
        from outbox.tally as x
        where x.settled_at > v_now - interval '1 hour'
          -- Rows that were folded are not walked, even if vacuum cannot remove them.
          and x.settled_at > coalesce((select max(m.until_at) from outbox.tally_minute as m), '-infinity')
    ) as t;

    -- Who may not see when another's transaction began learns from the horizon since when it was in the way.
    select
        r.pid,
        coalesce(a.xact_start, p.prepared, case when outbox._widen(x.transactionid::text::bigint) = any (h.noted_xids) then h.noted_at end)
    into v_stats.oldest_emitter_pid, v_stats.oldest_emitter_at
    from pg_locks as r
    join pg_locks as x
        on x.virtualtransaction = r.virtualtransaction
    cross join (select z.noted_xids, z.noted_at from outbox.horizon as z order by z.version desc limit 1) as h
    left join pg_stat_activity as a
        on a.pid = r.pid
    left join pg_prepared_xacts as p
        on p.transaction = x.transactionid
    where r.database = (select d.oid from pg_database as d where d.datname = current_database())
      and r.relation = 'outbox.message'::regclass
      and r.mode = 'RowExclusiveLock'
      and r.pid is distinct from pg_backend_pid()
      and x.locktype = 'transactionid'
      and x.mode = 'ExclusiveLock'
    order by 2
    limit 1;

    v_stats.paused := exists (select from outbox.setting as s where s.name = 'paused');
    return v_stats;
end
$function$;

comment on function outbox.stats() is
    'The state of the outbox in one row. Its cost does not depend on how much waits: counts are exact to 10,000 and estimates beyond.';

create or replace view outbox.message_status as
select
    m.id,
    m.message_id,
    case
        when f.id is not null then 'in_flight'
        when d.id is not null then 'parked'
        when m.attempts > 0 then 'retrying'
        when m.due_at > clock_timestamp() and m.due_at <> 'infinity' then case when m.error is null then 'scheduled' else 'retrying' end
        else 'waiting'
    end as status,
    m.exchange,
    m.routing_key,
    m.key,
    m.created_at,
    nullif(m.due_at, 'infinity') as due_at,
    null::timestamptz as settled_at,
    m.attempts,
    null::text as reason,
    m.error,
    m.emitted_by
from outbox.message as m
left join (
    select h.id
    from outbox.lane as l
    cross join lateral unnest(l.handed) as h (id)
    where l.leased_until > clock_timestamp()
) as f
    on f.id = m.id
left join outbox.held_key as k
    on k.lane = m.lane
    and k.key = m.key
left join outbox.dead_letter as d
    on d.id = k.head_id
    and d.parked
union all
select d.id, d.message_id, 'dead', d.exchange, d.routing_key, d.key, d.created_at, null, d.dead_at, d.attempts, d.reason, d.error, d.emitted_by
from outbox.dead_letter as d
union all
select a.id, a.message_id, 'sent', a.exchange, a.routing_key, a.key, a.created_at, null, a.sent_at, a.attempts, null, null, a.emitted_by
from outbox.archive as a;

comment on view outbox.message_status is
    'Every message that is known, and how it stands; no payload. What was sent is known while the setting retention keeps it.';
comment on column outbox.message_status.id          is 'the id that emit() returned';
comment on column outbox.message_status.message_id  is 'identity on the wire and outside the database';
comment on column outbox.message_status.status      is 'waiting, scheduled, in_flight, retrying, parked, dead or sent';
comment on column outbox.message_status.exchange    is 'exchange; null means the setting default_exchange';
comment on column outbox.message_status.routing_key is 'AMQP routing key';
comment on column outbox.message_status.key         is 'ordering key';
comment on column outbox.message_status.created_at  is 'when it was emitted';
comment on column outbox.message_status.due_at      is 'not before this time; null: no such time';
comment on column outbox.message_status.settled_at  is 'when it was sent or died; null: neither';
comment on column outbox.message_status.attempts    is 'how often the broker has refused it';
comment on column outbox.message_status.reason      is 'why it is dead';
comment on column outbox.message_status.error       is 'what the last refusal said';
comment on column outbox.message_status.emitted_by  is 'session_user that emitted it';
