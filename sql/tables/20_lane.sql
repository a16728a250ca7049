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
    floors         bigint[],
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
comment on column outbox.horizon.floors         is 'floors of all lanes as they were noted last, so none is above the lane''s own; null: not noted, look from the start';

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
