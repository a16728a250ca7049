-- STATE. What waits to be sent. A message is inserted once and deleted once; nothing on the way to the broker updates it.

create sequence outbox.message_id_seq as bigint increment by 1 cache 1 no cycle;

comment on sequence outbox.message_id_seq is
    'Draws message.id. Only the column''s default calls nextval(): see the comment there.';

create table outbox.message (
    -- The xid is drawn before the id, so that an id below a proven bound cannot belong to a transaction younger than
    -- the proof. nextval() alone assigns an xid only now and then.
    id           bigint      not null default (
        case when pg_current_xact_id() is not null then nextval('outbox.message_id_seq') end
    ),
    lane         smallint    not null,
    due_at       timestamptz,
    message_id   uuid        not null,
    exchange     text,
    routing_key  text        not null,
    key          text,
    content_type text        not null,
    headers      jsonb,
    properties   jsonb,
    created_at   timestamptz not null,
    expires_at   timestamptz,
    attempts     integer     not null default 0,
    -- Not of type name, which fills 64 bytes in each row.
    emitted_by   text        not null,
    dedup_key    text,
    error        text,
    body         bytea       not null,
    -- No check constraints: the server reads them anew for each insert (5 % of emit), and emit() has checked already.
    constraint message_pkey primary key (id)
);

alter sequence outbox.message_id_seq owned by outbox.message.id;

-- Ready messages in the order they leave.
create index message_ready on outbox.message (lane, id) where due_at is null;
-- Messages that wait for a time: delayed, backing off, requeued.
create index message_due on outbox.message (lane, due_at, id) where due_at is not null and due_at <> 'infinity';
-- Messages held behind a failing one of their key.
create index message_held on outbox.message (lane, key, id) where due_at = 'infinity';

-- Rows live for moments: vacuum by count, not by share of the table, and never truncate (that takes an exclusive lock).
-- Pages are filled: only a refusal updates a row. Bodies over 2 kB are compressed and leave the row, so that the rest stays narrow.
alter table outbox.message set (
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.0,
    autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0.0,
    autovacuum_analyze_threshold = 50000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off,
    toast.autovacuum_vacuum_scale_factor = 0.0,
    toast.autovacuum_vacuum_threshold = 10000,
    toast.autovacuum_vacuum_cost_delay = 0,
    toast.vacuum_truncate = off
);

comment on table outbox.message is
    'Messages that wait to be sent. Rows enter through emit(), emit_bytes(), emit_many(), emit_event() only.';
comment on column outbox.message.id           is 'local handle and order of emission';
comment on column outbox.message.lane         is 'which lane delivers it: a hash of key, or spread evenly without one';
comment on column outbox.message.due_at       is 'null: ready; a time: not before it; infinity: held behind a failing message of its key';
comment on column outbox.message.message_id   is 'identity on the wire and outside the database';
comment on column outbox.message.exchange     is 'exchange; null means the setting default_exchange';
comment on column outbox.message.routing_key  is 'AMQP routing key';
comment on column outbox.message.key          is 'ordering key; messages of one key leave in order';
comment on column outbox.message.content_type is 'MIME type of the body';
comment on column outbox.message.headers      is 'AMQP headers; null means none';
comment on column outbox.message.properties   is 'AMQP properties: priority, type, correlation_id, reply_to, app_id; null means none';
comment on column outbox.message.created_at   is 'when it was emitted (clock, not start of transaction)';
comment on column outbox.message.expires_at   is 'not sent after this time; null means never';
comment on column outbox.message.attempts     is 'how often the broker has refused it';
comment on column outbox.message.emitted_by   is 'session_user that emitted it';
comment on column outbox.message.dedup_key    is 'deduplication key it was emitted with; null means none';
comment on column outbox.message.error        is 'what the last refusal said';
comment on column outbox.message.body         is 'bytes to publish, unchanged';
comment on index outbox.message_ready is 'claim_batch(): ready messages of a lane in order';
comment on index outbox.message_due   is 'claim_batch(), next_due(): messages whose time has come';
comment on index outbox.message_held  is 'claim_batch(): what is held behind a failing key, in order';
