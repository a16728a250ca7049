-- STATE. What was sent and is kept, by day; and how sending went in the last hour.

create table outbox.archive (
    id           bigint      not null,
    sent_at      timestamptz not null,
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
    body         bytea       not null
) partition by range (sent_at);

-- Indexes stand on each partition and not on the whole: pg_dump writes the days, which no extension owns, with their indexes,
-- and a restore would find that attaching them had made those already. The days have no key: see _make_days().
-- The id alone may come twice, after a restore. No table options: rows are only inserted, and the days are dropped whole.
create table outbox.archive_default partition of outbox.archive (
    constraint archive_default_pkey primary key (id, sent_at)
) default;

-- cleanup() looks for what is past.
create index archive_default_sent_at on outbox.archive_default (sent_at);

comment on table outbox.archive is
    'Messages that were sent and are kept, as the setting retention says; one partition a day (UTC), made and dropped by cleanup().';
comment on column outbox.archive.id           is 'the id it had in outbox.message';
comment on column outbox.archive.sent_at      is 'when the broker''s confirmation was settled';
comment on column outbox.archive.message_id   is 'identity on the wire and outside the database';
comment on column outbox.archive.exchange     is 'exchange; null means the setting default_exchange';
comment on column outbox.archive.routing_key  is 'AMQP routing key';
comment on column outbox.archive.key          is 'ordering key';
comment on column outbox.archive.content_type is 'MIME type of the body';
comment on column outbox.archive.headers      is 'AMQP headers; null means none';
comment on column outbox.archive.properties   is 'AMQP properties; null means none';
comment on column outbox.archive.created_at   is 'when it was emitted';
comment on column outbox.archive.expires_at   is 'its end of life; null means never';
comment on column outbox.archive.attempts     is 'how often the broker had refused it';
comment on column outbox.archive.emitted_by   is 'session_user that emitted it';
comment on column outbox.archive.dedup_key    is 'deduplication key it was emitted with; null means none';
comment on column outbox.archive.body         is 'bytes that were published';

-- One row a mark_sent() call, so that no call waits for another's; cleanup() folds them into minutes.
create table outbox.tally (
    settled_at timestamptz not null,
    first_id   bigint      not null,
    sent       integer     not null,
    took       interval    not null,
    worst      interval    not null,
    constraint tally_pkey primary key (settled_at, first_id)
);

create table outbox.tally_minute (
    minute_at timestamptz not null,
    until_at  timestamptz not null,
    sent      bigint      not null,
    took      interval    not null,
    worst     interval    not null,
    constraint tally_minute_pkey primary key (minute_at)
);

-- Emptied about once a minute: vacuumed as often, and never truncated, which takes an exclusive lock.
alter table outbox.tally set (
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

comment on table outbox.tally is
    'How the last mark_sent() calls went, one row each, until cleanup() folds them into tally_minute; derived.';
comment on column outbox.tally.settled_at is 'when the call settled';
comment on column outbox.tally.first_id   is 'the first id it settled';
comment on column outbox.tally.sent       is 'how many messages it settled';
comment on column outbox.tally.took       is 'times from emit, or from when a message was due, until then: their mean in a sample, times sent';
comment on column outbox.tally.worst      is 'the longest in the sample';
comment on table outbox.tally_minute is
    'How sending went in each minute of the last hour; derived.';
comment on column outbox.tally_minute.minute_at is 'beginning of the minute';
comment on column outbox.tally_minute.until_at  is 'the last row of tally folded into it';
comment on column outbox.tally_minute.sent      is 'how many messages were sent';
comment on column outbox.tally_minute.took      is 'sum of the times they took';
comment on column outbox.tally_minute.worst     is 'the longest of them';
comment on index outbox.archive_default_sent_at is 'cleanup(): what is past';
