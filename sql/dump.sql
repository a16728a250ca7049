-- pg_dump leaves out the rows of an extension's tables unless they are marked: a restore would lose what waits.
-- Everything is marked but what is derived from the rest. In a plain install there is nothing to do.

do $do$
declare
    v_derived constant text[] := '{lane,horizon,tally,tally_minute}';
    v_relation regclass;
begin
    -- The schema is a member only while an extension's script runs this (or has run it).
    if not exists (
        select
        from pg_depend as d
        where d.classid = 'pg_namespace'::regclass
          and d.objid = 'outbox'::regnamespace
          and d.deptype = 'e'
    ) then
        return;
    end if;

    for v_relation in
        select c.oid
        from pg_class as c
        join pg_depend as member
            on member.classid = 'pg_class'::regclass
            and member.objid = c.oid
            and member.deptype = 'e'
        left join pg_depend as owned
            on owned.classid = 'pg_class'::regclass
            and owned.objid = c.oid
            and owned.refclassid = 'pg_class'::regclass
            and owned.deptype in ('a', 'i')
        left join pg_class as owner
            on owner.oid = owned.refobjid
        -- Days of the archive are no members: pg_dump takes them for anybody's tables, and has them whole.
        where c.relnamespace = 'outbox'::regnamespace
          and (
              c.relkind = 'r' and c.relname <> all (v_derived)
              or c.relkind = 'S' and coalesce(owner.relname, '') <> all (v_derived)
          )
        order by c.relname
    loop
        perform pg_extension_config_dump(v_relation, '');
    end loop;
end
$do$;
