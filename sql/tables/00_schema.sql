-- STATE. The schema everything lives in. No "if not exists": a schema somebody prepared is refused.

do $do$
begin
    -- One installer at a time, whichever way: the second then finds the schema and says so.
    perform pg_advisory_xact_lock(hashtextextended('outbox install', 0));
    if current_setting('server_version_num')::integer < 140000 then
        raise exception 'outbox needs PostgreSQL 14 or later, and this server is %', current_setting('server_version')
            using errcode = 'OB091',
                  hint = 'Upgrade the server.';
    end if;
    if getdatabaseencoding() <> 'UTF8' then
        raise exception 'outbox needs a database with encoding UTF8, and % has %', current_database(), getdatabaseencoding()
            using errcode = 'OB091',
                  hint = 'AMQP text is UTF-8. Create the database with: encoding ''UTF8'' template template0';
    end if;
    if to_regnamespace('outbox') is not null then
        raise exception 'schema outbox exists in this database: %', case
            when exists (
                select
                from pg_depend as d
                where d.classid = 'pg_namespace'::regclass
                  and d.objid = to_regnamespace('outbox')
                  and d.deptype = 'e'
            ) then 'outbox is installed as an extension'
            when to_regprocedure('outbox.version()') is not null then 'outbox is installed by outbox-install.sql'
            else 'it is not from this package'
        end
            using errcode = 'OB090',
                  hint = 'Upgrade what is there, remove it with outbox-uninstall.sql, or rename a schema of your own.';
    end if;
end
$do$;

create schema outbox;

comment on schema outbox is
    'Transactional outbox: events written in a transaction reach RabbitMQ, or the transaction rolled back.';
