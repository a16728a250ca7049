-- STATE. The schema everything lives in. No "if not exists": a schema somebody prepared is refused.

do $do$
begin
    -- One installer at a time, whichever way: the second then finds the schema and says so.
    perform pg_advisory_xact_lock(hashtextextended('outbox install', 0));
    if current_setting('server_version_num')::integer < 140000 then
        raise exception 'outbox needs PostgreSQL 14 or later, and this server is %', current_setting('server_version')
            using errcode = 'OB091',
                  hint = 'Upgrade the server.';
    end if;
    if getdatabaseencoding() <> 'UTF8' then
        raise exception 'outbox needs a database with encoding UTF8, and % has %', current_database(), getdatabaseencoding()
            using errcode = 'OB091',
                  hint = 'AMQP text is UTF-8. Create the database with: encoding ''UTF8'' template template0';
    end if;
    if to_regnamespace('outbox') is not null then
        raise exception 'schema outbox exists in this database: %', case
            when exists (
                select
                from pg_depend as d
                where d.classid = 'pg_namespace'::regclass
                  and d.objid = to_regnamespace('outbox')
                  and d.deptype = 'e'
            ) then 'outbox is installed as an extension'
            when to_regprocedure('outbox.version()') is not null then 'outbox is installed by outbox-install.sql'
            else 'it is not from this package'
        end
            using errcode = 'OB090',
                  hint = 'Upgrade what is there, remove it with outbox-uninstall.sql, or rename a schema of your own.';
    end if;
end
$do$;

create schema outbox;

comment on schema outbox is
    'Transactional outbox: events written in a transaction reach RabbitMQ, or the transaction rolled back.';

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
    oldest_emitter_at  timestamptz
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

-- STATE. Deduplication keys, kept apart from messages because they outlive them.

create table outbox.dedup (
    dedup_key  text        not null,
    id         bigint,
    created_at timestamptz not null,
    constraint dedup_pkey primary key (dedup_key)
);

create index dedup_created_at on outbox.dedup (created_at);

comment on table outbox.dedup is
    'Deduplication keys of the last dedup_window: a second emit with the same key returns the first one''s id.';
comment on column outbox.dedup.dedup_key  is 'the key given to emit()';
comment on column outbox.dedup.id         is 'id of the message that was emitted first; null only inside the emitting statement';
comment on column outbox.dedup.created_at is 'when it was emitted; the window counts from here';
comment on index outbox.dedup_created_at is 'cleanup(): oldest keys first';

-- STATE. Who delivers what. A message belongs to one lane for good; a relay leases lanes, not messages.
-- lane and horizon are derived: install and the sweep refill them, so they are not marked for dump.

create table outbox.lane (
    lane         smallint    not null,
    -- Bumped at each update. Newest first in the primary key: dead versions that an old snapshot keeps are never walked.
    version      bigint      not null,
    floor        bigint      not null default 0,
    reach        bigint      not null default 0,
    token        uuid,
    relay        bigint,
    leased_until timestamptz,
    handed       bigint[]    not null default '{}',
    suspects     bigint[]    not null default '{}',
    trial        integer     not null default 0,
    kills        smallint    not null default 0,
    constraint lane_pkey primary key (lane, version),
    constraint lane_leased_whole check (
        (token is null) = (leased_until is null) and (token is null) = (handed = '{}') and (token is not null or relay is null)
    )
);

-- The lanes of one token; dead versions carry other tokens.
create index lane_token on outbox.lane (token) where token is not null;
-- Lanes with messages that may have killed a relay: nearly always none.
create index lane_suspects on outbox.lane (lane) where suspects <> '{}';

-- The ids of a batch stay in the row, uncompressed: toasting them costs more than writing them.
alter table outbox.lane alter column handed set storage external;
alter table outbox.lane set (
    toast_tuple_target = 8160,
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

insert into outbox.lane (lane, version)
select n, 0
from generate_series(0, 63) as n;

comment on table outbox.lane is
    'One row a lane: its lease, and the floor below which nothing ready is left.';
comment on column outbox.lane.lane         is 'number of the lane';
comment on column outbox.lane.version      is 'bumped at each update; the newest row is found first in the primary key';
comment on column outbox.lane.floor        is 'no ready message of the lane has an id below this, and none can appear';
comment on column outbox.lane.reach        is 'the last claim saw every ready message up to this id; the floor follows when they are settled';
comment on column outbox.lane.token        is 'token of the claim that leases the lane; null when free';
comment on column outbox.lane.relay        is 'life lock of the session that claimed: what hello() returned; null without one';
comment on column outbox.lane.leased_until is 'end of the lease; null when free';
comment on column outbox.lane.handed       is 'ids handed out and not settled; the lane is free when there are none';
comment on column outbox.lane.suspects     is 'ids in the hands of a relay that died, in order; nothing else of the lane leaves before them';
comment on column outbox.lane.trial        is 'how many suspects go out together: half of what was in hand at the last such death';
comment on column outbox.lane.kills        is 'how many relays died with the only suspect, and nothing else, in their hands';
comment on index outbox.lane_suspects is 'claim_batch(): lanes to be cleared up first';
comment on index outbox.lane_token is 'settling calls: the lanes of a token';

-- Each claim begins at the next lane, whichever relay makes it, so that none is served twice before all were once.
create sequence outbox.lane_turn as bigint increment by 1 cache 1 cycle owned by outbox.lane.lane;

comment on sequence outbox.lane_turn is
    'Where the next claim begins; derived, like lane.';

create table outbox.horizon (
    version        bigint      not null,
    safe_id        bigint      not null default 0,
    moved_at       timestamptz not null default '-infinity',
    checked_at     timestamptz not null default '-infinity',
    pending_id     bigint,
    pending_xid    xid8,
    noted_id       bigint,
    noted_xids     xid8[],
    noted_at       timestamptz not null default '-infinity',
    due_checked_at timestamptz not null default '-infinity',
    floor_repairs  bigint      not null default 0,
    constraint horizon_pkey primary key (version),
    constraint horizon_pending_whole check ((pending_id is null) = (pending_xid is null)),
    constraint horizon_noted_whole check ((noted_id is null) = (noted_xids is null))
);

alter table outbox.horizon set (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.0,
    autovacuum_vacuum_threshold = 2000,
    autovacuum_vacuum_cost_delay = 0,
    vacuum_truncate = off
);

insert into outbox.horizon (version) values (0);

comment on table outbox.horizon is
    'One row: up to which id every transaction that drew one has ended, and the proofs under way.';
comment on column outbox.horizon.version        is 'bumped at each update; the newest row is found first in the primary key';
comment on column outbox.horizon.safe_id        is 'every transaction that drew an id up to this one has ended';
comment on column outbox.horizon.moved_at       is 'when safe_id last moved';
comment on column outbox.horizon.checked_at     is 'when a settling call last looked';
comment on column outbox.horizon.pending_id     is 'proof by xid: the last id drawn before pending_xid was';
comment on column outbox.horizon.pending_xid    is 'proof by xid: once every older transaction has ended, pending_id is safe';
comment on column outbox.horizon.noted_id       is 'proof by lock holders: the last id drawn before they were noted';
comment on column outbox.horizon.noted_xids     is 'proof by lock holders: once these have ended, noted_id is safe';
comment on column outbox.horizon.noted_at       is 'when they were noted';
comment on column outbox.horizon.due_checked_at is 'when a claim last looked for messages whose time has come';
comment on column outbox.horizon.floor_repairs  is 'ready messages the sweep found below a floor; anything but 0 is a bug';

create table outbox.held_key (
    lane    smallint not null,
    key     text     not null,
    head_id bigint,
    constraint held_key_pkey primary key (lane, key)
);

comment on table outbox.held_key is
    'Keys whose messages leave through message_held: one failed, and what follows it waits in order.';
comment on column outbox.held_key.lane    is 'lane of the key';
comment on column outbox.held_key.key     is 'the key';
comment on column outbox.held_key.head_id is
    'the failing or dead message the others wait for; null: nothing any more, they are leaving in order';

create table outbox.relay (
    relay      bigint      not null,
    name       text        not null,
    started_at timestamptz not null default clock_timestamp(),
    constraint relay_pkey primary key (relay)
);

comment on table outbox.relay is
    'Relays that said hello(). One lives while its session holds the advisory lock relay.';
comment on column outbox.relay.relay      is 'key of the session''s life lock, random';
comment on column outbox.relay.name       is 'name it gave; need not be unique';
comment on column outbox.relay.started_at is 'when it said hello';

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

-- STATE. Numbers on which all relays must agree. Ships empty; defaults are in _value_of().

create table outbox.setting (
    name       text        not null,
    value      text        not null,
    changed_at timestamptz not null default clock_timestamp(),
    changed_by name        not null default session_user,
    constraint setting_pkey primary key (name)
);

comment on table outbox.setting is
    'Settings that differ from their defaults; change them with configure().';
comment on column outbox.setting.name       is 'name of the setting';
comment on column outbox.setting.value      is 'its value as text, validated by configure()';
comment on column outbox.setting.changed_at is 'when it was changed';
comment on column outbox.setting.changed_by is 'session_user that changed it';

-- STATE. Who was granted what. Recorded as privileges of columns, which no default privilege gives, and which the server
-- keeps through renaming, dropping, dumping and restoring roles. REFERENCES on these columns permits nothing else.

create table outbox.access (
    emit       boolean,
    relay      boolean,
    consume    boolean,
    monitor    boolean,
    admin      boolean,
    applied_at timestamptz not null default clock_timestamp(),
    constraint access_pkey primary key (applied_at)
);

comment on table outbox.access is
    'Who was granted which part: whoever has the privilege REFERENCES on its column. A row for each upgrade that gave the rights anew.';
comment on column outbox.access.emit       is 'grant_emit()';
comment on column outbox.access.relay      is 'grant_relay()';
comment on column outbox.access.consume    is 'grant_consume()';
comment on column outbox.access.monitor    is 'grant_monitor()';
comment on column outbox.access.admin      is 'grant_admin()';
comment on column outbox.access.applied_at is 'when rights were given anew to the roles that had them';

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

-- CODE. What several stations need. Helpers start with _ and are granted to nobody.
--
-- Error codes. Messages name the argument, never its value; the hint says what to do.
--   OB001  an argument is null or missing          OB011  an argument is out of range
--   OB002  an argument is too long or empty        OB012  the token holds lanes already
--   OB003  headers or properties cannot be sent    OB013  arrays of different length
--   OB004  the body is too large                   OB014  unknown reason
--   OB005  eta, delay or expires_in is wrong       OB020  unknown setting, or a value it cannot take
--   OB006  messages is not what emit_many() takes  OB090  installed already, or not as expected
--   OB010  not read committed                      OB091  the server or database is not suitable
--   OB015  the other kind delivers                 OB092  uninstall refused
--                                                  OB093  upgrade refused: a table is in use

create function outbox._refuse(code text, message text, hint text)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    raise exception using errcode = _refuse.code, message = _refuse.message, hint = _refuse.hint;
end
$function$;

comment on function outbox._refuse(text, text, text) is
    'Raises one of the package''s own errors.';

create function outbox._value_of(name text)
    returns text
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return coalesce(
        (select s.value from outbox.setting as s where s.name = _value_of.name),
        case _value_of.name
            when 'default_exchange' then 'outbox'
            when 'max_body_bytes'   then '1048576'
            when 'max_attempts'     then '10'
            when 'retry_base'       then '5 s'
            when 'retry_multiplier' then '2'
            when 'retry_cap'        then '1 h'
            when 'retry_jitter'     then '0.25'
            when 'on_dead'          then 'continue'
            when 'strict_keys'      then 'off'
            when 'retention'        then 'delete'
            when 'dead_retention'   then '30 days'
            when 'inbox_retention'  then '7 days'
            when 'dedup_window'     then '1 h'
            when 'paused'           then 'off'
        end
    );
end
$function$;

comment on function outbox._value_of(text) is
    'Value of a setting: what configure() stored, else its default; null for an unknown name.';

create function outbox._refuse_isolation()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    -- An older snapshot would not see what committed meanwhile, and every decision about lanes is about that.
    perform outbox._refuse('OB010', 'isolation level must be read committed',
        'Run "set session characteristics as transaction isolation level read committed" first.');
end
$function$;

comment on function outbox._refuse_isolation() is
    'Raises: the transaction is not read committed.';

create function outbox._lanes()
    returns setof outbox.lane
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
begin
    return query
    select l.*
    from generate_series(0, 63) as n
    cross join lateral (
        select x.*
        from outbox.lane as x
        where x.lane = n::smallint
        order by x.version desc
        limit 1
    ) as l;
end
$function$;

comment on function outbox._lanes() is
    'The lanes as they are, without walking their dead versions.';

create function outbox._widen(xid bigint)
    returns xid8
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    -- Open transactions lie on both sides of xmax, so the nearest number with these 32 bits is the one that is meant.
    select (x.near + ((_widen.xid - x.near + 2147483648) & 4294967295) - 2147483648)::text::xid8
    from (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as near) as x;
$function$;

comment on function outbox._widen(bigint) is
    'A 32-bit transaction id as xid8.';

-- CODE. Station 10: a message joins the caller's transaction.
-- emit() only inserts: it reads no row (but of its dedup key), waits for nobody (but another open emit of that key) and
-- has no exception block, so it costs no subtransaction.

create function outbox._check_headers(headers jsonb, prefix text)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if jsonb_typeof(_check_headers.headers) <> 'object' then
        perform outbox._refuse('OB003', format('%sheaders must be an object', _check_headers.prefix),
            'Pass a JSON object of header names and values.');
    end if;
    if octet_length(_check_headers.headers::text) > 32768 then
        perform outbox._refuse('OB003', format('%sheaders are larger than 32 KiB', _check_headers.prefix),
            'Move large values into the body.');
    end if;
    if exists (
        select
        from jsonb_object_keys(_check_headers.headers) as k
        where k in ('CC', 'BCC', 'x-death', 'x-delivery-count', 'x-acquired-count')
           or k like 'x-first-death-%'
           or k like 'x-outbox-%'
    ) then
        perform outbox._refuse('OB003', format('%sheaders contain a reserved name', _check_headers.prefix),
            'CC, BCC, x-death, x-first-death-*, x-delivery-count, x-acquired-count and x-outbox-* belong to the broker and to outbox.');
    end if;
    if exists (
        with recursive node (name, value, depth) as (
            select e.key, e.value, 0
            from jsonb_each(_check_headers.headers) as e
            union all
            select c.name, c.value, n.depth + 1
            from node as n
            cross join lateral (
                select e.key as name, e.value
                from jsonb_each(case when jsonb_typeof(n.value) = 'object' then n.value end) as e
                union all
                select null, e.value
                from jsonb_array_elements(case when jsonb_typeof(n.value) = 'array' then n.value end) as e
            ) as c
            where n.depth < 2
        )
        select
        from node as n
        where octet_length(n.name) not between 1 and 128
           or (n.depth > 0 and jsonb_typeof(n.value) in ('object', 'array'))
           or (jsonb_typeof(n.value) = 'number'
               and case
                   when n.value #>> '{}' ~ '^-?[0-9]+$'
                   then (n.value #>> '{}')::numeric not between -9223372036854775808 and 9223372036854775807
                   else true
               end)
    ) then
        perform outbox._refuse('OB003', format('%sheaders contain a name or value that AMQP cannot carry unchanged', _check_headers.prefix),
            'Names have 1 to 128 bytes; values are strings, booleans, 64-bit integers, null, or flat lists and objects of those. Send other numbers as strings.');
    end if;
end
$function$;

comment on function outbox._check_headers(jsonb, text) is
    'Raises unless AMQP carries these headers unchanged.';

create function outbox._check_properties(properties jsonb, prefix text)
    returns void
    language plpgsql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if jsonb_typeof(_check_properties.properties) <> 'object' then
        perform outbox._refuse('OB003', format('%sproperties must be an object', _check_properties.prefix),
            'Pass a JSON object with priority, type, correlation_id, reply_to or app_id.');
    end if;
    if exists (
        select
        from jsonb_each(_check_properties.properties) as p
        where case
            when p.key = 'priority'
            then jsonb_typeof(p.value) <> 'number' or p.value #>> '{}' !~ '^([0-9]|[1-9][0-9]|1[0-9][0-9]|2[0-4][0-9]|25[0-5])$'
            when p.key = 'reply_to'
            then jsonb_typeof(p.value) <> 'string' or octet_length(p.value #>> '{}') > 255
                 or p.value #>> '{}' like 'amq.rabbitmq.reply-to%'
            when p.key in ('type', 'correlation_id', 'app_id')
            then jsonb_typeof(p.value) <> 'string' or octet_length(p.value #>> '{}') > 255
            else true
        end
    ) then
        perform outbox._refuse('OB003', format('%sproperties contain a name or value that cannot be sent', _check_properties.prefix),
            'priority is an integer from 0 to 255; type, correlation_id, reply_to and app_id are strings of at most 255 bytes; nothing else is taken.');
    end if;
end
$function$;

comment on function outbox._check_properties(jsonb, text) is
    'Raises unless these AMQP properties can be sent.';

create function outbox._check_message(
    prefix       text,
    routing_key  text,
    body_bytes   integer,
    content_type text,
    key          text,
    exchange     text,
    eta          timestamptz,
    delay        interval,
    expires_in   interval,
    dedup_key    text,
    headers      jsonb,
    properties   jsonb
)
    returns void
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if _check_message.routing_key is null then
        perform outbox._refuse('OB001', format('%srouting_key must not be null', _check_message.prefix), 'Pass a routing key such as ''order.placed''.');
    end if;
    if _check_message.content_type is null then
        perform outbox._refuse('OB001', format('%scontent_type must not be null', _check_message.prefix), 'Pass a MIME type such as ''application/json''.');
    end if;
    if octet_length(_check_message.routing_key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%srouting_key must have 1 to 255 bytes', _check_message.prefix), 'Shorten it; bytes count, not characters.');
    end if;
    if octet_length(_check_message.content_type) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%scontent_type must have 1 to 255 bytes', _check_message.prefix), 'Pass a MIME type such as ''application/json''.');
    end if;
    if octet_length(_check_message.exchange) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%sexchange must have 1 to 255 bytes', _check_message.prefix),
            'Name an exchange, or leave it null for the setting default_exchange.');
    end if;
    if octet_length(_check_message.key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%skey must have 1 to 255 bytes', _check_message.prefix), 'Shorten it, or leave it null for no order.');
    end if;
    if octet_length(_check_message.dedup_key) not between 1 and 255 then
        perform outbox._refuse('OB002', format('%sdedup_key must have 1 to 255 bytes', _check_message.prefix), 'Shorten it, for instance to a hash.');
    end if;
    if _check_message.body_bytes > 1048576 and _check_message.body_bytes > outbox._value_of('max_body_bytes')::integer then
        perform outbox._refuse('OB004', format('%sbody is larger than max_body_bytes', _check_message.prefix),
            'Send a reference instead, or raise the limit (at most 15 MiB): select outbox.configure(''max_body_bytes'', ...).');
    end if;
    if _check_message.eta is not null and _check_message.delay is not null then
        perform outbox._refuse('OB005', format('%seta and delay exclude each other', _check_message.prefix), 'Pass one of them.');
    end if;
    if _check_message.delay < interval '0' then
        perform outbox._refuse('OB005', format('%sdelay must not be negative', _check_message.prefix), 'Leave it null to send at once.');
    end if;
    if not (isfinite(coalesce(_check_message.eta, 'epoch')) and coalesce(_check_message.delay, '0') <= interval '10 years'
            and coalesce(_check_message.eta, 'epoch') <= clock_timestamp() + interval '10 years') then
        perform outbox._refuse('OB005', format('%seta and delay must lie within 10 years', _check_message.prefix), 'Pass an earlier time.');
    end if;
    if _check_message.expires_in <= interval '0' or _check_message.expires_in > interval '10 years' then
        perform outbox._refuse('OB005', format('%sexpires_in must be positive and at most 10 years', _check_message.prefix), 'Leave it null to keep the message until it is sent.');
    end if;
    if _check_message.headers is not null then
        perform outbox._check_headers(_check_message.headers, _check_message.prefix);
    end if;
    if _check_message.properties is not null then
        perform outbox._check_properties(_check_message.properties, _check_message.prefix);
    end if;
end
$function$;

comment on function outbox._check_message(text, text, integer, text, text, text, timestamptz, interval, interval, text, jsonb, jsonb) is
    'Raises for whatever the broker could not take unchanged: one bad message would close the channel for all in flight.';

create function outbox._with_context(headers jsonb, message_id uuid)
    returns jsonb
    language plpgsql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_context  text := current_setting('outbox.context', true);
    v_tracking text := current_setting('outbox.tracking', true);
    v_headers  jsonb := _with_context.headers;
begin
    if v_context <> '' then
        if left(v_context, 1) <> '{' then
            perform outbox._refuse('OB003', 'outbox.context is not an object', 'Set it with set_context(), or to nothing.');
        end if;
        v_headers := v_context::jsonb || coalesce(v_headers, '{}');
    end if;
    if v_headers is not null then
        perform outbox._check_headers(v_headers, '');
    end if;
    if v_tracking <> '' then
        if v_tracking !~ '^[0-9a-fA-F-]{36}(,[0-9a-fA-F-]{36})*$' then
            perform outbox._refuse('OB003', 'outbox.tracking is not a list of message ids', 'Set it to UUIDs separated by commas, or to nothing.');
        end if;
        -- The newest ids matter most: a longer chain loses its beginning.
        v_headers := coalesce(v_headers, '{}') || jsonb_build_object('x-outbox-tracking-ids', (
            select jsonb_agg(c.id order by c.n)
            from (
                select t.id, t.n
                from unnest(string_to_array(v_tracking, ',')::uuid[] || _with_context.message_id) with ordinality as t (id, n)
                order by t.n desc
                limit 100
            ) as c
        ));
    end if;
    return v_headers;
end
$function$;

comment on function outbox._with_context(jsonb, uuid) is
    'Headers as they will travel: what set_context() and tracking add, explicit ones winning.';

create function outbox._emit(
    routing_key  text,
    body         bytea,
    content_type text,
    key          text,
    headers      jsonb,
    exchange     text,
    eta          timestamptz,
    delay        interval,
    expires_in   interval,
    dedup_key    text,
    message_id   uuid,
    properties   jsonb
)
    returns bigint
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now        timestamptz := clock_timestamp();
    v_message_id uuid        := coalesce(_emit.message_id, gen_random_uuid());
    v_headers    jsonb       := _emit.headers;
    v_due_at     timestamptz;
    v_id         bigint;
begin
    perform outbox._check_message('', _emit.routing_key, octet_length(_emit.body), _emit.content_type, _emit.key, _emit.exchange,
        _emit.eta, _emit.delay, _emit.expires_in, _emit.dedup_key, _emit.headers, _emit.properties);

    if coalesce(current_setting('outbox.context', true), '') <> '' or coalesce(current_setting('outbox.tracking', true), '') <> '' then
        v_headers := outbox._with_context(_emit.headers, v_message_id);
    end if;

    v_due_at := coalesce(_emit.eta, v_now + _emit.delay);
    if v_due_at <= v_now then
        v_due_at := null;
    end if;

    if _emit.dedup_key is not null then
        loop
            insert into outbox.dedup as d (dedup_key, created_at)
            values (_emit.dedup_key, v_now)
            on conflict on constraint dedup_pkey do update
                set id = null,
                    created_at = excluded.created_at
                where d.created_at < excluded.created_at - outbox._value_of('dedup_window')::interval;
            exit when found;

            select d.id
            into v_id
            from outbox.dedup as d
            where d.dedup_key = _emit.dedup_key;
            if found then
                return v_id;
            end if;
        end loop;
    end if;

    insert into outbox.message (
        lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, emitted_by,
        dedup_key, body
    )
    values (
        case when _emit.key is null then (date_part('epoch', clock_timestamp()) * 250)::bigint + pg_backend_pid() & 63
             else hashtextextended(_emit.key collate "C", 0) & 63 end,
        v_due_at, v_message_id, _emit.exchange, _emit.routing_key, _emit.key, _emit.content_type, v_headers, _emit.properties, v_now,
        coalesce(v_due_at, v_now) + _emit.expires_in, session_user, _emit.dedup_key, _emit.body
    )
    returning id into v_id;

    if _emit.dedup_key is not null then
        update outbox.dedup as d
        set id = v_id
        where d.dedup_key = _emit.dedup_key;
    end if;
    return v_id;
end
$function$;

comment on function outbox._emit(text, bytea, text, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Checks and inserts one message of any kind.';

create function outbox.emit(
    routing_key text,
    payload     jsonb,
    key         text        = null,
    headers     jsonb       = null,
    exchange    text        = null,
    eta         timestamptz = null,
    delay       interval    = null,
    expires_in  interval    = null,
    dedup_key   text        = null,
    message_id  uuid        = null,
    properties  jsonb       = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_body bytea := convert_to(emit.payload::text, 'UTF8');
    v_id   bigint;
begin
    -- The plain message, which most are, goes straight in; _emit() does the same for the others.
    -- (BETWEEN would evaluate its first operand twice: each call here is 1 % of an emit.)
    if octet_length(emit.routing_key) <= 255 and emit.routing_key <> ''
       and octet_length(v_body) <= 1048576
       and (octet_length(emit.key) <= 255 and emit.key <> '') is not false
       and num_nonnulls(emit.headers, emit.exchange, emit.eta, emit.delay, emit.expires_in, emit.dedup_key, emit.properties,
               nullif(current_setting('outbox.context', true), ''), nullif(current_setting('outbox.tracking', true), '')) = 0
    then
        insert into outbox.message (lane, message_id, routing_key, key, content_type, created_at, emitted_by, body)
        values (
            -- Without a key: what a session emits within 4 ms shares a lane, so that a lane's messages lie on few pages.
            case when emit.key is null then (date_part('epoch', clock_timestamp()) * 250)::bigint + pg_backend_pid() & 63
                 else hashtextextended(emit.key collate "C", 0) & 63 end,
            coalesce(emit.message_id, gen_random_uuid()), emit.routing_key, emit.key, 'application/json', clock_timestamp(), session_user,
            v_body
        )
        returning id into v_id;
        return v_id;
    end if;
    if emit.payload is null then
        perform outbox._refuse('OB001', 'payload must not be null', 'The JSON value null is written ''null''::jsonb.');
    end if;
    return outbox._emit(emit.routing_key, v_body, 'application/json', emit.key, emit.headers, emit.exchange, emit.eta, emit.delay,
        emit.expires_in, emit.dedup_key, emit.message_id, emit.properties);
end
$function$;

comment on function outbox.emit(text, jsonb, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Writes a JSON message in the caller''s transaction and returns its id; it leaves if and when the transaction commits.';

create function outbox.emit_bytes(
    routing_key  text,
    body         bytea,
    content_type text        = 'application/octet-stream',
    key          text        = null,
    headers      jsonb       = null,
    exchange     text        = null,
    eta          timestamptz = null,
    delay        interval    = null,
    expires_in   interval    = null,
    dedup_key    text        = null,
    message_id   uuid        = null,
    properties   jsonb       = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if emit_bytes.body is null then
        perform outbox._refuse('OB001', 'body must not be null', 'An empty body is written '''' (no bytes).');
    end if;
    return outbox._emit(emit_bytes.routing_key, emit_bytes.body, emit_bytes.content_type, emit_bytes.key, emit_bytes.headers,
        emit_bytes.exchange, emit_bytes.eta, emit_bytes.delay, emit_bytes.expires_in, emit_bytes.dedup_key, emit_bytes.message_id,
        emit_bytes.properties);
end
$function$;

comment on function outbox.emit_bytes(text, bytea, text, text, jsonb, text, timestamptz, interval, interval, text, uuid, jsonb) is
    'Writes a message whose body is sent byte for byte; otherwise like emit().';

create function outbox.emit_many(messages jsonb)
    returns bigint[]
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_context boolean     := coalesce(current_setting('outbox.context', true), '') <> ''
                             or coalesce(current_setting('outbox.tracking', true), '') <> '';
    v_bad     bigint;
    v_ids     bigint[];
    -- Looked at before the server reads them: its own errors would show the value.
    v_time     constant text := '^[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))'
                                '[T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]+)?)?(Z|[+-](0[0-9]|1[0-5])(:?[0-5][0-9])?)$';
    v_interval constant text := regexp_replace(
        '^P(?=.)(#Y)?(#M)?(#W)?(#D)?(T(?=.)(#H)?(#M)?(#S)?)?$|^(?=.)(# ?y(ear)?s? ?)?(# ?mon(th)?s? ?)?(# ?d(ay)?s? ?)?(# ?h(our)?s? ?)?(# ?m(in(ute)?)?s? ?)?(# ?s(ec(ond)?)?s? ?)?'
        '(# ?(ms|milliseconds?) ?)?(# ?microseconds? ?)?(-?[0-9]{1,9}:[0-5][0-9](:[0-5][0-9]([.][0-9]{1,9})?)?)?$',
        '#', '-?[0-9]{1,9}([.][0-9]{1,9})?', 'g');
begin
    if emit_many.messages is null then
        perform outbox._refuse('OB001', 'messages must not be null', 'Pass a JSON array of objects with the arguments of emit() as fields.');
    end if;
    if jsonb_typeof(emit_many.messages) <> 'array' then
        perform outbox._refuse('OB006', 'messages must be an array', 'Pass a JSON array of objects with the arguments of emit() as fields.');
    end if;

    select e.n - 1
    into v_bad
    from jsonb_array_elements(emit_many.messages) with ordinality as e (message, n)
    where jsonb_typeof(e.message) <> 'object'
       or (e.message ? 'payload') = (e.message ? 'body')
       or (e.message ? 'content_type') and not (e.message ? 'body')
       -- Nearly all have these fields and no others, and a body without line breaks; only the others are looked at one by one.
       or (e.message - '{payload,body,content_type,routing_key}'::text[] <> '{}'
           or jsonb_typeof(e.message -> 'routing_key') <> 'string'
           or jsonb_typeof(e.message -> 'content_type') <> 'string'
           or jsonb_typeof(e.message -> 'body') <> 'string'
           or octet_length(e.message ->> 'body') % 4 <> 0
           or e.message ->> 'body' !~ '^[A-Za-z0-9+/]*={0,2}$')
          and exists (
              select
              from jsonb_each(e.message) as f
              where case f.key
                  when 'payload' then false
                  when 'body' then jsonb_typeof(f.value) <> 'string'
                       or translate(f.value #>> '{}', E' \r\n', '') !~ '^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$'
                  when 'headers' then false
                  when 'properties' then false
                  else jsonb_typeof(f.value) not in ('string', 'null')
                       or case f.key
                           when 'routing_key' then false
                           when 'content_type' then false
                           when 'key' then false
                           when 'exchange' then false
                           when 'dedup_key' then false
                           when 'message_id' then f.value #>> '{}' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
                           when 'eta' then f.value #>> '{}' !~ v_time
                           when 'delay' then f.value #>> '{}' !~ v_interval
                           when 'expires_in' then f.value #>> '{}' !~ v_interval
                           else true
                       end
              end
          )
    order by e.n
    limit 1;
    if found then
        perform outbox._refuse('OB006', format('messages[%s] is not a message', v_bad),
            'Each is an object with the arguments of emit() as fields, times and intervals as text, and either payload, or body (base64) and content_type.');
    end if;

    if emit_many.messages @? '$[*].dedup_key' then
        perform outbox._check_message(format('messages[%s].', m.n - 1), m.routing_key, octet_length(m.body), m.content_type, m.key,
            m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties)
        from outbox._message_rows(emit_many.messages) as m;
        select array_agg(outbox._emit(m.routing_key, m.body, m.content_type, m.key, m.headers, m.exchange, m.eta, m.delay, m.expires_in,
            m.dedup_key, m.message_id, m.properties) order by m.n)
        into v_ids
        from outbox._message_rows(emit_many.messages) as m;
        return coalesce(v_ids, '{}');
    end if;

    with made as (
        insert into outbox.message (
            lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, emitted_by, body
        )
        select
            -- As emit() does, but in runs of 8: many at once must not fill one lane.
            case when m.key is null then (date_part('epoch', v_now) * 250)::bigint + pg_backend_pid() + m.n / 8 & 63
                 else hashtextextended(m.key collate "C", 0) & 63 end,
            d.due_at,
            m.message_id,
            m.exchange,
            m.routing_key,
            m.key,
            m.content_type,
            case when v_context then outbox._with_context(m.headers, m.message_id) else m.headers end,
            m.properties,
            v_now,
            coalesce(d.due_at, v_now) + m.expires_in,
            session_user,
            m.body
        from outbox._message_rows(emit_many.messages) as m
        cross join lateral (
            select case when coalesce(m.eta, v_now + m.delay) > v_now then coalesce(m.eta, v_now + m.delay) end as due_at
        ) as d
        -- What passes the first test needs no closer look; the second raises or returns nothing.
        where (octet_length(m.routing_key) between 1 and 255
               and octet_length(m.body) <= 1048576
               and octet_length(m.content_type) between 1 and 255
               and (m.key is null or octet_length(m.key) between 1 and 255)
               and num_nonnulls(m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties) = 0) is true
           or outbox._check_message(format('messages[%s].', m.n - 1), m.routing_key, octet_length(m.body), m.content_type, m.key,
                  m.exchange, m.eta, m.delay, m.expires_in, m.dedup_key, m.headers, m.properties)::text = ''
        returning id
    )
    select coalesce(array_agg(made.id order by made.id), '{}')
    into v_ids
    from made;
    return v_ids;
end
$function$;

comment on function outbox.emit_many(jsonb) is
    'Writes an array of messages in one statement and returns their ids in the same order; fields are the arguments of emit().';

create function outbox._message_rows(messages jsonb)
    returns table (
        n            bigint,
        routing_key  text,
        body         bytea,
        content_type text,
        key          text,
        headers      jsonb,
        exchange     text,
        eta          timestamptz,
        delay        interval,
        expires_in   interval,
        dedup_key    text,
        message_id   uuid,
        properties   jsonb
    )
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select
        m.n,
        m.routing_key,
        -- No body means there is a payload, and if that reads as null it is the JSON value.
        case when m.body is null then convert_to(coalesce(m.payload, 'null')::text, 'UTF8') else decode(m.body, 'base64') end,
        case when m.body is null then 'application/json' else coalesce(m.content_type, 'application/octet-stream') end,
        m.key,
        nullif(m.headers, 'null'),
        m.exchange,
        m.eta,
        m.delay,
        m.expires_in,
        m.dedup_key,
        coalesce(m.message_id, gen_random_uuid()),
        nullif(m.properties, 'null')
    from rows from (
        jsonb_to_recordset(_message_rows.messages) as (
            routing_key text, payload jsonb, body text, content_type text, key text, headers jsonb, exchange text, eta timestamptz,
            delay interval, expires_in interval, dedup_key text, message_id uuid, properties jsonb
        )
    ) with ordinality as m (routing_key, payload, body, content_type, key, headers, exchange, eta, delay, expires_in, dedup_key, message_id, properties, n);
$function$;

comment on function outbox._message_rows(jsonb) is
    'The objects of emit_many() as rows, in order.';

create function outbox.emit_event(
    aggregate_type text,
    aggregate_id   text,
    event_type     text,
    payload        jsonb,
    headers        jsonb = null,
    properties     jsonb = null
)
    returns bigint
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if emit_event.aggregate_type is null or emit_event.aggregate_id is null or emit_event.event_type is null then
        perform outbox._refuse('OB001', 'aggregate_type, aggregate_id and event_type must not be null', 'Pass all three, or use emit().');
    end if;
    return outbox.emit(
        routing_key => emit_event.aggregate_type || '.' || emit_event.event_type,
        payload     => emit_event.payload,
        key         => emit_event.aggregate_type || ':' || emit_event.aggregate_id,
        headers     => jsonb_build_object(
                           'aggregate_type', emit_event.aggregate_type,
                           'aggregate_id', emit_event.aggregate_id,
                           'event_type', emit_event.event_type
                       ) || coalesce(nullif(emit_event.headers, 'null'), '{}'),
        properties  => emit_event.properties
    );
end
$function$;

comment on function outbox.emit_event(text, text, text, jsonb, jsonb, jsonb) is
    'emit() for a domain event: routing key type.event, ordering key type:id, the three fields as headers.';

create function outbox.set_context(headers jsonb)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if set_context.headers is not null then
        perform outbox._check_headers(set_context.headers, '');
    end if;
    perform set_config('outbox.context', coalesce(set_context.headers::text, ''), true);
end
$function$;

comment on function outbox.set_context(jsonb) is
    'For the rest of the transaction: headers merged into every later emit, triggers included; null clears them.';

create function outbox._in_flight(lane smallint, id bigint)
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

create function outbox.cancel(id bigint)
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

create function outbox._ring()
    returns trigger
    language plpgsql
    volatile
    -- No search_path of its own: it runs under that of the function that emits, and pinning it again is 4 % of an emit.
as $function$
begin
    -- Got it: no relay sleeps, and until commit the lock tells a relay about to sleep that this emit is in flight.
    -- Refused: a relay sleeps, holding it. NOTIFY takes an instance-wide lock at commit, so it is only for then.
    if (pg_catalog.current_setting('outbox.notify', true) operator(pg_catalog.=) 'off') is not true
       and not pg_catalog.pg_try_advisory_xact_lock_shared(tg_relid::integer, 1)
    then
        perform pg_catalog.pg_notify('outbox', '');
    end if;
    return null;
end
$function$;

comment on function outbox._ring() is
    'The doorbell: NOTIFY outbox, but only when a relay sleeps.';

-- CODE. Station 20: a relay takes the next messages, and stations around it: sleeping, waking, saying hello.
-- A claim leases lanes to a token and writes nothing on messages. Lane before message, always; lanes are locked in one
-- statement and messages read in a later one, whose snapshot then sees all that the lane's last holder settled.

create function outbox.hello(name text)
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

create function outbox._holds(key bigint)
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

create function outbox.relay_settings()
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

create function outbox.claim_batch(
    token      uuid,
    batch_size integer  = 500,
    lease      interval = '30 s',
    max_bytes  bigint   = 8388608,
    relay      bigint   = null
)
    returns setof outbox.claimed_message
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_now       timestamptz := clock_timestamp();
    v_turn      bigint := nextval('outbox.lane_turn') & 63;
    -- In this order: what ended before the snapshot was written before the first position, and synced if the second is as far.
    v_ended     xid := pg_snapshot_xmin(pg_current_snapshot())::xid;
    v_synced    boolean := pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn();
    v_suspect   smallint;
    v_safe_id   bigint;
    v_look_due  boolean;
    v_due       boolean;
    v_held      boolean;
    v_candidates refcursor;
    v_candidate record;
    v_lane      outbox.lane;
    v_alive     bigint[] := '{}';
    v_gone      bigint[] := '{}';
    v_quota     integer;
    v_part      outbox._part;
    v_lanes     integer := 0;
    v_waits     boolean := false;
    v_next      integer;
    v_ids       bigint[] := '{}';
    v_tids      tid[] := '{}';
    v_bytes     bigint := 0;
    v_exchange  text;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if claim_batch.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass a new random UUID for each claim.');
    end if;
    if (claim_batch.batch_size between 1 and 10000) is not true then
        perform outbox._refuse('OB011', 'batch_size must lie between 1 and 10000', 'The default is 500.');
    end if;
    if (claim_batch.lease between interval '1 second' and interval '1 hour') is not true then
        perform outbox._refuse('OB011', 'lease must lie between 1 second and 1 hour', 'The default is 30 seconds.');
    end if;
    if (claim_batch.max_bytes > 0) is not true then
        perform outbox._refuse('OB011', 'max_bytes must be positive', 'The default is 8 MiB.');
    end if;
    if exists (select from outbox.lane as l where l.token = claim_batch.token) then
        perform outbox._refuse('OB012', 'token holds lanes already', 'Use a new token for each claim, or settle and release this one.');
    end if;
    if exists (select from outbox.setting as s where s.name = 'paused') then
        return;
    end if;
    select h.due_checked_at <= v_now - interval '100 ms'
    into v_look_due
    from outbox.horizon as h
    order by h.version desc
    limit 1;
    v_look_due := coalesce(v_look_due, true);
    -- Two looks that spare most claims 128.
    v_due := v_look_due and exists (select from outbox.message as m where m.due_at is not null and m.due_at <> 'infinity');
    v_held := exists (select from outbox.held_key);
    -- What may have killed a relay leaves alone: taken with empty hands, and nothing beside it until it is settled. Every
    -- other claim begins with it.
    if exists (select from outbox.lane as l where l.suspects <> '{}') then
        select l.lane
        into v_suspect
        from outbox._lanes() as l
        where l.suspects <> '{}'
          and (l.leased_until is null or l.leased_until <= v_now or l.relay = claim_batch.relay)
        order by (l.lane - v_turn) & 63
        limit 1;
        if found and outbox._has_lanes(claim_batch.relay) then
            return;
        end if;
        -- At random, not in turn: two that take turns with equal steps can miss each other for ever.
        if random() < 0.5 then
            v_turn := coalesce(v_suspect, v_turn);
        end if;
    end if;

    open v_candidates for
        select l.lane, l.relay, l.leased_until > v_now as leased
        -- In turn, and looked into only as far as the loop goes: with a backlog one or two lanes fill the batch.
        from generate_series(v_turn, v_turn + 63) as n
        cross join lateral (
            select x.lane, x.floor, x.relay, x.leased_until, x.suspects
            from outbox.lane as x
            where x.lane = (n & 63)::smallint
            order by x.version desc
            limit 1
        ) as l
        where (l.leased_until is null
               or l.leased_until <= v_now
               -- somebody else's lease: worth a look whether its holder lives
               or l.leased_until > v_now + interval '3 s' and l.relay is not null and l.relay is distinct from claim_batch.relay)
          -- Each looked for only if the one before it found nothing. (EXISTS might be planned as a hash of the whole table.)
          and coalesce(
              nullif(l.suspects <> '{}', false),
              (
                  select true
                  from outbox.message as m
                  where m.lane = l.lane
                    and m.due_at is null
                    and m.id >= l.floor
                  limit 1
              ),
              (
                  select true
                  from outbox.message as m
                  where v_due
                    and m.lane = l.lane
                    and m.due_at is not null
                    and m.due_at <> 'infinity'
                    and m.due_at <= v_now
                  limit 1
              ),
              (
                  select true
                  from outbox.held_key as k
                  where v_held
                    and k.lane = l.lane
                    and k.head_id is null
                  limit 1
              )
          );
    loop
        fetch v_candidates into v_candidate;
        exit when not found or v_lanes >= 16 or cardinality(v_ids) >= claim_batch.batch_size or v_bytes >= claim_batch.max_bytes;
        if v_candidate.leased and not v_candidate.relay = any (v_gone) then
            continue when v_candidate.relay = any (v_alive);
            -- (The session that holds the lock would be granted it again, so it does not ask.)
            if outbox._holds(v_candidate.relay) or not pg_try_advisory_xact_lock_shared(v_candidate.relay) then
                v_alive := v_alive || v_candidate.relay;
                continue;
            end if;
            v_gone := v_gone || v_candidate.relay;
        end if;

        select x.*
        into v_lane
        from outbox.lane as x
        where x.lane = v_candidate.lane
        order by x.version desc
        limit 1
        for update skip locked;
        continue when not found;
        if v_lane.leased_until > clock_timestamp() then
            if v_lane.relay = any (v_gone) and v_lane.leased_until > v_now + interval '3 s' then
                update outbox.lane as x
                set version = x.version + 1,
                    leased_until = v_now + interval '3 s'
                where x.lane = v_lane.lane
                  and x.version = v_lane.version;
            end if;
            continue;
        end if;

        if v_lane.relay is not null then
            v_lane := outbox._take_over(v_lane);
        end if;
        if v_lane.suspects <> '{}' then
            continue when v_ids <> '{}' or outbox._has_lanes(claim_batch.relay);
            v_part := outbox._take_suspects(v_lane, claim_batch.batch_size, claim_batch.max_bytes, v_now);
        else
            -- Read under the lane's lock: the sweep, when it voids the proof, takes that lock as well.
            v_safe_id := (select h.safe_id from outbox.horizon as h order by h.version desc limit 1);
            v_quota := claim_batch.batch_size - cardinality(v_ids);
            v_part := outbox._take(v_lane, v_quota, claim_batch.max_bytes - v_bytes, v_ids = '{}', v_now, v_due, v_safe_id);
        end if;

        update outbox.lane as x
        set version = x.version + 1,
            floor = case when v_part.ids = '{}' then greatest(x.floor, v_part.reach + 1) else x.floor end,
            reach = v_part.reach,
            token = case when v_part.ids <> '{}' then claim_batch.token end,
            relay = case when v_part.ids <> '{}' then claim_batch.relay end,
            leased_until = case when v_part.ids <> '{}' then v_now + claim_batch.lease end,
            handed = v_part.ids,
            suspects = v_part.suspects,
            trial = v_part.trial,
            kills = v_part.kills
        where x.lane = v_lane.lane
          and x.version = v_lane.version;

        -- The next claim begins behind the last lane served, so that one which follows empty lanes gets no more turns than
        -- others; but at the first one that found no room.
        if not v_waits then
            v_waits := v_part.ids = '{}' and v_ids <> '{}';
            v_next := v_lane.lane + (not v_waits)::integer;
        end if;
        v_ids := v_ids || v_part.ids;
        v_tids := v_tids || v_part.tids;
        v_bytes := v_bytes + v_part.bytes;
        v_lanes := v_lanes + 1;
        exit when v_part.suspects <> '{}' and v_part.ids <> '{}';
    end loop;
    close v_candidates;
    -- Not when this one began with a suspect: going back to it each time would starve the lanes before it.
    if v_suspect is null and v_next <> v_turn + 1 then
        perform setval('outbox.lane_turn', v_next + 63);
    end if;

    -- A full batch may have left some behind whose time has come: then the next claim looks as well.
    if v_look_due and v_lanes > 0 and cardinality(v_ids) < claim_batch.batch_size then
        update outbox.horizon as h
        set version = h.version + 1,
            due_checked_at = v_now
        where h.version = (
            select x.version
            from outbox.horizon as x
            order by x.version desc
            limit 1
            for update skip locked
        );
    end if;

    -- This commit is the fence between an emit with synchronous_commit = off and its publishing. It need not sync when all
    -- that it hands out was on disk as it began: the usual case when little happens. For many messages asking costs more.
    -- (A set clause of the function would have ended before the commit.)
    if current_setting('synchronous_commit') in ('off', 'local', 'remote_write')
       and (not v_synced
            or cardinality(v_tids) > 20
            or current_setting('synchronous_standby_names') <> ''
            or exists (select from outbox.message as m where m.ctid = any (v_tids) and age(m.xmin) <= age(v_ended)))
    then
        perform set_config('synchronous_commit', 'on', true);
    end if;

    -- By place, not by id: in lanes that we hold no row moves, and 500 walks down the primary key are saved.
    v_exchange := outbox._value_of('default_exchange');
    return query
    select
        m.id, m.message_id, coalesce(m.exchange, v_exchange), m.routing_key, m.key, m.body, m.content_type, m.headers, m.properties,
        m.expires_at - v_now, m.attempts, m.created_at
    from unnest(v_tids) with ordinality as i (tid, n)
    join outbox.message as m
        on m.ctid = i.tid
    order by i.n;
end
$function$;

comment on function outbox.claim_batch(uuid, integer, interval, bigint, bigint) is
    'Leases free lanes to the token and returns their next messages in the order to publish them. Settle them before the lease ends.';

create function outbox._has_lanes(relay bigint)
    returns boolean
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    return exists (
        select
        from outbox._lanes() as l
        where l.relay = _has_lanes.relay
          and l.leased_until > clock_timestamp()
    );
end
$function$;

comment on function outbox._has_lanes(bigint) is
    'Whether a relay has messages in its hands; false for one that did not say hello().';

create function outbox._take_over(lane outbox.lane)
    returns outbox.lane
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_lane outbox.lane := _take_over.lane;
begin
    -- A lease that ran out accuses nobody while its holder's session lives: that relay is slow, not dead.
    -- (The session that holds the lock would be granted it again, so it does not ask.)
    if outbox._holds(v_lane.relay) or not pg_try_advisory_xact_lock_shared(v_lane.relay) then
        return v_lane;
    end if;
    update outbox.lane as l
    set version = l.version + 1,
        token = null,
        relay = null,
        leased_until = null,
        handed = '{}',
        suspects = l.handed,
        -- By halves a culprit among 500 is alone after 9 deaths, and 500 innocent ones are through after two claims.
        trial = (cardinality(l.handed) + 1) / 2,
        kills = case when l.handed = l.suspects[1:1] then l.kills + 1 else 0 end
    where l.lane = v_lane.lane
      and l.version = v_lane.version
    returning l.*
    into v_lane;
    return v_lane;
end
$function$;

comment on function outbox._take_over(outbox.lane) is
    'Frees a lane whose lease has ended; if its relay died, what was in hand is suspected.';

create function outbox._take_suspects(lane outbox.lane, quota integer, room bigint, at timestamptz)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part outbox._part;
begin
    v_part.ids := '{}';
    v_part.tids := '{}';
    v_part.bytes := 0;
    v_part.reach := (_take_suspects.lane).floor - 1;
    v_part.trial := (_take_suspects.lane).trial;
    perform outbox._bury_expired((_take_suspects.lane).suspects, _take_suspects.at);
    v_part.suspects := array(
        select s.id
        from unnest((_take_suspects.lane).suspects) with ordinality as s (id, n)
        join outbox.message as m
            on m.id = s.id
        left join outbox.held_key as k
            on k.lane = m.lane
            and k.key = m.key
        -- as _take() would: ready or due and not behind a failing one, or held behind one that is out of the way
        where case m.due_at
            when 'infinity' then k.key is not null and k.head_id is null
            else (m.due_at is null or m.due_at <= _take_suspects.at)
                 and (k.key is null or k.head_id >= m.id)
        end
        order by s.n
        for update of m skip locked
    );
    v_part.kills := case when v_part.suspects = (_take_suspects.lane).suspects then (_take_suspects.lane).kills else 0 end;
    if v_part.kills >= 5 then
        perform outbox._bury(v_part.suspects, array['killed_relay'], array['the relay died with it 5 times, nothing else in its hands'], 0);
        v_part.suspects := '{}';
        v_part.kills := 0;
    end if;
    return outbox._admit(v_part, v_part.suspects[:least(_take_suspects.quota, v_part.trial)], true, _take_suspects.room, true);
end
$function$;

comment on function outbox._take_suspects(outbox.lane, integer, bigint, timestamptz) is
    'Some of the messages that may have killed their relay; one that did so five times, alone, is dead.';

create function outbox._take(
    lane     outbox.lane,
    quota    integer,
    room     bigint,
    first    boolean,
    at       timestamptz,
    look_due boolean,
    safe_id  bigint
)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_lane       smallint := (_take.lane).lane;
    v_floor      bigint := (_take.lane).floor;
    v_part       outbox._part;
    v_keys       boolean;
    v_key        text;
    v_ids        bigint[];
    v_tids       tid[];
    v_behind     bigint[];
    v_quota      integer;
    v_chunk      integer;
    v_read       bigint;
    v_last       bigint;
    v_bytes      bigint;
    v_expired    boolean;
    v_first_left bigint;
    v_reach      bigint;
begin
    v_part.ids := '{}';
    v_part.tids := '{}';
    v_part.bytes := 0;
    v_part.reach := v_floor - 1;
    v_part.suspects := '{}';
    v_part.trial := 0;
    v_part.kills := 0;
    v_keys := exists (select from outbox.held_key as k where k.lane = v_lane);

    if _take.look_due then
        select array_agg(d.id order by d.due_at, d.id)
        into v_ids
        from (
            select m.id, m.due_at
            from outbox.message as m
            where m.lane = v_lane
              and m.due_at is not null
              and m.due_at <> 'infinity'
              and m.due_at <= _take.at
            order by m.due_at, m.id
            limit _take.quota
            for update skip locked
        ) as d;
        if v_ids is not null then
            v_keys := outbox._bury_expired(v_ids, _take.at) or v_keys;
            if v_keys then
                update outbox.message as m
                set due_at = 'infinity'
                from outbox.held_key as k
                where m.id = any (v_ids)
                  and k.lane = v_lane
                  and k.key = m.key
                  and (k.head_id is null or k.head_id < m.id);
            end if;
            v_part := outbox._admit(v_part, v_ids, false, _take.room, _take.first);
        end if;
    end if;

    -- Keys whose head is out of the way: what was held behind it leaves in order, before anything newer.
    if v_keys then
        for v_key in
            select k.key
            from outbox.held_key as k
            where k.lane = v_lane
              and k.head_id is null
            order by k.key
        loop
            exit when cardinality(v_part.ids) >= _take.quota or v_part.bytes >= _take.room;
            select array_agg(h.id order by h.id)
            into v_ids
            from (
                select m.id
                from outbox.message as m
                where m.lane = v_lane
                  and m.key = v_key
                  and m.due_at = 'infinity'
                order by m.id
                limit _take.quota - cardinality(v_part.ids)
            ) as h;
            if v_ids is null then
                delete from outbox.held_key as k
                where k.lane = v_lane
                  and k.key = v_key;
                continue;
            end if;
            -- One that is being cancelled stops those behind it, in case the cancel is rolled back.
            with locked as (
                select m.id
                from outbox.message as m
                where m.id = any (v_ids)
                for update skip locked
            )
            select array_agg(i.id order by i.id)
            into v_ids
            from unnest(v_ids) as i (id)
            where i.id < all (
                select x.id
                from unnest(v_ids) as x (id)
                where x.id not in (select locked.id from locked)
            );
            -- Burying one may have parked the key.
            continue when outbox._bury_expired(v_ids, _take.at);
            v_part := outbox._admit(v_part, v_ids, true, _take.room, _take.first);
        end loop;
    end if;

    v_quota := _take.quota - cardinality(v_part.ids);
    v_chunk := v_quota;
    v_reach := v_floor - 1;
    for i in 1..10 loop
        exit when v_quota = 0 or v_part.bytes >= _take.room;
        select
            array_agg(r.id) filter (where not r.behind),
            array_agg(r.ctid) filter (where not r.behind),
            array_agg(r.id) filter (where r.behind),
            count(*),
            max(r.id),
            sum(r.bytes) filter (where not r.behind),
            bool_or(r.expires_at <= _take.at) filter (where not r.behind)
        into v_ids, v_tids, v_behind, v_read, v_last, v_bytes, v_expired
        from (
            select
                m.id,
                m.ctid,
                octet_length(m.body) as bytes,
                m.expires_at,
                v_keys and m.key is not null and exists (
                    select
                    from outbox.held_key as k
                    where k.lane = m.lane
                      and k.key = m.key
                      and (k.head_id is null or k.head_id < m.id)
                ) as behind
            from outbox.message as m
            where m.lane = v_lane
              and m.due_at is null
              and m.id > v_reach
            order by m.id
            limit v_chunk
        ) as r;
        if v_expired then
            -- Burying may have parked a key: read again. What somebody has locked by hand stops us.
            exit when not outbox._bury_expired(v_ids, _take.at);
            v_keys := true;
            continue;
        end if;
        if v_behind is not null then
            -- Ready messages of a held key join the others behind its head: one update each, once.
            update outbox.message as m
            set due_at = 'infinity'
            where m.id = any (v_behind);
        end if;
        if cardinality(v_ids) > v_quota then
            v_last := v_ids[v_quota];
            v_read := v_chunk;
            v_ids := v_ids[:v_quota];
            v_tids := v_tids[:v_quota];
        end if;
        if v_bytes > _take.room - v_part.bytes then
            v_part := outbox._admit(v_part, v_ids, true, _take.room, _take.first);
            v_first_left := (select min(i.id) from unnest(v_ids) as i (id) where i.id <> all (v_part.ids));
        elsif v_ids is not null then
            v_part.ids := v_part.ids || v_ids;
            v_part.tids := v_part.tids || v_tids;
            v_part.bytes := v_part.bytes + v_bytes;
        end if;
        -- Everything ready up to here is in our hands or out of the way.
        v_reach := case
            when v_first_left is not null then v_first_left - 1
            when v_read < v_chunk then 9223372036854775807
            else v_last
        end;
        exit when v_ids is not null or v_read < v_chunk;
        -- All had to go behind, and there may be many more: faster. And from the start: what a claim hands out it has seen at
        -- one look, because between two a message may be committed that lies before what the first has read, and another of
        -- its key behind that.
        v_chunk := greatest(v_quota, 1000);
        v_reach := v_floor - 1;
    end loop;
    -- Only what is proven may raise the floor later.
    v_part.reach := greatest(v_part.reach, least(coalesce(_take.safe_id, 0), v_reach));
    return v_part;
end
$function$;

comment on function outbox._take(outbox.lane, integer, bigint, boolean, timestamptz, boolean, bigint) is
    'The next messages of a lane that the caller has locked: due ones, then those behind a freed key, then ready ones.';

create function outbox._bury_expired(ids bigint[], at timestamptz)
    returns boolean
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_expired bigint[];
begin
    select array_agg(e.id)
    into v_expired
    from (
        select m.id
        from outbox.message as m
        where m.id = any (_bury_expired.ids)
          and m.expires_at <= _bury_expired.at
        for update skip locked
    ) as e;
    if v_expired is null then
        return false;
    end if;
    perform outbox._bury(v_expired, array_fill('expired'::text, array[cardinality(v_expired)]), null, 0);
    return true;
end
$function$;

comment on function outbox._bury_expired(bigint[], timestamptz) is
    'Moves those messages to dead_letter whose life is over; true if there were any.';

create function outbox._admit(part outbox._part, ids bigint[], held_too boolean, room bigint, first boolean)
    returns outbox._part
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_part  outbox._part := _admit.part;
    v_ids   bigint[];
    v_tids  tid[];
    v_bytes bigint;
begin
    select array_agg(r.id order by r.n), array_agg(r.ctid order by r.n), sum(r.bytes)
    into v_ids, v_tids, v_bytes
    from (
        select
            i.id,
            i.n,
            m.ctid,
            octet_length(m.body) as bytes,
            v_part.bytes + sum(octet_length(m.body)) over w <= _admit.room
                or _admit.first and v_part.ids = '{}' and row_number() over w = 1 as fits
        from unnest(_admit.ids) with ordinality as i (id, n)
        join outbox.message as m
            on m.id = i.id
        where _admit.held_too
           or m.due_at <> 'infinity'
        window w as (order by i.n rows unbounded preceding)
    ) as r
    where r.fits;
    v_part.ids := v_part.ids || coalesce(v_ids, '{}');
    v_part.tids := v_part.tids || coalesce(v_tids, '{}');
    v_part.bytes := v_part.bytes + coalesce(v_bytes, 0);
    return v_part;
end
$function$;

comment on function outbox._admit(outbox._part, bigint[], boolean, bigint, boolean) is
    'Adds messages, held ones only if told so, to what a claim takes, as far as there is room.';

create function outbox.arm_wakeup()
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

create function outbox.disarm_wakeup()
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

create function outbox._bell_holders()
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

create function outbox.next_due()
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

-- CODE. Station 40: the broker has confirmed. And the floor: how far down a claim need not look.
-- Every settling call filters by token: a relay whose lane was taken over settles nothing of it any more.

create function outbox._advance_horizon()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_last    bigint;
    v_fresh   boolean;
    v_horizon outbox.horizon;
    v_before  bigint;
    v_xmin    xid8;
begin
    if exists (
        select
        from (select h.checked_at from outbox.horizon as h order by h.version desc limit 1) as h
        where h.checked_at > v_now - interval '20 ms'
    ) then
        return;
    end if;

    -- The sequence first, the xid after it: whoever drew an id up to v_last drew its xid before that, so it is older
    -- than ours. Locking the row draws ours; a transaction that has one already can prove nothing new.
    v_fresh := pg_current_xact_id_if_assigned() is null;
    v_last := coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
    select h.*
    into v_horizon
    from outbox.horizon as h
    order by h.version desc
    limit 1
    for update skip locked;
    if not found then
        return;
    end if;

    v_before := v_horizon.safe_id;
    v_xmin := pg_snapshot_xmin(pg_current_snapshot());
    if v_horizon.pending_xid <= v_xmin then
        v_horizon.safe_id := greatest(v_horizon.safe_id, v_horizon.pending_id);
        v_horizon.pending_id := null;
        v_horizon.pending_xid := null;
    end if;
    if v_horizon.noted_xids is not null and not outbox._any_in_progress(v_horizon.noted_xids) then
        v_horizon.safe_id := greatest(v_horizon.safe_id, v_horizon.noted_id);
        v_horizon.noted_id := null;
        v_horizon.noted_xids := null;
    end if;
    if v_horizon.safe_id > v_before then
        v_horizon.moved_at := v_now;
    end if;

    if v_horizon.pending_id is null and v_fresh then
        v_horizon.pending_id := v_last;
        v_horizon.pending_xid := pg_current_xact_id();
    end if;
    -- The xid proof waits for every transaction of the database server. When it stands still, ask only about those
    -- that can have drawn an id: they hold a lock on the table until they end.
    if v_horizon.noted_xids is null
       and v_horizon.safe_id < v_last
       and v_horizon.moved_at < v_now - interval '500 ms'
       and v_horizon.noted_at < v_now - interval '500 ms'
    then
        v_horizon.noted_id := v_last;
        v_horizon.noted_xids := outbox._emitter_xids();
        v_horizon.noted_at := v_now;
    end if;

    update outbox.horizon as h
    set version = h.version + 1,
        safe_id = v_horizon.safe_id,
        moved_at = v_horizon.moved_at,
        checked_at = v_now,
        pending_id = v_horizon.pending_id,
        pending_xid = v_horizon.pending_xid,
        noted_id = v_horizon.noted_id,
        noted_xids = v_horizon.noted_xids,
        noted_at = v_horizon.noted_at
    where h.version = v_horizon.version;
end
$function$;

comment on function outbox._advance_horizon() is
    'Moves on the id up to which every transaction that drew one has ended. Called first by whatever settles.';

create function outbox._any_in_progress(xids xid8[])
    returns boolean
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select exists (
        select
        from unnest(_any_in_progress.xids) as x (xid)
        where case when x.xid < pg_snapshot_xmax(pg_current_snapshot()) then pg_xact_status(x.xid) = 'in progress' else true end
    );
$function$;

comment on function outbox._any_in_progress(xid8[]) is
    'Whether one of these transactions is still open, prepared ones included.';

create function outbox._emitter_xids()
    returns xid8[]
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_xids xid8[] := '{}';
begin
    -- Twice, because PREPARE TRANSACTION moves a transaction's locks one after the other to another owner (with the same
    -- virtual id): one look may miss one of them in the middle, two cannot.
    for i in 1..2 loop
        v_xids := v_xids || array(
            select outbox._widen(x.transactionid::text::bigint)
            from pg_locks as r
            join pg_locks as x
                on x.virtualtransaction = r.virtualtransaction
            where r.locktype = 'relation'
              and r.database = (select d.oid from pg_database as d where d.datname = current_database())
              and r.relation = 'outbox.message'::regclass
              and r.mode = 'RowExclusiveLock'
              and x.locktype = 'transactionid'
              and x.mode = 'ExclusiveLock'
              and x.granted
              and x.transactionid <> coalesce(pg_current_xact_id_if_assigned()::xid, '0')
        );
    end loop;
    return v_xids;
end
$function$;

comment on function outbox._emitter_xids() is
    'Open transactions, prepared ones included, that may have drawn a message id.';

create function outbox.mark_sent(token uuid, ids bigint[])
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_now timestamptz := clock_timestamp();
    v_ids bigint[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if mark_sent.token is null or mark_sent.ids is null then
        perform outbox._refuse('OB001', 'token and ids must not be null', 'Pass the token of the claim and the ids that were confirmed.');
    end if;
    perform outbox._advance_horizon();

    v_ids := outbox._held_by(mark_sent.token, mark_sent.ids);
    if v_ids = '{}' then
        return 0;
    end if;
    -- A failing message that got through at last: its key may go on.
    perform outbox._free_keys(array(select l.lane from outbox.lane as l where l.token = mark_sent.token), v_ids);
    if exists (select from outbox.setting as s where s.name = 'retention' and s.value <> 'delete') then
        perform outbox._archive(v_ids, v_now);
    end if;
    -- For stats(). Looking at every message would cost half as much again as deleting it: three stand for all.
    insert into outbox.tally (settled_at, first_id, sent, took, worst)
    select v_now, v_ids[1], cardinality(v_ids), avg(s.took) * cardinality(v_ids), max(s.took)
    from (
        select v_now - case when m.due_at is null or m.due_at = 'infinity' or m.attempts > 0 then m.created_at else m.due_at end as took
        from outbox.message as m
        where m.id in (v_ids[1], v_ids[(cardinality(v_ids) + 1) / 2], v_ids[cardinality(v_ids)])
    ) as s
    having count(*) > 0;
    delete from outbox.message as m
    where m.id = any (v_ids);
    perform outbox._settle(mark_sent.token, v_ids);
    return cardinality(v_ids);
end
$function$;

comment on function outbox.mark_sent(uuid, bigint[]) is
    'Settles messages the broker has confirmed; returns how many. Fewer than given: the lease was lost, or they were settled before.';

create function outbox._archive(ids bigint[], at timestamptz)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    insert into outbox.archive (
        id, sent_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, attempts,
        emitted_by, dedup_key, body
    )
    select
        m.id, _archive.at, m.message_id, m.exchange, m.routing_key, m.key, m.content_type, m.headers, m.properties, m.created_at,
        m.expires_at, m.attempts, m.emitted_by, m.dedup_key, m.body
    from outbox.message as m
    where m.id = any (_archive.ids);
end
$function$;

comment on function outbox._archive(bigint[], timestamptz) is
    'Copies messages that were sent to the archive.';

create function outbox._held_by(token uuid, ids bigint[])
    returns bigint[]
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_handed bigint[];
begin
    -- In the order of lanes, as everybody locks them.
    select array_agg(h.id)
    into v_handed
    from (
        select l.handed
        from outbox.lane as l
        where l.token = _held_by.token
        order by l.lane
        for update
    ) as l
    cross join lateral unnest(l.handed) as h (id);
    -- A relay settles its whole batch, as it was handed out, nearly always.
    if v_handed = _held_by.ids then
        return v_handed;
    end if;
    return array(
        select h.id
        from unnest(v_handed) as h (id)
        where h.id in (select i.id from unnest(_held_by.ids) as i (id))
    );
end
$function$;

comment on function outbox._held_by(uuid, bigint[]) is
    'Locks the lanes of a token and returns those of the ids that they handed out and that are not settled.';

create function outbox._settle(token uuid, ids bigint[])
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    with rest as materialized (
        select
            x.lane,
            case
                when x.handed = _settle.ids then '{}'
                else array(select h.id from unnest(x.handed) as h (id) where h.id not in (select i.id from unnest(_settle.ids) as i (id)))
            end as handed
        from outbox.lane as x
        where x.token = _settle.token
    )
    update outbox.lane as l
    set version = l.version + 1,
        floor = case when r.handed = '{}' then greatest(l.floor, l.reach + 1) else l.floor end,
        token = case when r.handed <> '{}' then l.token end,
        relay = case when r.handed <> '{}' then l.relay end,
        leased_until = case when r.handed <> '{}' then l.leased_until end,
        handed = r.handed,
        kills = case when l.suspects[1] = any (_settle.ids) then 0 else l.kills end,
        suspects = case
            when l.suspects = '{}' then l.suspects
            else array(select s.id from unnest(l.suspects) with ordinality as s (id, n) where s.id <> all (_settle.ids) order by s.n)
        end
    from rest as r
    where l.lane = r.lane
      and l.token = _settle.token;
end
$function$;

comment on function outbox._settle(uuid, bigint[]) is
    'Strikes ids off the lanes of a token; a lane with nothing left is free and its floor follows.';

create function outbox.release_batch(token uuid)
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_released integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if release_batch.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass the token of the claim.');
    end if;
    perform outbox._advance_horizon();

    perform
    from outbox.lane as l
    where l.token = release_batch.token
    order by l.lane
    for update;
    with released as (
        update outbox.lane as l
        set version = l.version + 1,
            -- The floor stops at the first message given back.
            floor = greatest(l.floor, least(l.reach + 1, r.first_ready)),
            token = null,
            relay = null,
            leased_until = null,
            handed = '{}'
        from (
            select
                x.lane,
                cardinality(x.handed) as open,
                (select min(m.id) from outbox.message as m where m.id = any (x.handed) and m.due_at is null) as first_ready
            from outbox.lane as x
            where x.token = release_batch.token
        ) as r
        where l.lane = r.lane
          and l.token = release_batch.token
        returning r.open
    )
    select coalesce(sum(released.open), 0)
    into v_released
    from released;
    return v_released;
end
$function$;

comment on function outbox.release_batch(uuid) is
    'Gives back what is unfinished of a claim, counting no attempt; returns how many messages.';

create function outbox.extend_lease(token uuid, lease interval)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_relay bigint := nullif(current_setting('outbox.relay', true), '')::bigint;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if extend_lease.token is null then
        perform outbox._refuse('OB001', 'token must not be null', 'Pass the token of the claim.');
    end if;
    if (extend_lease.lease between interval '1 second' and interval '1 hour') is not true then
        perform outbox._refuse('OB011', 'lease must lie between 1 second and 1 hour', 'Pass what claim_batch() was called with.');
    end if;

    perform
    from outbox.lane as l
    where l.token = extend_lease.token
    order by l.lane
    for update;
    update outbox.lane as l
    set version = l.version + 1,
        leased_until = clock_timestamp() + extend_lease.lease,
        -- A relay that came back with a new session answers for its lanes with that one.
        relay = case when l.relay is not null and v_relay is not null then v_relay else l.relay end
    where l.token = extend_lease.token;
    return found;
end
$function$;

comment on function outbox.extend_lease(uuid, interval) is
    'Holds a claim for longer, from now. False: nothing is held under this token any more.';

create function outbox.wait_sent(id bigint, timeout interval)
    returns boolean
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_until timestamptz := clock_timestamp() + wait_sent.timeout;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if wait_sent.id is null then
        perform outbox._refuse('OB001', 'id must not be null', 'Pass the id that emit() returned.');
    end if;
    -- Whoever waits in a function pins the snapshot horizon of the whole server.
    if (wait_sent.timeout between interval '0' and interval '10 s') is not true then
        perform outbox._refuse('OB011', 'timeout must lie between 0 and 10 seconds', 'Call it again to wait for longer.');
    end if;

    loop
        if exists (select from outbox.dead_letter as d where d.id = wait_sent.id) then
            return false;
        end if;
        if not exists (select from outbox.message as m where m.id = wait_sent.id) then
            return wait_sent.id between 1 and coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
        end if;
        exit when clock_timestamp() >= v_until;
        perform pg_sleep(least(0.02, extract(epoch from v_until - clock_timestamp())));
    end loop;
    return false;
end
$function$;

comment on function outbox.wait_sent(bigint, interval) is
    'Waits until a committed message has been sent: true. False: the time is over, or it is dead, or it was never emitted.';

-- CODE. Station 45: the broker has refused. Back-off, dead letters, and the way back from there.
-- A message that failed waits in due_at and holds its key: what follows it waits behind it, in order.

create function outbox._backoff(attempts integer)
    returns interval
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_base       double precision := extract(epoch from outbox._value_of('retry_base')::interval);
    v_multiplier double precision := outbox._value_of('retry_multiplier')::double precision;
    v_cap        double precision := extract(epoch from outbox._value_of('retry_cap')::interval);
    v_jitter     double precision := outbox._value_of('retry_jitter')::double precision;
begin
    -- Compared as logarithms: the power itself overflows long before attempts does.
    if ln(v_base) + _backoff.attempts * ln(v_multiplier) < ln(v_cap) then
        v_cap := v_base * power(v_multiplier, _backoff.attempts);
    end if;
    return make_interval(secs => v_cap * (1 + v_jitter * (2 * random() - 1)));
end
$function$;

comment on function outbox._backoff(integer) is
    'How long to wait after a failure with this many before it: base * multiplier^n, capped, then jittered.';

create function outbox._bury(ids bigint[], reasons text[], errors text[], attempt integer)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_park  boolean := outbox._value_of('on_dead') = 'park';
    v_lanes smallint[];
begin
    with gone as (
        delete from outbox.message as m
        where m.id = any (_bury.ids)
        returning m.*
    ),
    buried as (
        insert into outbox.dead_letter (
            id, dead_at, reason, error, lane, message_id, exchange, routing_key, key, content_type, headers, properties, created_at,
            expires_at, attempts, emitted_by, dedup_key, parked, body
        )
        select
            g.id, clock_timestamp(), d.reason, coalesce(left(d.error, 1000), g.error), g.lane, g.message_id, g.exchange, g.routing_key,
            g.key, g.content_type, g.headers, g.properties, g.created_at, g.expires_at, g.attempts + _bury.attempt, g.emitted_by,
            g.dedup_key, v_park and g.key is not null, g.body
        from gone as g
        join unnest(_bury.ids, _bury.reasons, _bury.errors) as d (id, reason, error)
            on d.id = g.id
        returning id, lane, key, parked
    ),
    parked as (
        insert into outbox.held_key as k (lane, key, head_id)
        select b.lane, b.key, min(b.id)
        from buried as b
        where b.parked
        group by b.lane, b.key
        on conflict on constraint held_key_pkey do update
            set head_id = least(k.head_id, excluded.head_id)
    )
    select array_agg(distinct b.lane)
    into v_lanes
    from buried as b;
    if not v_park then
        perform outbox._free_keys(v_lanes, _bury.ids);
    end if;
end
$function$;

comment on function outbox._bury(bigint[], text[], text[], integer) is
    'Moves messages to dead_letter; their keys go on or are parked, as the setting on_dead says.';

create function outbox._free_keys(lanes smallint[], heads bigint[])
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if not exists (select from outbox.held_key as k where k.lane = any (_free_keys.lanes)) then
        return;
    end if;
    -- The next obstacle may be a message of the key that died behind this one, and was parked.
    update outbox.held_key as k
    set head_id = (
        select min(d.id)
        from outbox.dead_letter as d
        where d.lane = k.lane
          and d.key = k.key
          and d.parked
    )
    where k.lane = any (_free_keys.lanes)
      and k.head_id in (select h.id from unnest(_free_keys.heads) as h (id));
end
$function$;

comment on function outbox._free_keys(smallint[], bigint[]) is
    'Lets the keys in these lanes go on that waited for one of these messages.';

create function outbox.mark_failed(
    token    uuid,
    ids      bigint[],
    errors   text[],
    reasons  text[]     = null,
    retry_in interval[] = null,
    counts   boolean    = true,
    dead     boolean    = false
)
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
    set enable_bitmapscan = off
    set plan_cache_mode = force_generic_plan
as $function$
declare
    v_now     timestamptz := clock_timestamp();
    v_ids     bigint[];
    v_most    integer := outbox._value_of('max_attempts')::integer;
    v_dead    bigint[];
    v_reasons text[];
    v_errors  text[];
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if mark_failed.token is null or mark_failed.ids is null or mark_failed.errors is null
       or mark_failed.counts is null or mark_failed.dead is null
    then
        perform outbox._refuse('OB001', 'token, ids, errors, counts and dead must not be null', 'Pass the token of the claim, the ids that failed and an error for each.');
    end if;
    if cardinality(mark_failed.errors) <> cardinality(mark_failed.ids)
       or cardinality(mark_failed.reasons) <> cardinality(mark_failed.ids)
       or cardinality(mark_failed.retry_in) <> cardinality(mark_failed.ids)
    then
        perform outbox._refuse('OB013', 'ids, errors, reasons and retry_in must have the same length', 'Pass one element for each id; null stands for none.');
    end if;
    if exists (
        select
        from unnest(mark_failed.reasons) as r (reason)
        where r.reason not in ('max_attempts', 'unroutable', 'rejected', 'expired', 'killed_relay')
    ) then
        perform outbox._refuse('OB014', 'reasons contains an unknown reason', 'Reasons are max_attempts, unroutable, rejected, expired and killed_relay.');
    end if;
    if exists (select from unnest(mark_failed.retry_in) as r (retry_in) where r.retry_in not between interval '0' and interval '10 years') then
        perform outbox._refuse('OB011', 'retry_in must lie between 0 and 10 years', 'Pass null for the usual back-off.');
    end if;
    perform outbox._advance_horizon();

    v_ids := outbox._held_by(mark_failed.token, mark_failed.ids);
    if v_ids = '{}' then
        return 0;
    end if;

    select array_agg(d.id), array_agg(coalesce(d.reason, 'max_attempts')), array_agg(d.error)
    into v_dead, v_reasons, v_errors
    from (
        select distinct on (f.id) f.id, f.reason, f.error
        from unnest(mark_failed.ids, mark_failed.errors, mark_failed.reasons) as f (id, error, reason)
        join outbox.message as m
            on m.id = f.id
        where f.id = any (v_ids)
          and (f.reason in ('rejected', 'expired') or mark_failed.dead or mark_failed.counts and m.attempts + 1 >= v_most)
    ) as d;
    if v_dead is not null then
        perform outbox._bury(v_dead, v_reasons, v_errors, mark_failed.counts::integer);
    end if;

    -- The first failing message of a key becomes its head; the others of the key wait behind it.
    with failed as (
        select m.id, m.lane, m.key
        from outbox.message as m
        where m.id = any (v_ids)
          and m.key is not null
    ),
    before as (
        select k.lane, k.key, k.head_id
        from outbox.held_key as k
        where (k.lane, k.key) in (select f.lane, f.key from failed as f)
    ),
    after as (
        insert into outbox.held_key as k (lane, key, head_id)
        select f.lane, f.key, min(f.id)
        from failed as f
        group by f.lane, f.key
        on conflict on constraint held_key_pkey do update
            set head_id = least(k.head_id, excluded.head_id)
        returning k.lane, k.key, k.head_id
    )
    update outbox.message as m
    set due_at = 'infinity'
    from before as b
    join after as a
        on a.lane = b.lane
        and a.key = b.key
    where m.id = b.head_id
      and a.head_id < b.head_id;
    -- Others of the key that are in the same hands and unsettled: should they come back, older ones go before the new
    -- head, younger ones stand in line behind it, among those that failed.
    update outbox.message as m
    set due_at = case when m.id < k.head_id then v_now else 'infinity' end
    from outbox.held_key as k
    where m.id in (
          select h.id
          from outbox.lane as l
          cross join lateral unnest(l.handed) as h (id)
          where l.token = mark_failed.token
      )
      and m.id <> all (v_ids)
      and k.lane = m.lane
      and k.key = m.key
      and k.head_id = any (v_ids);

    update outbox.message as m
    set attempts = m.attempts + mark_failed.counts::integer,
        error = coalesce(left(f.error, 1000), m.error),
        due_at = case
            when m.key is not null and not exists (
                select
                from outbox.held_key as k
                where k.lane = m.lane
                  and k.key = m.key
                  and k.head_id = m.id
            ) then 'infinity'
            else v_now + coalesce(f.retry_in, outbox._backoff(m.attempts))
        end
    from unnest(
        mark_failed.ids, mark_failed.errors,
        coalesce(mark_failed.retry_in, array_fill(null::interval, array[cardinality(mark_failed.ids)]))
    ) as f (id, error, retry_in)
    where m.id = f.id
      and f.id = any (v_ids);

    perform outbox._settle(mark_failed.token, v_ids);
    return cardinality(v_ids);
end
$function$;

comment on function outbox.mark_failed(uuid, bigint[], text[], text[], interval[], boolean, boolean) is
    'Settles messages the broker refused: each is retried after a back-off, or dead. counts => false: no attempt is counted, for what is not the message''s fault. dead => true: none is retried. Returns how many; fewer than given as for mark_sent().';

create function outbox.dead_among(ids bigint[])
    returns table (id bigint, reason text)
    language plpgsql
    stable
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if dead_among.ids is null then
        perform outbox._refuse('OB001', 'ids must not be null', 'Pass ids of messages.');
    end if;
    return query
        select d.id, d.reason
        from outbox.dead_letter as d
        where d.id = any (dead_among.ids);
end
$function$;

comment on function outbox.dead_among(bigint[]) is
    'Which of these messages are dead, and why: for a relay that tells others.';

create function outbox.requeue_dead(ids bigint[])
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_now      timestamptz := clock_timestamp();
    v_requeued integer;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if requeue_dead.ids is null then
        perform outbox._refuse('OB001', 'ids must not be null', 'Pass ids of outbox.dead_letter.');
    end if;
    with gone as (
        delete from outbox.dead_letter as d
        where d.id = any (requeue_dead.ids)
        returning d.*
    )
    insert into outbox.message (
        id, lane, due_at, message_id, exchange, routing_key, key, content_type, headers, properties, created_at, expires_at, attempts,
        emitted_by, dedup_key, error, body
    )
    select
        -- due now, never ready: the lane's floor may have passed its id
        g.id, g.lane, v_now, g.message_id, g.exchange, g.routing_key, g.key, g.content_type, g.headers, g.properties, g.created_at,
        v_now + (g.expires_at - g.created_at), 0, g.emitted_by, g.dedup_key, g.error, g.body
    from gone as g;
    get diagnostics v_requeued = row_count;
    return v_requeued;
end
$function$;

comment on function outbox.requeue_dead(bigint[]) is
    'Puts dead letters back, due now, with no attempts counted; returns how many there were.';

create function outbox.purge_dead(older_than interval)
    returns integer
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    if purge_dead.older_than is null then
        perform outbox._refuse('OB001', 'older_than must not be null', 'Pass interval ''0'' to remove all dead letters.');
    end if;
    if purge_dead.older_than not between interval '0' and interval '100 years' then
        perform outbox._refuse('OB011', 'older_than must lie between 0 and 100 years', 'Pass interval ''0'' to remove all dead letters.');
    end if;
    return outbox._purge_dead(clock_timestamp() - purge_dead.older_than, null);
end
$function$;

comment on function outbox.purge_dead(interval) is
    'Removes dead letters that died longer ago than this; returns how many. Keys parked behind them go on.';

create function outbox._purge_dead(before timestamptz, most integer)
    returns integer
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_purged integer;
    v_lanes  smallint[];
    v_parked bigint[];
begin
    with gone as (
        delete from outbox.dead_letter as d
        where d.id in (
            select x.id
            from outbox.dead_letter as x
            where x.dead_at <= _purge_dead.before
            order by x.dead_at
            limit _purge_dead.most
            for update skip locked
        )
        returning d.id, d.lane, d.parked
    )
    select count(*), array_agg(distinct g.lane) filter (where g.parked), array_agg(g.id) filter (where g.parked)
    into v_purged, v_lanes, v_parked
    from gone as g;
    perform outbox._free_keys(v_lanes, v_parked);
    return v_purged;
end
$function$;

comment on function outbox._purge_dead(timestamptz, integer) is
    'Removes dead letters that died before a time, at most so many; keys parked behind them go on.';

-- CODE. Station 50: what has served its time goes, in bounded steps; and the sweep, which mistrusts the floors.

create function outbox.cleanup()
    returns outbox.cleanup_result
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_result       outbox.cleanup_result;
    v_dead_before  timestamptz;
    v_dedup_before timestamptz;
    v_sent_before  timestamptz;
    v_inbox_before timestamptz;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        perform outbox._refuse_isolation();
    end if;
    -- One at a time: the sweep takes a lock that lasts until the transaction ends.
    perform outbox._sweep();
    v_dead_before := clock_timestamp() - outbox._value_of('dead_retention')::interval;
    v_dedup_before := clock_timestamp() - outbox._value_of('dedup_window')::interval;
    v_sent_before := outbox._kept_since();
    v_inbox_before := clock_timestamp() - outbox._value_of('inbox_retention')::interval;
    v_result.dead_letters := outbox._purge_dead(v_dead_before, 10000);
    with gone as (
        delete from outbox.dedup as d
        where d.dedup_key in (
            select x.dedup_key
            from outbox.dedup as x
            where x.created_at <= v_dedup_before
            order by x.created_at
            limit 10000
            for update skip locked
        )
        returning d.dedup_key
    )
    select count(*)
    into v_result.dedup_keys
    from gone;
    with gone as (
        delete from outbox.archive_default as a
        where (a.id, a.sent_at) in (
            select x.id, x.sent_at
            from outbox.archive_default as x
            where x.sent_at < v_sent_before
            order by x.sent_at
            limit 10000
        )
        returning a.id
    )
    select count(*)
    into v_result.archive_rows
    from gone;
    with gone as (
        delete from outbox.inbox as i
        where (i.consumer, i.message_id) in (
            select x.consumer, x.message_id
            from outbox.inbox as x
            where x.accepted_at <= v_inbox_before
            order by x.accepted_at
            limit 10000
        )
        returning i.message_id
    )
    select count(*)
    into v_result.inbox_rows
    from gone;
    perform outbox._fold_tally();
    v_result.more := exists (select from outbox.dead_letter as d where d.dead_at <= v_dead_before)
                     or exists (select from outbox.dedup as d where d.created_at <= v_dedup_before)
                     or exists (select from outbox.archive_default as a where a.sent_at < v_sent_before)
                     or exists (select from outbox.inbox as i where i.accepted_at <= v_inbox_before);
    -- Last, because dropping a day keeps mark_sent() out of the archive until this transaction ends.
    perform outbox._make_days();
    v_result.archive_days := outbox._drop_days(v_sent_before, 10);
    -- A day that somebody uses is tried again in the next round, not at once: each try keeps mark_sent() waiting.
    v_result.more := v_result.more or v_result.archive_days = 10 and exists (select from outbox._days() as d where d.ends_at <= v_sent_before);
    return v_result;
end
$function$;

comment on function outbox.cleanup() is
    'Removes what is past its retention, at most 10,000 rows of a kind and ten days of the archive, makes the days to come and checks the floors; says what it removed and whether more remains.';

create function outbox._kept_since()
    returns timestamptz
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select case r.retention
        when 'forever' then '-infinity'
        when 'delete' then clock_timestamp()
        else clock_timestamp() - r.retention::interval
    end
    from (select outbox._value_of('retention') as retention) as r;
$function$;

comment on function outbox._kept_since() is
    'The archive keeps what was sent since then.';

create function outbox._days()
    returns table (name name, begins_at timestamptz, ends_at timestamptz)
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    select d.relname, d.day at time zone 'UTC', (d.day + interval '1 day') at time zone 'UTC'
    from (
        select c.relname, to_date(substring(c.relname from '^archive_([0-9]{8})$'), 'YYYYMMDD')::timestamp as day
        from pg_inherits as i
        join pg_class as c
            on c.oid = i.inhrelid
        where i.inhparent = 'outbox.archive'::regclass
          and c.relname ~ '^archive_[0-9]{8}$'
    ) as d;
$function$;

comment on function outbox._days() is
    'The days for which the archive has a partition.';

create function outbox._make_days()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    -- What a role may have set for itself must not decide where the table goes.
    set default_tablespace = ''
    set default_table_access_method = 'heap'
    set timezone = 'UTC'
    set datestyle = 'ISO'
    -- While somebody reads the archive no day is made: a later call does it.
    set lock_timeout = '100ms'
as $function$
declare
    v_day   timestamptz;
    v_name  name;
    v_other regrole;
begin
    if outbox._value_of('retention') = 'delete' then
        return;
    end if;
    -- Two would make the same day: whoever comes second, by the lock of the sweep, leaves it to the first.
    lock table outbox.relay in share update exclusive mode nowait;
    for v_day in
        select d.day
        from generate_series(date_trunc('day', clock_timestamp()), clock_timestamp() + interval '3 days', interval '1 day') as d (day)
        -- A day that was detached is there too.
        where to_regclass('outbox.archive_' || to_char(d.day, 'YYYYMMDD')) is null
          -- What the default partition holds of a day keeps that day from being made.
          and not exists (select from outbox.archive_default as a where a.sent_at >= d.day and a.sent_at < d.day + interval '1 day')
    loop
        v_name := 'archive_' || to_char(v_day, 'YYYYMMDD');
        execute format(
            'create table outbox.%I partition of outbox.archive for values from (%L) to (%L)', v_name, v_day, v_day + interval '1 day'
        );
        -- Rows come nearly in the order of id and time, so ranges of pages find them; a B-tree would make keeping a message a
        -- quarter dearer. Several ranges a summary, because a message that was retried comes late.
        execute format(
            'create index %I on outbox.%I using brin (id int8_minmax_multi_ops, sent_at) with (autosummarize = on)', v_name || '_sent', v_name
        );
        -- Default privileges of the owner leak to others.
        for v_other in
            select distinct g.grantee::regrole
            from pg_class as c
            cross join lateral aclexplode(c.relacl) as g
            where c.oid = format('outbox.%I', v_name)::regclass
              and g.grantee <> c.relowner
              and g.grantee <> 0
        loop
            execute format('revoke all on outbox.%I from %s', v_name, v_other);
        end loop;
        execute format('revoke all on outbox.%I from public', v_name);
    end loop;
exception
    -- A row of the day came in meanwhile, or the archive is being read or written: the default partition serves.
    when lock_not_available or check_violation then
        return;
end
$function$;

comment on function outbox._make_days() is
    'Makes the archive''s partitions for today and the next three days, unless nothing is kept.';

create function outbox._drop_days(before timestamptz, most integer)
    returns integer
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    -- Who reads the archive is not disturbed, and mark_sent() waits no longer than this behind us.
    set lock_timeout = '100ms'
as $function$
declare
    v_day     name;
    v_dropped integer := 0;
begin
    for v_day in
        select d.name
        from outbox._days() as d
        where d.ends_at <= _drop_days.before
        order by d.begins_at
        limit _drop_days.most
    loop
        begin
            execute format('drop table outbox.%I', v_day);
        exception
            when lock_not_available then
                exit;
        end;
        v_dropped := v_dropped + 1;
    end loop;
    return v_dropped;
end
$function$;

comment on function outbox._drop_days(timestamptz, integer) is
    'Drops the archive''s partitions that ended before a time, at most so many, oldest first; stops when somebody uses one.';

create function outbox._fold_tally()
    returns void
    language sql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
    with gone as (
        delete from outbox.tally as t
        where (t.settled_at, t.first_id) in (
            select x.settled_at, x.first_id
            from outbox.tally as x
            where x.settled_at < date_trunc('minute', clock_timestamp())
            order by x.settled_at
            limit 10000
        )
        returning t.*
    )
    insert into outbox.tally_minute as m (minute_at, until_at, sent, took, worst)
    select date_trunc('minute', g.settled_at), max(g.settled_at), sum(g.sent), sum(g.took), max(g.worst)
    from gone as g
    group by 1
    on conflict on constraint tally_minute_pkey do update
        set until_at = greatest(m.until_at, excluded.until_at),
            sent = m.sent + excluded.sent,
            took = m.took + excluded.took,
            worst = greatest(m.worst, excluded.worst);
    delete from outbox.tally_minute as m
    where m.minute_at < clock_timestamp() - interval '1 hour';
$function$;

comment on function outbox._fold_tally() is
    'Folds what mark_sent() noted before this minute into minutes, and forgets those older than an hour.';

create function outbox._sweep()
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
    set enable_seqscan = off
as $function$
declare
    v_horizon outbox.horizon;
    v_last    bigint := coalesce(pg_sequence_last_value('outbox.message_id_seq'), 0);
    v_low     record;
begin
    -- One sweep at a time: two would refill a lane twice. No advisory lock, which anybody who may connect could hold.
    lock table outbox.relay in share update exclusive mode;
    insert into outbox.lane (lane, version)
    select n, 0
    from generate_series(0, 63) as n
    where not exists (select from outbox.lane as l where l.lane = n::smallint);
    insert into outbox.horizon (version)
    select 0
    where not exists (select from outbox.horizon);

    select h.*
    into v_horizon
    from outbox.horizon as h
    order by h.version desc
    limit 1
    for update;
    if v_last < v_horizon.safe_id then
        -- The sequence was set back (restore, truncate, setval): every proof about ids is void.
        update outbox.horizon as h
        set version = h.version + 1,
            safe_id = 0,
            pending_id = null,
            pending_xid = null,
            noted_id = null,
            noted_xids = null
        where h.version = v_horizon.version;
        update outbox.lane as l
        set version = l.version + 1,
            floor = 0,
            reach = 0;
    elsif v_horizon.pending_xid > pg_current_xact_id()
          or exists (select from unnest(v_horizon.noted_xids) as x (xid) where x.xid > pg_current_xact_id())
    then
        -- Another cluster's transaction ids: they would never be reached, or mean somebody else.
        update outbox.horizon as h
        set version = h.version + 1,
            pending_id = null,
            pending_xid = null,
            noted_id = null,
            noted_xids = null
        where h.version = v_horizon.version;
    end if;

    for v_low in
        select l.lane, low.id
        from outbox._lanes() as l
        cross join lateral (
            select m.id
            from outbox.message as m
            where m.lane = l.lane
              and m.due_at is null
              and m.id < l.floor
            order by m.id
            limit 1
        ) as low
    loop
        update outbox.lane as l
        set version = l.version + 1,
            floor = least(l.floor, v_low.id),
            reach = least(l.reach, v_low.id - 1)
        where l.lane = v_low.lane;
        update outbox.horizon as h
        set version = h.version + 1,
            floor_repairs = h.floor_repairs + 1;
    end loop;

    -- What waits for a message that is nowhere any more, or whose key is not known as held, would wait for ever.
    update outbox.held_key as k
    set head_id = null
    where not exists (select from outbox.message as m where m.id = k.head_id)
      and not exists (select from outbox.dead_letter as d where d.id = k.head_id and d.parked)
      and k.head_id is not null;
    insert into outbox.held_key (lane, key)
    select distinct m.lane, m.key
    from outbox.message as m
    where m.due_at = 'infinity'
    on conflict on constraint held_key_pkey do nothing;
end
$function$;

comment on function outbox._sweep() is
    'Refills lanes, forgets proofs that cannot hold, lowers a floor that hides a ready message: a hole is a minute''s delay, not a loss.';

-- CODE. Station 60: settings, and what an operator asks.

create function outbox.configure(name text, value text)
    returns text
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_ok boolean;
begin
    if configure.name is null then
        perform outbox._refuse('OB001', 'name must not be null', 'Pass the name of a setting.');
    end if;
    if outbox._value_of(configure.name) is null or configure.name = 'paused' then
        perform outbox._refuse('OB020', 'name is not a setting',
            'Settings are default_exchange, max_body_bytes, max_attempts, retry_base, retry_multiplier, retry_cap, retry_jitter, on_dead, strict_keys, retention, dead_retention, inbox_retention and dedup_window.');
    end if;
    if configure.value is null then
        delete from outbox.setting as s
        where s.name = configure.name;
        return outbox._value_of(configure.name);
    end if;

    begin
        v_ok := case configure.name
            when 'default_exchange' then octet_length(configure.value) between 1 and 255
            when 'on_dead'          then configure.value in ('continue', 'park')
            when 'strict_keys'      then configure.value in ('on', 'off')
            when 'max_body_bytes'   then configure.value::integer between 1048576 and 15728640
            when 'max_attempts'     then configure.value::integer between 1 and 1000000
            when 'retry_multiplier' then configure.value::numeric between 1 and 1000
            when 'retry_jitter'     then configure.value::numeric between 0 and 1
            when 'retry_base'       then configure.value::interval between interval '1 ms' and interval '1 day'
            when 'retry_cap'        then configure.value::interval between interval '1 ms' and interval '30 days'
            when 'dedup_window'     then configure.value::interval between interval '1 s' and interval '365 days'
            when 'retention'        then configure.value in ('delete', 'forever')
                                         or configure.value::interval between interval '0' and interval '100 years'
            else configure.value::interval between interval '0' and interval '100 years'
        end;
    exception
        when data_exception then
            v_ok := false;
    end;
    if not v_ok then
        perform outbox._refuse('OB020', format('value cannot be taken for %s', configure.name),
            'See the settings in the README; null goes back to the default.');
    end if;

    insert into outbox.setting as s (name, value)
    values (configure.name, configure.value)
    on conflict on constraint setting_pkey do update
        set value = excluded.value,
            changed_at = excluded.changed_at,
            changed_by = excluded.changed_by;
    if configure.name = 'retention' then
        perform outbox._make_days();
    end if;
    return configure.value;
end
$function$;

comment on function outbox.configure(text, text) is
    'Changes a setting for all relays and returns its new value; null goes back to the default.';

create function outbox.pause()
    returns void
    language sql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
    insert into outbox.setting (name, value)
    values ('paused', 'on')
    on conflict on constraint setting_pkey do nothing;
$function$;

comment on function outbox.pause() is
    'No relay claims anything until resume(); emits go on and wait.';

create function outbox.resume()
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    delete from outbox.setting as s
    where s.name = 'paused';
    perform pg_notify('outbox', '');
end
$function$;

comment on function outbox.resume() is
    'Ends pause() and wakes the relays.';

create function outbox._parked(lane smallint, key text)
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

create function outbox._first(kind text, most integer)
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

create function outbox.stats()
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
    return v_stats;
end
$function$;

comment on function outbox.stats() is
    'The state of the outbox in one row. Its cost does not depend on how much waits: counts are exact to 10,000 and estimates beyond.';

create view outbox.message_status as
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

-- CODE. Who may do what. A part is given to a role by grant_*() and taken by revoke_*(); none implies another.

create function outbox._rights()
    returns table (part text, name text)
    language sql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
    -- Functions to call, tables and views to read. A name that does not exist is passed over.
    select m.part, n.name
    from (
        values
            ('emit', array['version', 'emit', 'emit_bytes', 'emit_many', 'emit_event', 'set_context', 'cancel']),
            ('relay', array['version', 'hello', 'relay_settings', 'claim_batch', 'mark_sent', 'mark_failed', 'release_batch',
                'extend_lease', 'arm_wakeup', 'disarm_wakeup', 'next_due', 'cleanup', 'dead_among', 'stats']),
            ('consume', array['version', 'accept', 'cleanup']),
            ('monitor', array['version', 'stats', 'message_status', 'wait_sent']),
            ('admin', array['version', 'stats', 'message_status', 'wait_sent', 'dead_letter', 'archive', 'setting', 'configure', 'pause',
                'resume', 'cancel', 'cleanup', 'requeue_dead', 'purge_dead', 'grant_emit', 'grant_relay', 'grant_consume',
                'grant_monitor', 'grant_admin', 'revoke_emit', 'revoke_relay', 'revoke_consume', 'revoke_monitor', 'revoke_admin'])
    ) as m (part, names)
    cross join lateral unnest(m.names) as n (name);
$function$;

comment on function outbox._rights() is
    'The matrix: what each part may call and read.';

create function outbox._granted()
    returns table (part name, role oid)
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select a.attname, g.grantee
    from pg_attribute as a
    cross join lateral aclexplode(a.attacl) as g
    where a.attrelid = 'outbox.access'::regclass
      and g.privilege_type = 'REFERENCES'
      and g.grantee <> 0;
$function$;

comment on function outbox._granted() is
    'Which roles were granted which parts.';

create function outbox._objects()
    returns table (name name, sort text, object text, privilege text, owner oid, acl aclitem[])
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select n.nspname, 'schema', format('schema %I', n.nspname), 'usage', n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner))
    from pg_namespace as n
    where n.oid = 'outbox'::regnamespace
    union all
    select
        c.relname,
        'relation',
        format('%s %s', case c.relkind when 'S' then 'sequence' else 'table' end, c.oid::regclass),
        'select',
        c.relowner,
        coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner))
    from pg_class as c
    where c.relnamespace = 'outbox'::regnamespace
    union all
    select p.proname, 'routine', format('routine %s', p.oid::regprocedure), 'execute', p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
    from pg_proc as p
    where p.pronamespace = 'outbox'::regnamespace
    union all
    select t.typname, 'type', format('type %s', t.oid::regtype), 'usage', t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
    from pg_type as t
    left join pg_class as c
        on c.oid = t.typrelid
    where t.typnamespace = 'outbox'::regnamespace
      and t.typelem = 0
      and coalesce(c.relkind = 'c', true);
$function$;

comment on function outbox._objects() is
    'Everything in the schema that can be granted, and to whom it is.';

create function outbox._apply(role oid)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_change record;
begin
    for v_change in
        select o.object, o.privilege, w.wanted
        from (
            select
                x.*,
                exists (select from aclexplode(x.acl) as g where g.grantee = _apply.role) as given
            from outbox._objects() as x
        ) as o
        cross join lateral (
            select exists (
                select
                from outbox._granted() as g
                join outbox._rights() as r
                    on r.part = g.part
                where g.role = _apply.role
                  and (r.name = o.name or o.sort = 'schema')
            ) as wanted
        ) as w
        where (o.sort = 'schema' or o.name in (select r.name from outbox._rights() as r))
          and w.wanted <> o.given
    loop
        if v_change.wanted then
            execute format('grant %s on %s to %s', v_change.privilege, v_change.object, _apply.role::regrole);
        else
            execute format('revoke all on %s from %s cascade', v_change.object, _apply.role::regrole);
        end if;
    end loop;
end
$function$;

comment on function outbox._apply(oid) is
    'Gives a role what the parts granted to it permit, and takes what only other parts permit.';

create function outbox._record(part text, role regrole, granted boolean)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if _record.role is null then
        perform outbox._refuse('OB001', 'role must not be null', 'Pass the name of a role.');
    end if;
    if not exists (select from pg_roles as r where r.oid = _record.role) then
        perform outbox._refuse('OB011', 'role does not exist', 'Create it first: rights are for roles, never for PUBLIC.');
    end if;
    if _record.role = (select n.nspowner from pg_namespace as n where n.oid = 'outbox'::regnamespace) then
        perform outbox._refuse('OB011', 'role owns the package', 'The owner may do everything; grant to another role.');
    end if;
    -- One at a time: of two that change the same entry of the catalog the second would fail.
    lock table outbox.access in share row exclusive mode;
    if _record.granted then
        execute format('grant references (%I) on outbox.access to %s', _record.part, _record.role);
    else
        execute format('revoke references (%I) on outbox.access from %s cascade', _record.part, _record.role);
    end if;
    perform outbox._apply(_record.role);
end
$function$;

comment on function outbox._record(text, regrole, boolean) is
    'Records that a part was granted to a role, or no longer is, and changes its rights accordingly.';

create function outbox._regrant()
    returns trigger
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._apply(g.role)
    from (select distinct x.role from outbox._granted() as x) as g;
    return null;
end
$function$;

comment on function outbox._regrant() is
    'Gives every role what the parts granted to it permit.';

create function outbox.grant_emit(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('emit', grant_emit.role, true);
end
$function$;

comment on function outbox.grant_emit(regrole) is
    'Lets a role emit, and cancel what it emitted; it reads nothing.';

create function outbox.revoke_emit(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('emit', revoke_emit.role, false);
end
$function$;

comment on function outbox.revoke_emit(regrole) is
    'Takes back what grant_emit() gave, but for what another part of the role permits as well.';

create function outbox.grant_relay(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('relay', grant_relay.role, true);
end
$function$;

comment on function outbox.grant_relay(regrole) is
    'Lets a role relay: claim, settle, sleep and wake, clean up; sees numbers; it reads no table and emits nothing.';

create function outbox.revoke_relay(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('relay', revoke_relay.role, false);
end
$function$;

comment on function outbox.revoke_relay(regrole) is
    'Takes back what grant_relay() gave, but for what another part of the role permits as well.';

create function outbox.grant_consume(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('consume', grant_consume.role, true);
end
$function$;

comment on function outbox.grant_consume(regrole) is
    'Lets a role accept messages in its own transactions, each once, and clean up; it reads no table.';

create function outbox.revoke_consume(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('consume', revoke_consume.role, false);
end
$function$;

comment on function outbox.revoke_consume(regrole) is
    'Takes back what grant_consume() gave, but for what another part of the role permits as well.';

create function outbox.grant_monitor(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('monitor', grant_monitor.role, true);
end
$function$;

comment on function outbox.grant_monitor(regrole) is
    'Lets a role see how the outbox does: numbers and the state of messages, never a payload.';

create function outbox.revoke_monitor(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('monitor', revoke_monitor.role, false);
end
$function$;

comment on function outbox.revoke_monitor(regrole) is
    'Takes back what grant_monitor() gave, but for what another part of the role permits as well.';

create function outbox.grant_admin(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('admin', grant_admin.role, true);
end
$function$;

comment on function outbox.grant_admin(regrole) is
    'Lets a role operate the outbox: settings, pause, dead letters and what is kept with their payload, and the rights of others.';

create function outbox.revoke_admin(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('admin', revoke_admin.role, false);
end
$function$;

comment on function outbox.revoke_admin(regrole) is
    'Takes back what grant_admin() gave, but for what another part of the role permits as well.';

-- CODE. Station 80: the consumer's side. What accept() records commits together with the effects of the message.

create function outbox.accept(consumer text, message_id uuid)
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

-- CODE. Which version is installed, equal in both modes of installation.

create function outbox.version()
    returns text
    language sql
    immutable
    parallel safe
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
    select '0.1.0';
$function$;

comment on function outbox.version() is
    'Version of the installed package.';

-- STATE. The doorbell hangs on the table; it comes after the functions because it names one.

create trigger ring
    after insert on outbox.message
    for each statement
    execute function outbox._ring();

comment on trigger ring on outbox.message is
    'Wakes a sleeping relay; once a statement, not once a row.';

-- STATE. Comes after the functions because it names one. At the end of the transaction, because what an extension's
-- script grants counts as part of the extension, and pg_dump would leave it out.

create constraint trigger regrant
    after insert on outbox.access
    deferrable initially deferred
    for each row
    execute function outbox._regrant();

alter table outbox.access enable always trigger regrant;

comment on trigger regrant on outbox.access is
    'Gives rights anew to the roles that had them, functions that are new included.';

-- pg_dump leaves out the rows of an extension's tables unless they are marked: a restore would lose what waits.
-- Everything is marked but what is derived from the rest. In a plain install there is nothing to do.

do $do$
declare
    v_derived constant text[] := '{lane,horizon,tally,tally_minute}';
    v_relation regclass;
begin
    -- The schema is a member only while an extension's script runs this (or has run it).
    if not exists (
        select
        from pg_depend as d
        where d.classid = 'pg_namespace'::regclass
          and d.objid = 'outbox'::regnamespace
          and d.deptype = 'e'
    ) then
        return;
    end if;

    for v_relation in
        select c.oid
        from pg_class as c
        join pg_depend as member
            on member.classid = 'pg_class'::regclass
            and member.objid = c.oid
            and member.deptype = 'e'
        left join pg_depend as owned
            on owned.classid = 'pg_class'::regclass
            and owned.objid = c.oid
            and owned.refclassid = 'pg_class'::regclass
            and owned.deptype in ('a', 'i')
        left join pg_class as owner
            on owner.oid = owned.refobjid
        -- Days of the archive are no members: pg_dump takes them for anybody's tables, and has them whole.
        where c.relnamespace = 'outbox'::regnamespace
          and (
              c.relkind = 'r' and c.relname <> all (v_derived)
              or c.relkind = 'S' and coalesce(owner.relname, '') <> all (v_derived)
          )
        order by c.relname
    loop
        perform pg_extension_config_dump(v_relation, '');
    end loop;
end
$do$;

-- Last in every build: nobody has a right here but the owner, and those to whom grant_*() gave it. PUBLIC is not the only
-- other one: default privileges of the installing role leak to anybody.

do $do$
declare
    v_grant record;
begin
    -- As grant_*() does.
    lock table outbox.access in share row exclusive mode;
    -- An object on which somebody has more than he should is taken from everybody: what is still granted on it when this
    -- script ends, pg_dump takes for a part of the extension. The trigger regrant gives back what is due.
    for v_grant in
        with given as (
            select distinct o.name, o.sort, o.object, g.grantee
            from outbox._objects() as o
            cross join lateral aclexplode(o.acl) as g
            where g.grantee <> o.owner
              -- Revoking rights on a table revokes those on its columns, and there the parts are recorded.
              and not (o.object = 'table outbox.access' and exists (select from outbox._granted()))
        )
        select g.object, case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from given as g
        where g.object in (
            select x.object
            from given as x
            where not exists (
                select
                from outbox._granted() as a
                join outbox._rights() as r
                    on r.part = a.part
                where a.role = x.grantee
                  and case x.sort when 'schema' then true when 'type' then false else r.name = x.name end
            )
        )
    loop
        execute format('revoke all on %s from %s cascade', v_grant.object, v_grant.grantee);
    end loop;
    -- Rights on single columns come from nobody's defaults: somebody gave them by hand.
    for v_grant in
        select distinct
            format('(%I) on %s', a.attname, c.oid::regclass) as object,
            case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from pg_attribute as a
        join pg_class as c
            on c.oid = a.attrelid
        cross join lateral aclexplode(a.attacl) as g
        where c.relnamespace = 'outbox'::regnamespace
          and c.oid <> 'outbox.access'::regclass
    loop
        execute format('revoke all %s from %s cascade', v_grant.object, v_grant.grantee);
    end loop;
end
$do$;

insert into outbox.access
select
where exists (select from outbox._granted());
