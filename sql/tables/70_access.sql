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
