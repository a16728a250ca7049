-- Upgrades a plain outbox @FROM@ to @VERSION@, in one transaction: psql -d DATABASE -f outbox-upgrade-@FROM@-@VERSION@.sql
-- Run it as the owner of schema outbox or as a superuser. Stops at the first error and then leaves everything as it was.
\set ON_ERROR_STOP on
\set QUIET on

begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;

do $do$
begin
    if exists (select from pg_extension as e where e.extname = 'outbox') then
        raise exception 'outbox is installed as an extension in this database'
            using errcode = 'OB090',
                  hint = 'Run: alter extension outbox update;';
    end if;
    if to_regprocedure('outbox.version()') is null then
        raise exception 'outbox is not installed in this database'
            using errcode = 'OB090',
                  hint = 'Run outbox-install.sql instead.';
    end if;
end
$do$;

