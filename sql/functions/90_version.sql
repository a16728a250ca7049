-- CODE. Which version is installed, equal in both modes of installation.

create or replace function outbox.version()
    returns text
    language sql
    immutable
    parallel safe
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
    select '@VERSION@';
$function$;

comment on function outbox.version() is
    'Version of the installed package.';
