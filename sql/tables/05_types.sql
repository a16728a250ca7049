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
comment on column outbox._part.tids     is 'where the rows of the first ones are; those after them are all that is ready from the first to the last, and nothing can appear among them';
comment on column outbox._part.bytes    is 'bytes of their bodies';
comment on column outbox._part.reach    is 'every ready message up to this id is among them, or gone';
comment on column outbox._part.suspects is 'the lane''s suspects afterwards';
comment on column outbox._part.trial    is 'how many of those go out together';
comment on column outbox._part.kills    is 'relays that died with the only suspect in their hands';

create type outbox.cleanup_result as (
    dead_letters integer,
    dedup_keys   integer,
    archive_days integer,
    archive_rows integer,
    inbox_rows   integer,
    more         boolean
);

comment on type outbox.cleanup_result is
    'What cleanup() removed.';
comment on column outbox.cleanup_result.dead_letters is 'dead letters past dead_retention';
comment on column outbox.cleanup_result.dedup_keys   is 'deduplication keys past dedup_window';
comment on column outbox.cleanup_result.archive_days is 'days of the archive past retention, each dropped whole';
comment on column outbox.cleanup_result.archive_rows is 'messages past retention that the archive held outside its days';
comment on column outbox.cleanup_result.inbox_rows   is 'accepted messages past inbox_retention';
comment on column outbox.cleanup_result.more         is 'whether another call would remove more';

create type outbox.stats_result as (
    waiting            bigint,
    scheduled          bigint,
    in_flight          bigint,
    retrying           bigint,
    parked             bigint,
    dead               bigint,
    oldest_age         interval,
    relays             integer,
    exact              boolean,
    sent_last_hour     bigint,
    mean_time_to_send  interval,
    worst_time_to_send interval,
    top_failing        jsonb,
    oldest_emitter_pid integer,
    oldest_emitter_at  timestamptz,
    paused             boolean
);

comment on type outbox.stats_result is
    'The state of the outbox in one row, as stats() returns it.';
comment on column outbox.stats_result.waiting            is 'messages that could leave now, and those that wait for an earlier one of their key';
comment on column outbox.stats_result.scheduled          is 'messages whose time has not come';
comment on column outbox.stats_result.in_flight          is 'messages in the hands of a relay';
comment on column outbox.stats_result.retrying           is 'messages the broker refused, which will be tried again';
comment on column outbox.stats_result.parked             is 'messages that wait until a dead letter of their key is requeued or purged';
comment on column outbox.stats_result.dead               is 'dead letters';
comment on column outbox.stats_result.oldest_age         is 'how long the oldest message that could leave has waited; 0 when there is none';
comment on column outbox.stats_result.relays             is 'relays whose session is alive; those behind a pooler are not seen';
comment on column outbox.stats_result.exact              is 'false: a count beyond 10,000 is an estimate';
comment on column outbox.stats_result.sent_last_hour     is 'messages sent in the last hour';
comment on column outbox.stats_result.mean_time_to_send  is 'mean time from emit, or the time a message was due, until sent, in the last hour; null when nothing was sent';
comment on column outbox.stats_result.worst_time_to_send is 'the longest such time; null when nothing was sent';
comment on column outbox.stats_result.top_failing        is 'the ten routing keys with most retrying and dead messages: objects with routing_key, retrying, dead; of dead letters the last 10,000 are counted';
comment on column outbox.stats_result.oldest_emitter_pid is 'backend whose transaction has written messages and is open the longest; null: none, or a prepared one';
comment on column outbox.stats_result.oldest_emitter_at  is 'since when it is open, at the least; null: there is none, or it is not known yet';
comment on column outbox.stats_result.paused             is 'whether pause() was called: nothing is handed out until resume()';
