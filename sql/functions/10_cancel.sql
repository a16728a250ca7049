-- CODE. Station 10: a message is taken back, as long as no relay has it.

create or replace function outbox._in_flight(lane smallint, id bigint)
    returns boolean
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select _in_flight.id = any (l.handed)
    from outbox.lane as l
    where l.lane = _in_flight.lane
    order by l.version desc
    limit 1;
$function$;

comment on function outbox._in_flight(smallint, bigint) is
    'Whether a message of a lane is in the hands of a relay.';

create or replace function outbox.cancel(id bigint)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_message record;
    v_own     boolean;
begin
    if cancel.id is null then
        perform outbox._refuse('OB001', 'id must not be null', 'Pass the id that emit() returned.');
    end if;

    -- Without a lock at first: whoever gets false as answer must not keep a relay waiting.
    select m.lane, m.due_at, m.key, m.dedup_key, m.emitted_by, m.xmin::text::bigint as xmin
    into v_message
    from outbox.message as m
    where m.id = cancel.id;
    if not found then
        return false;
    end if;
    if v_message.emitted_by <> session_user
       and not has_column_privilege(session_user, 'outbox.access', 'admin', 'references') then
        return false;
    end if;
    -- Visible and in progress: written by this very transaction, in whatever savepoint. Nobody else can have seen it.
    v_own := pg_xact_status(outbox._widen(v_message.xmin)) is not distinct from 'in progress';
    if v_message.due_at is null and not v_own then
        return false;
    end if;
    if not v_own then
        if current_setting('transaction_isolation') <> 'read committed' then
            perform outbox._refuse_isolation();
        end if;
        if outbox._in_flight(v_message.lane, cancel.id) then
            return false;
        end if;
        -- claim_batch() locks what it takes from behind a time or a failing key, so this lock decides between the two.
        perform
        from outbox.message as m
        where m.id = cancel.id
        for update;
        if not found or outbox._in_flight(v_message.lane, cancel.id) then
            return false;
        end if;
    end if;

    delete from outbox.message as m
    where m.id = cancel.id;
    delete from outbox.dedup as d
    where d.dedup_key = v_message.dedup_key
      and d.id = cancel.id;
    perform outbox._free_keys(array[v_message.lane], array[cancel.id]);
    return true;
end
$function$;

comment on function outbox.cancel(bigint) is
    'True: the message will not be sent. False: it is ready, in flight, sent, unknown, or another user''s.';
