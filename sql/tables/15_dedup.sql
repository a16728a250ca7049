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
