-- Keeps the script out of psql: its objects would belong to no extension.
\echo Use "@COMMAND@" to load this file. \quit

-- The server does so for every extension script; written down it holds for readers and checkers too.
set local search_path = pg_catalog, pg_temp;

