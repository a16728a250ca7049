-- CODE. Who may do what. A part is given to a role by grant_*() and taken by revoke_*(); none implies another.

create or replace function outbox._rights()
    returns table (part text, name text)
    language sql
    immutable
    set search_path = pg_catalog, pg_temp
as $function$
    -- Functions to call, tables and views to read. A name that does not exist is passed over.
    select m.part, n.name
    from (
        values
            ('emit', array['version', 'emit', 'emit_bytes', 'emit_many', 'emit_event', 'set_context', 'cancel']),
            ('relay', array['version', 'hello', 'relay_settings', 'claim_batch', 'mark_sent', 'mark_failed', 'release_batch',
                'extend_lease', 'arm_wakeup', 'disarm_wakeup', 'next_due', 'cleanup', 'dead_among', 'stats']),
            ('consume', array['version', 'accept', 'cleanup']),
            ('monitor', array['version', 'stats', 'message_status', 'wait_sent']),
            ('admin', array['version', 'stats', 'message_status', 'wait_sent', 'dead_letter', 'archive', 'setting', 'configure', 'pause',
                'resume', 'cancel', 'cleanup', 'requeue_dead', 'purge_dead', 'grant_emit', 'grant_relay', 'grant_consume',
                'grant_monitor', 'grant_admin', 'revoke_emit', 'revoke_relay', 'revoke_consume', 'revoke_monitor', 'revoke_admin'])
    ) as m (part, names)
    cross join lateral unnest(m.names) as n (name);
$function$;

comment on function outbox._rights() is
    'The matrix: what each part may call and read.';

create or replace function outbox._granted()
    returns table (part name, role oid)
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select a.attname, g.grantee
    from pg_attribute as a
    cross join lateral aclexplode(a.attacl) as g
    where a.attrelid = 'outbox.access'::regclass
      and g.privilege_type = 'REFERENCES'
      and g.grantee <> 0;
$function$;

comment on function outbox._granted() is
    'Which roles were granted which parts.';

create or replace function outbox._objects()
    returns table (name name, sort text, object text, privilege text, owner oid, acl aclitem[])
    language sql
    stable
    set search_path = pg_catalog, pg_temp
as $function$
    select n.nspname, 'schema', format('schema %I', n.nspname), 'usage', n.nspowner, coalesce(n.nspacl, acldefault('n', n.nspowner))
    from pg_namespace as n
    where n.oid = 'outbox'::regnamespace
    union all
    select
        c.relname,
        'relation',
        format('%s %s', case c.relkind when 'S' then 'sequence' else 'table' end, c.oid::regclass),
        'select',
        c.relowner,
        coalesce(c.relacl, acldefault(case c.relkind when 'S' then 's' else 'r' end::"char", c.relowner))
    from pg_class as c
    where c.relnamespace = 'outbox'::regnamespace
    union all
    select p.proname, 'routine', format('routine %s', p.oid::regprocedure), 'execute', p.proowner, coalesce(p.proacl, acldefault('f', p.proowner))
    from pg_proc as p
    where p.pronamespace = 'outbox'::regnamespace
    union all
    select t.typname, 'type', format('type %s', t.oid::regtype), 'usage', t.typowner, coalesce(t.typacl, acldefault('T', t.typowner))
    from pg_type as t
    left join pg_class as c
        on c.oid = t.typrelid
    where t.typnamespace = 'outbox'::regnamespace
      and t.typelem = 0
      and coalesce(c.relkind = 'c', true);
$function$;

comment on function outbox._objects() is
    'Everything in the schema that can be granted, and to whom it is.';

create or replace function outbox._apply(role oid)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
declare
    v_change record;
begin
    for v_change in
        select o.object, o.privilege, w.wanted
        from (
            select
                x.*,
                exists (select from aclexplode(x.acl) as g where g.grantee = _apply.role) as given
            from outbox._objects() as x
        ) as o
        cross join lateral (
            select exists (
                select
                from outbox._granted() as g
                join outbox._rights() as r
                    on r.part = g.part
                where g.role = _apply.role
                  and (r.name = o.name or o.sort = 'schema')
            ) as wanted
        ) as w
        where (o.sort = 'schema' or o.name in (select r.name from outbox._rights() as r))
          and w.wanted <> o.given
    loop
        if v_change.wanted then
            execute format('grant %s on %s to %s', v_change.privilege, v_change.object, _apply.role::regrole);
        else
            execute format('revoke all on %s from %s cascade', v_change.object, _apply.role::regrole);
        end if;
    end loop;
end
$function$;

comment on function outbox._apply(oid) is
    'Gives a role what the parts granted to it permit, and takes what only other parts permit.';

create or replace function outbox._record(part text, role regrole, granted boolean)
    returns void
    language plpgsql
    volatile
    set search_path = pg_catalog, pg_temp
as $function$
begin
    if _record.role is null then
        perform outbox._refuse('OB001', 'role must not be null', 'Pass the name of a role.');
    end if;
    if not exists (select from pg_roles as r where r.oid = _record.role) then
        perform outbox._refuse('OB011', 'role does not exist', 'Create it first: rights are for roles, never for PUBLIC.');
    end if;
    if _record.role = (select n.nspowner from pg_namespace as n where n.oid = 'outbox'::regnamespace) then
        perform outbox._refuse('OB011', 'role owns the package', 'The owner may do everything; grant to another role.');
    end if;
    -- One at a time: of two that change the same entry of the catalog the second would fail.
    lock table outbox.access in share row exclusive mode;
    if _record.granted then
        execute format('grant references (%I) on outbox.access to %s', _record.part, _record.role);
    else
        execute format('revoke references (%I) on outbox.access from %s cascade', _record.part, _record.role);
    end if;
    perform outbox._apply(_record.role);
end
$function$;

comment on function outbox._record(text, regrole, boolean) is
    'Records that a part was granted to a role, or no longer is, and changes its rights accordingly.';

create or replace function outbox._regrant()
    returns trigger
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._apply(g.role)
    from (select distinct x.role from outbox._granted() as x) as g;
    return null;
end
$function$;

comment on function outbox._regrant() is
    'Gives every role what the parts granted to it permit.';

create or replace function outbox.grant_emit(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('emit', grant_emit.role, true);
end
$function$;

comment on function outbox.grant_emit(regrole) is
    'Lets a role emit, and cancel what it emitted; it reads nothing.';

create or replace function outbox.revoke_emit(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('emit', revoke_emit.role, false);
end
$function$;

comment on function outbox.revoke_emit(regrole) is
    'Takes back what grant_emit() gave, but for what another part of the role permits as well.';

create or replace function outbox.grant_relay(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('relay', grant_relay.role, true);
end
$function$;

comment on function outbox.grant_relay(regrole) is
    'Lets a role relay: claim, settle, sleep and wake, clean up; sees numbers; it reads no table and emits nothing.';

create or replace function outbox.revoke_relay(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('relay', revoke_relay.role, false);
end
$function$;

comment on function outbox.revoke_relay(regrole) is
    'Takes back what grant_relay() gave, but for what another part of the role permits as well.';

create or replace function outbox.grant_consume(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('consume', grant_consume.role, true);
end
$function$;

comment on function outbox.grant_consume(regrole) is
    'Lets a role accept messages in its own transactions, each once, and clean up; it reads no table.';

create or replace function outbox.revoke_consume(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('consume', revoke_consume.role, false);
end
$function$;

comment on function outbox.revoke_consume(regrole) is
    'Takes back what grant_consume() gave, but for what another part of the role permits as well.';

create or replace function outbox.grant_monitor(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('monitor', grant_monitor.role, true);
end
$function$;

comment on function outbox.grant_monitor(regrole) is
    'Lets a role see how the outbox does: numbers and the state of messages, never a payload.';

create or replace function outbox.revoke_monitor(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('monitor', revoke_monitor.role, false);
end
$function$;

comment on function outbox.revoke_monitor(regrole) is
    'Takes back what grant_monitor() gave, but for what another part of the role permits as well.';

create or replace function outbox.grant_admin(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('admin', grant_admin.role, true);
end
$function$;

comment on function outbox.grant_admin(regrole) is
    'Lets a role operate the outbox: settings, pause, dead letters and what is kept with their payload, and the rights of others.';

create or replace function outbox.revoke_admin(role regrole)
    returns void
    language plpgsql
    volatile
    security definer
    set search_path = pg_catalog, pg_temp
as $function$
begin
    perform outbox._record('admin', revoke_admin.role, false);
end
$function$;

comment on function outbox.revoke_admin(regrole) is
    'Takes back what grant_admin() gave, but for what another part of the role permits as well.';
