-- Installs outbox @VERSION@ into the connected database, in one transaction: psql -d DATABASE -f outbox-install.sql
-- Needs the right to create a schema there, and no superuser. Stops at the first error and then leaves nothing behind.
\set ON_ERROR_STOP on
\set QUIET on

begin isolation level read committed read write;
set local client_min_messages = warning;
-- As in create extension: names in the body mean what the server ships, whatever the caller's path finds.
set local search_path = pg_catalog, pg_temp;

