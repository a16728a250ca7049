-- STATE. Messages that gave up, whole, with the reason.

create table outbox.dead_letter (
    id           bigint      not null,
    dead_at      timestamptz not null,
    reason       text        not null,
    error        text,
    lane         smallint    not null,
    message_id   uuid        not null,
    exchange     text,
    routing_key  text        not null,
    key          text,
    content_type text        not null,
    headers      jsonb,
    properties   jsonb,
    created_at   timestamptz not null,
    expires_at   timestamptz,
    attempts     integer     not null,
    emitted_by   text        not null,
    dedup_key    text,
    parked       boolean     not null,
    body         bytea       not null,
    constraint dead_letter_pkey primary key (id),
    constraint dead_letter_reason check (reason in ('max_attempts', 'unroutable', 'rejected', 'expired', 'killed_relay'))
);

create index dead_letter_dead_at on outbox.dead_letter (dead_at);
create index dead_letter_parked on outbox.dead_letter (lane, key, id) where parked;

comment on table outbox.dead_letter is
    'Messages that will not be sent unless requeue_dead() is called; purge_dead() and cleanup() remove them.';
comment on column outbox.dead_letter.id           is 'the id it had in outbox.message';
comment on column outbox.dead_letter.dead_at      is 'when it gave up';
comment on column outbox.dead_letter.reason       is 'max_attempts, unroutable, rejected, expired or killed_relay';
comment on column outbox.dead_letter.error        is 'what the last refusal said';
comment on column outbox.dead_letter.lane         is 'lane it belonged to';
comment on column outbox.dead_letter.message_id   is 'identity on the wire and outside the database';
comment on column outbox.dead_letter.exchange     is 'exchange; null means the setting default_exchange';
comment on column outbox.dead_letter.routing_key  is 'AMQP routing key';
comment on column outbox.dead_letter.key          is 'ordering key';
comment on column outbox.dead_letter.content_type is 'MIME type of the body';
comment on column outbox.dead_letter.headers      is 'AMQP headers; null means none';
comment on column outbox.dead_letter.properties   is 'AMQP properties; null means none';
comment on column outbox.dead_letter.created_at   is 'when it was emitted';
comment on column outbox.dead_letter.expires_at   is 'its end of life; null means never';
comment on column outbox.dead_letter.attempts     is 'how often the broker refused it';
comment on column outbox.dead_letter.emitted_by   is 'session_user that emitted it';
comment on column outbox.dead_letter.dedup_key    is 'deduplication key it was emitted with; null means none';
comment on column outbox.dead_letter.parked       is 'whether its key waits until it is requeued or purged';
comment on column outbox.dead_letter.body         is 'bytes to publish, unchanged';
comment on index outbox.dead_letter_dead_at is 'purge_dead(), cleanup(): oldest first';
comment on index outbox.dead_letter_parked  is 'what a key waits for next';
