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
