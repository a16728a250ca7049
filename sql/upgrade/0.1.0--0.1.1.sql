-- locks: outbox.horizon in access exclusive

alter table outbox.horizon add column floors bigint[];
comment on column outbox.horizon.floors is 'floors of all lanes as they were noted last, so none is above the lane''s own; null: not noted, look from the start';

drop function outbox.dead_among(bigint[]);

alter type outbox.stats_result add attribute paused boolean;
comment on column outbox.stats_result.paused is 'whether pause() was called: nothing is handed out until resume()';

comment on column outbox._part.tids is 'where the rows of the first ones are; those after them are all that is ready from the first to the last, and nothing can appear among them';
