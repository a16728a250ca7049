-- locks: none
drop function outbox.dead_among(bigint[]);
