-- STATE. Composite types that cross to drivers; read them by name, attributes may be added.

create type outbox.claimed_message as (
    id           bigint,
    message_id   uuid,
    exchange     text,
    routing_key  text,
    key          text,
    body         bytea,
    content_type text,
    headers      jsonb,
    properties   jsonb,
    expires_in   interval,
    attempts     integer,
    created_at   timestamptz
);

comment on type outbox.claimed_message is
    'One message as claim_batch() hands it to a relay.';
comment on column outbox.claimed_message.id           is 'local handle; pass it to mark_sent() or mark_failed()';
comment on column outbox.claimed_message.message_id   is 'identity on the wire and outside the database';
comment on column outbox.claimed_message.exchange     is 'exchange to publish to; never null';
comment on column outbox.claimed_message.routing_key  is 'routing key to publish with';
comment on column outbox.claimed_message.key          is 'ordering key; messages of one key leave in order';
comment on column outbox.claimed_message.body         is 'bytes to publish, unchanged';
comment on column outbox.claimed_message.content_type is 'MIME type of the body';
comment on column outbox.claimed_message.headers      is 'AMQP headers; null means none';
comment on column outbox.claimed_message.properties   is 'AMQP properties: priority, type, correlation_id, reply_to, app_id; null means none';
comment on column outbox.claimed_message.expires_in   is 'what is left of the message''s life at claim; null means it never expires';
comment on column outbox.claimed_message.attempts     is 'how often the broker has refused it before';
comment on column outbox.claimed_message.created_at   is 'when it was emitted';

create type outbox._part as (
    ids      bigint[],
    tids     tid[],
    bytes    bigint,
    reach    bigint,
    suspects bigint[],
    trial    integer,
    kills    smallint
);

comment on type outbox._part is
    'What a claim takes from one lane; internal.';
comment on column outbox._part.ids      is 'messages to hand out, in order';
comment on column outbox._part.tids     is 'where their rows are';
comment on column outbox._part.bytes    is 'bytes of their bodies';
comment on column outbox._part.reach    is 'every ready message up to this id is among them, or gone';
comment on column outbox._part.suspects is 'the lane''s suspects afterwards';
comment on column outbox._part.trial    is 'how many of those go out together';
comment on column outbox._part.kills    is 'relays that died with the only suspect in their hands';

create type outbox.cleanup_result as (
    dead_letters integer,
    dedup_keys   integer,
    more         boolean
);

comment on type outbox.cleanup_result is
    'What cleanup() removed.';
comment on column outbox.cleanup_result.dead_letters is 'dead letters past dead_retention';
comment on column outbox.cleanup_result.dedup_keys   is 'deduplication keys past dedup_window';
comment on column outbox.cleanup_result.more         is 'whether another call would remove more';
