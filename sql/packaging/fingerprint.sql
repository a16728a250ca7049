-- One sorted line per catalog fact of schema outbox: two installations are alike when their lines are.
-- Left out: attribute numbers (dropped columns differ), not-null constraints (in pg_constraint since PostgreSQL 18;
-- the column says it) and the privilege MAINTAIN (since PostgreSQL 17). Owners and grantees that own the schema read "owner".
-- Reads nothing but the catalog, which everybody may. Shipped in the wheel, with the lines of a fresh install: `outbox verify`.
-- Membership in the extension is the one permitted difference: it shows in lines that begin with "dump mark".

set search_path = pg_catalog;
set quote_all_identifiers = off;
set datestyle = 'ISO';
set intervalstyle = 'postgres';

with this as (
    select n.oid, n.nspowner as owner, n.nspacl
    from pg_catalog.pg_namespace as n
    where n.nspname = 'outbox'
),
relation as (
    select c.*, c.oid::regclass::text as name
    from pg_catalog.pg_class as c
    join this on this.oid = c.relnamespace
),
routine as (
    select p.*, p.oid::regprocedure::text as name
    from pg_catalog.pg_proc as p
    join this on this.oid = p.pronamespace
),
type as (
    select t.*, t.oid::regtype::text as name
    from pg_catalog.pg_type as t
    join this on this.oid = t.typnamespace
),
privilege as (
    select 'schema outbox' as object, coalesce(this.nspacl, acldefault('n', this.owner)) as acl
    from this
    union all
    select
        'relation ' || r.name,
        coalesce(r.relacl, acldefault(case r.relkind when 'S' then 's'::"char" else 'r' end, r.relowner))
    from relation as r
    where r.relkind not in ('i', 'I', 'c')
    union all
    select format('column %s.%I', r.name, a.attname), a.attacl
    from relation as r
    join pg_catalog.pg_attribute as a on a.attrelid = r.oid
    where a.attacl is not null
    union all
    select 'routine ' || r.name, coalesce(r.proacl, acldefault('f', r.proowner))
    from routine as r
    union all
    select 'type ' || t.name, coalesce(t.typacl, acldefault('T', t.typowner))
    from type as t
    where t.typelem = 0
    union all
    select format('default privileges of %s for %s', d.defaclrole::regrole, d.defaclobjtype), d.defaclacl
    from pg_catalog.pg_default_acl as d
    join this on this.oid = d.defaclnamespace
),
owned as (
    select 'relation ' || r.name as object, r.relowner as owner from relation as r
    union all
    select 'routine ' || r.name, r.proowner from routine as r
    union all
    select 'type ' || t.name, t.typowner from type as t
),
fact (line) as (
    -- Whatever its kind: nothing stands in the schema without a line.
    select format('object %s %s', o.type, o.identity)
    from this
    join pg_catalog.pg_depend as d on d.refclassid = 'pg_namespace'::regclass and d.refobjid = this.oid
    cross join lateral pg_identify_object(d.classid, d.objid, d.objsubid) as o
    where d.deptype = 'n'

    union all
    select format(
        'relation %s: kind %s, persistence %s, access method %s, tablespace %s, options %s, toast options %s, row security %s %s, '
        'replica identity %s, partition key %s, partition of %s %s',
        r.name, r.relkind, r.relpersistence,
        coalesce((select am.amname from pg_catalog.pg_am as am where am.oid = r.relam), '-'),
        coalesce((select s.spcname from pg_catalog.pg_tablespace as s where s.oid = r.reltablespace), 'default'),
        coalesce((select string_agg(o, ' ' order by o) from unnest(r.reloptions) as o), '-'),
        coalesce((
            select string_agg(o, ' ' order by o)
            from pg_catalog.pg_class as t
            cross join unnest(t.reloptions) as o
            where t.oid = r.reltoastrelid
        ), '-'),
        r.relrowsecurity, r.relforcerowsecurity, r.relreplident,
        coalesce(pg_get_partkeydef(r.oid), '-'),
        coalesce((select i.inhparent::regclass::text from pg_catalog.pg_inherits as i where i.inhrelid = r.oid), '-'),
        coalesce(pg_get_expr(r.relpartbound, r.oid), '-')
    )
    from relation as r

    union all
    select format(
        'column %s.%I: %s, not null %s, default %s, identity %s, generated %s, storage %s, compression %s, collation %s, '
        'statistics %s, options %s',
        r.name, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
        coalesce(pg_get_expr(d.adbin, d.adrelid), '-'), a.attidentity, a.attgenerated, a.attstorage, a.attcompression,
        coalesce((select c.collname from pg_catalog.pg_collation as c where c.oid = a.attcollation), '-'),
        coalesce(nullif(a.attstattarget, -1)::text, 'default'),
        -- From 15.20 on the server stamps every column with a number of its own.
        coalesce((select string_agg(o, ' ' order by o) from unnest(a.attoptions) as o where o not like 'pg\_attver=%'), '-')
    )
    from relation as r
    join pg_catalog.pg_attribute as a on a.attrelid = r.oid
    left join pg_catalog.pg_attrdef as d on d.adrelid = a.attrelid and d.adnum = a.attnum
    where a.attnum > 0 and not a.attisdropped and r.relkind not in ('i', 'I', 'S')

    union all
    -- Order of columns, without their numbers.
    select format('columns %s: %s', r.name, string_agg(quote_ident(a.attname), ', ' order by a.attnum))
    from relation as r
    join pg_catalog.pg_attribute as a on a.attrelid = r.oid
    where a.attnum > 0 and not a.attisdropped and r.relkind not in ('i', 'I', 'S')
    group by r.name

    union all
    select format(
        'constraint %I on %s: %s, validated %s',
        c.conname, coalesce(r.name, t.name), pg_get_constraintdef(c.oid), c.convalidated
    )
    from pg_catalog.pg_constraint as c
    left join relation as r on r.oid = c.conrelid
    left join type as t on t.oid = c.contypid
    where coalesce(r.oid, t.oid) is not null and c.contype not in ('n', 't')

    union all
    select format(
        'index %s: %s, valid %s, clustered %s, replica identity %s',
        r.name, pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisclustered, i.indisreplident
    )
    from relation as r
    join pg_catalog.pg_index as i on i.indexrelid = r.oid

    union all
    select format(
        'sequence %s: %s, start %s, increment %s, min %s, max %s, cache %s, cycle %s, owned by %s',
        r.name, format_type(s.seqtypid, null), s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, s.seqcycle,
        coalesce((
            select format('%s.%I', d.refobjid::regclass, a.attname)
            from pg_catalog.pg_depend as d
            join pg_catalog.pg_attribute as a on a.attrelid = d.refobjid and a.attnum = d.refobjsubid
            where d.classid = 'pg_class'::regclass
              and d.objid = r.oid
              and d.refclassid = 'pg_class'::regclass
              and d.deptype in ('a', 'i')
        ), '-')
    )
    from relation as r
    join pg_catalog.pg_sequence as s on s.seqrelid = r.oid

    union all
    select format('view %s: %s', r.name, pg_get_viewdef(r.oid))
    from relation as r
    where r.relkind in ('v', 'm')

    union all
    select format('rule %I on %s: %s, enabled %s', w.rulename, r.name, pg_get_ruledef(w.oid), w.ev_enabled)
    from relation as r
    join pg_catalog.pg_rewrite as w on w.ev_class = r.oid
    where w.rulename <> '_RETURN'

    union all
    select format('trigger %I on %s: %s, enabled %s', t.tgname, r.name, pg_get_triggerdef(t.oid), t.tgenabled)
    from relation as r
    join pg_catalog.pg_trigger as t on t.tgrelid = r.oid
    where not t.tgisinternal

    union all
    select format(
        'policy %I on %s: %s, permissive %s, roles %s, using %s, check %s',
        p.polname, r.name, p.polcmd, p.polpermissive, p.polroles::regrole[],
        coalesce(pg_get_expr(p.polqual, p.polrelid), '-'), coalesce(pg_get_expr(p.polwithcheck, p.polrelid), '-')
    )
    from relation as r
    join pg_catalog.pg_policy as p on p.polrelid = r.oid

    union all
    -- The source shows a body; here its hash is enough. What stands before it is printed whole.
    select format(
        'routine %s: %s, whole %s',
        r.name,
        split_part(pg_get_functiondef(r.oid), e'\nAS ', 1),
        md5(pg_get_functiondef(r.oid))
    )
    from routine as r
    where r.prokind <> 'a'

    union all
    select format(
        'type %s: kind %s, base %s, not null %s, default %s, labels %s',
        t.name, t.typtype, coalesce(format_type(nullif(t.typbasetype, 0), t.typtypmod), '-'), t.typnotnull,
        coalesce(t.typdefault, '-'),
        coalesce((
            select string_agg(e.enumlabel, ' ' order by e.enumsortorder) from pg_catalog.pg_enum as e where e.enumtypid = t.oid
        ), '-')
    )
    from type as t
    where t.typelem = 0

    union all
    select format('owner of %s: %s', o.object, case when o.owner = this.owner then 'owner' else o.owner::regrole::text end)
    from owned as o
    cross join this

    union all
    select format(
        'privilege on %s: %s to %s%s, granted by %s',
        p.object, g.privilege_type,
        case g.grantee when this.owner then 'owner' when 0 then 'public' else g.grantee::regrole::text end,
        case when g.is_grantable then ' with grant option' else '' end,
        case when g.grantor = this.owner then 'owner' else g.grantor::regrole::text end
    )
    from privilege as p
    cross join this
    cross join lateral aclexplode(p.acl) as g
    where g.privilege_type <> 'MAINTAIN'

    union all
    select format('comment on %s %s: %s', o.type, o.identity, d.description)
    from pg_catalog.pg_description as d
    cross join lateral pg_identify_object(d.classoid, d.objoid, d.objsubid) as o
    cross join lateral pg_identify_object_as_address(d.classoid, d.objoid, d.objsubid) as a
    where (a.object_names[1] = 'outbox' or a.object_names[1] like 'outbox.%') and o.type <> 'extension'

    union all
    select format('dump mark %s: condition %s', marked.relation::regclass, coalesce(nullif(marked.condition, ''), '-'))
    from pg_catalog.pg_extension as e
    cross join lateral unnest(e.extconfig, e.extcondition) as marked (relation, condition)
    where e.extname = 'outbox'
)
select regexp_replace(line, '[[:space:]]+', ' ', 'g') as line
from fact
order by line collate "C";
