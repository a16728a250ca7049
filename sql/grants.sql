-- Last in every build: nobody has a right here but the owner, and those to whom grant_*() gave it. PUBLIC is not the only
-- other one: default privileges of the installing role leak to anybody.

do $do$
declare
    v_grant record;
begin
    -- As grant_*() does.
    lock table outbox.access in share row exclusive mode;
    -- An object on which somebody has more than he should is taken from everybody: what is still granted on it when this
    -- script ends, pg_dump takes for a part of the extension. The trigger regrant gives back what is due.
    for v_grant in
        with given as (
            select distinct o.name, o.sort, o.object, g.grantee
            from outbox._objects() as o
            cross join lateral aclexplode(o.acl) as g
            where g.grantee <> o.owner
              -- Revoking rights on a table revokes those on its columns, and there the parts are recorded.
              and not (o.object = 'table outbox.access' and exists (select from outbox._granted()))
        )
        select g.object, case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from given as g
        where g.object in (
            select x.object
            from given as x
            where not exists (
                select
                from outbox._granted() as a
                join outbox._rights() as r
                    on r.part = a.part
                where a.role = x.grantee
                  and case x.sort when 'schema' then true when 'type' then false else r.name = x.name end
            )
        )
    loop
        execute format('revoke all on %s from %s cascade', v_grant.object, v_grant.grantee);
    end loop;
    -- Rights on single columns come from nobody's defaults: somebody gave them by hand.
    for v_grant in
        select distinct
            format('(%I) on %s', a.attname, c.oid::regclass) as object,
            case g.grantee when 0 then 'public' else g.grantee::regrole::text end as grantee
        from pg_attribute as a
        join pg_class as c
            on c.oid = a.attrelid
        cross join lateral aclexplode(a.attacl) as g
        where c.relnamespace = 'outbox'::regnamespace
          and c.oid <> 'outbox.access'::regclass
    loop
        execute format('revoke all %s from %s cascade', v_grant.object, v_grant.grantee);
    end loop;
end
$do$;

insert into outbox.access
select
where exists (select from outbox._granted());
