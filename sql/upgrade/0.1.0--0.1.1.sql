-- locks: outbox.horizon in access exclusive

alter table outbox.horizon add column floors bigint[];
comment on column outbox.horizon.floors is 'floors of all lanes as they were noted last, so none is above the lane''s own; null: not noted, look from the start';

drop function outbox.dead_among(bigint[]);
