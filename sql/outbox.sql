-- The manifest: one event's life, in order. psql runs this file in development; the build flattens it.

-- state: runs once; a change here needs a delta in upgrade/
\ir tables/00_schema.sql
\ir tables/05_types.sql
\ir tables/10_message.sql
\ir tables/15_dedup.sql
\ir tables/20_lane.sql
\ir tables/45_dead_letter.sql
\ir tables/50_archive.sql
\ir tables/60_setting.sql
\ir tables/70_access.sql
\ir tables/80_inbox.sql

-- code: re-created whole at every upgrade
\ir functions/00_internal.sql
\ir functions/10_check.sql
\ir functions/10_emit.sql
\ir functions/10_emit_many.sql
\ir functions/10_cancel.sql
\ir functions/20_wait.sql
\ir functions/20_claim.sql
\ir functions/20_take.sql
\ir functions/40_horizon.sql
\ir functions/40_mark.sql
\ir functions/45_fail.sql
\ir functions/50_cleanup.sql
\ir functions/60_configure.sql
\ir functions/60_watch.sql
\ir functions/70_access.sql
\ir functions/80_inbox.sql
\ir functions/90_version.sql

-- state that needs the code above
\ir tables/95_doorbell.sql
\ir tables/96_regrant.sql

-- last, at every upgrade too: what a dump must have, and who may do what
\ir dump.sql
\ir grants.sql
