-- CODE. Station 80: the consumer's side. What accept() records commits together with the effects of the message.

create or replace function outbox.accept(consumer text, message_id uuid)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if accept.consumer is null or accept.message_id is null then
        perform outbox._refuse('OB001', 'consumer and message_id must not be null', 'Pass a name for what consumes, and the message_id of the message.');
    end if;
    if octet_length(accept.consumer) not between 1 and 255 then
        perform outbox._refuse('OB002', 'consumer must have 1 to 255 bytes', 'Pass the name of the queue, for instance.');
    end if;
    -- The message is acknowledged after this commit, and gone then: so the effects must be on disk. A set clause of the
    -- function would have ended before the commit.
    if current_setting('synchronous_commit') in ('off', 'local', 'remote_write') then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    -- Waits for another transaction that is accepting the same message, and then knows what came of it.
    insert into outbox.inbox (consumer, message_id)
    values (accept.consumer, accept.message_id)
    on conflict on constraint inbox_pkey do nothing;
    return found;
end
$function$;

comment on function outbox.accept(text, uuid) is
    'True the first time a consumer accepts a message, false ever after (for inbox_retention); undone if the transaction rolls back.';
