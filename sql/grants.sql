-- Last in every build: nobody but the owner has any right here. PUBLIC is not the only grantee: default privileges of
-- the installing role leak to others too.

revoke all on schema outbox from public;
revoke all on all tables in schema outbox from public;
revoke all on all sequences in schema outbox from public;
revoke all on all routines in schema outbox from public;

do $do$
declare
    v_grant record;
begin
    for v_grant in
        select
            format('%s %s', o.kind, o.name) as object,
            a.grantee::regrole as grantee
        from (
            select 'schema' as kind, quote_ident(n.nspname) as name, n.nspowner as owner, n.nspacl as acl
            from pg_namespace as n
            where n.nspname = 'outbox'
            union all
            select case c.relkind when 'S' then 'sequence' else 'table' end, c.oid::regclass::text, c.relowner, c.relacl
            from pg_class as c
            where c.relnamespace = 'outbox'::regnamespace
              and c.relkind in ('r', 'p', 'v', 'S')
            union all
            select 'function', p.oid::regprocedure::text, p.proowner, p.proacl
            from pg_proc as p
            where p.pronamespace = 'outbox'::regnamespace
            union all
            select 'type', t.oid::regtype::text, t.typowner, t.typacl
            from pg_type as t
            where t.typnamespace = 'outbox'::regnamespace
              and t.typtype = 'c'
              and exists (select from pg_class as c where c.oid = t.typrelid and c.relkind = 'c')
        ) as o
        cross join lateral aclexplode(o.acl) as a
        where a.grantee <> o.owner
          and a.grantee <> 0
        group by 1, 2
    loop
        execute format('revoke all on %s from %s', v_grant.object, v_grant.grantee);
    end loop;
end
$do$;

revoke usage on type outbox.claimed_message, outbox.cleanup_result, outbox._part from public;
