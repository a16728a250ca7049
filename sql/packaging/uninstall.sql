-- Removes outbox from the connected database, whichever way it was installed: psql -d DATABASE -f outbox-uninstall.sql
-- One transaction; run it as the owner. It refuses while messages wait, are dead or are kept, or while other objects need the
-- package; psql -v force=1 -f outbox-uninstall.sql discards the former and drops the latter. `outbox uninstall` runs this file, too.
-- A bare "drop extension outbox" cannot refuse: it drops waiting messages without a word.
\set ON_ERROR_STOP on
\set QUIET on
\if :{?force}
\else
    \set force 0
\endif

begin isolation level read committed read write;
set local client_min_messages = warning;
set local search_path = pg_catalog, pg_temp;
-- Emitters queue behind our lock request while we wait for theirs: do not wait for long.
set local lock_timeout = '2s';
select set_config('outbox.uninstall_force', :'force', true) as unused \gset outbox_

do $do$
declare
    v_force boolean := current_setting('outbox.uninstall_force')::boolean;
    v_extension boolean := exists (select from pg_extension as e where e.extname = 'outbox');
    v_waiting bigint;
    v_dead bigint;
    v_kept boolean;
    v_dependants text;
begin
    if not v_extension and to_regprocedure('outbox.version()') is null then
        raise exception 'outbox is not installed in database %', current_database()
            using errcode = 'OB090',
                  hint = 'Connect to the database it is to be removed from.';
    end if;

    -- Before counting, so that nobody emits in between.
    lock table outbox.message in access exclusive mode;
    select count(*) into v_waiting from outbox.message;
    if v_waiting > 0 and not v_force then
        raise exception 'not removed: messages waiting in outbox.message: %', v_waiting
            using errcode = 'OB092',
                  hint = 'Let a relay send them, or discard them: psql -v force=1 -f outbox-uninstall.sql, outbox uninstall --force';
    end if;
    -- The archive may be large: whether there is anything is enough.
    select count(*) into v_dead from outbox.dead_letter;
    v_kept := exists (select from outbox.archive);
    if (v_dead > 0 or v_kept) and not v_force then
        raise exception 'not removed: messages in outbox.dead_letter: %, in outbox.archive: %', v_dead, case when v_kept then 'some' else 'none' end
            using errcode = 'OB092',
                  hint = 'Copy what you need, then discard them: psql -v force=1 -f outbox-uninstall.sql, outbox uninstall --force';
    end if;

    -- What cascades beyond the package: views, columns, constraints of somebody else.
    select string_agg(distinct pg_describe_object(d.classid, d.objid, d.objsubid), ', ')
    into v_dependants
    from pg_depend as d
    cross join lateral pg_identify_object_as_address(d.classid, d.objid, d.objsubid) as dependant
    cross join lateral pg_identify_object_as_address(d.refclassid, d.refobjid, d.refobjsubid) as needed
    where d.deptype = 'n'
      and (needed.object_names[1] = 'outbox' or needed.object_names[1] like 'outbox.%')
      and dependant.object_names[1] <> 'outbox'
      and dependant.object_names[1] not like 'outbox.%';
    if v_dependants is not null and not v_force then
        raise exception 'not removed: other objects need outbox: %', v_dependants
            using errcode = 'OB092',
                  hint = 'Drop them first, or together: psql -v force=1 -f outbox-uninstall.sql, outbox uninstall --force';
    end if;

    if v_extension then
        drop extension outbox cascade;
    else
        drop schema outbox cascade;
    end if;
    perform set_config('outbox.uninstall_report', format(
        'outbox removed: the %s in database %I; waiting messages discarded: %s%s%s%s',
        case when v_extension then 'extension' else 'schema' end, current_database(), v_waiting,
        case when v_dead > 0 then format('; dead letters discarded: %s', v_dead) end,
        case when v_kept then '; the archive is gone' end,
        '; also dropped: ' || v_dependants
    ), true);
end
$do$;

select current_setting('outbox.uninstall_report') as report \gset outbox_
commit;
\echo :outbox_report
