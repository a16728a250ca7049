-- STATE. What consumers have accepted, so that a message that comes again has no second effect.

create table outbox.inbox (
    consumer    text        not null,
    message_id  uuid        not null,
    accepted_at timestamptz not null default clock_timestamp(),
    constraint inbox_pkey primary key (consumer, message_id)
);

create index inbox_accepted_at on outbox.inbox (accepted_at);

comment on table outbox.inbox is
    'Messages accepted within inbox_retention, by each consumer.';
comment on column outbox.inbox.consumer    is 'who accepted it, as given to accept(): for a worker the name of its queue';
comment on column outbox.inbox.message_id  is 'identity of the message on the wire';
comment on column outbox.inbox.accepted_at is 'when it was accepted; inbox_retention counts from here';
comment on index outbox.inbox_accepted_at is 'cleanup(): oldest first';
