-- CODE. Station 20: a relay says hello, and sleeps until there is something to claim.

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
