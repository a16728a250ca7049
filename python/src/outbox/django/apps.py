from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.db import connections

import outbox

# Read from the catalog, which everybody may do, whatever rights there are in the schema.
_FACTS = """
select
    to_regnamespace('outbox') is not null,
    case when has_schema_privilege(n.oid, 'usage') then has_function_privilege(v.oid, 'execute') end,
    has_schema_privilege(n.oid, 'usage') and (
        select count(*) = 2 and bool_and(has_function_privilege(p.oid, 'execute'))
        from pg_proc as p
        where p.pronamespace = n.oid and p.proname in ('emit_bytes', 'emit_many')
    )
from (select to_regnamespace('outbox')::oid as oid) as n
left join pg_proc as v on v.pronamespace = n.oid and v.proname = 'version'
"""


class OutboxConfig(AppConfig):
    name = "outbox.django"
    label = "outbox"
    verbose_name = "Outbox"

    def ready(self) -> None:
        checks.register(check_database, checks.Tags.database)


def check_database(*, databases: Sequence[str] | None = None, **_: Any) -> list[checks.CheckMessage]:
    """Installed, of this version, and open to the user of the application: `manage.py check --database default`.

    Warnings, all of them: an error would stop the very migration that puts it right.
    """
    using = [connections[alias] for alias in databases or ()]
    return [found for connection in using if connection.vendor == "postgresql" for found in _check(connection)]


def _check(connection: Any) -> Iterator[checks.CheckMessage]:
    alias = connection.alias
    with connection.cursor() as cursor:
        cursor.execute(_FACTS)
        installed, may_ask, may_emit = cursor.fetchone()
        if not installed:
            hint = "Run a migration with outbox.install_sql(), or silence outbox.W001 if nothing emits there."
            yield checks.Warning(f"outbox is not installed in database {alias!r}", hint=hint, id="outbox.W001")
            return
        if may_ask:
            cursor.execute("select outbox.version()")
            (version,) = cursor.fetchone()
            if version != outbox.__version__:
                text = f"database {alias!r} has outbox {version}, and pg-outbox is {outbox.__version__}"
                hint = "Upgrade the database by a migration with outbox.install_sql(upgrade_from=...)."
                yield checks.Warning(text, hint=hint, id="outbox.W002")
        if not may_emit:
            user = connection.settings_dict["USER"]
            text = f"user {user!r} may not emit in database {alias!r}"
            hint = f"The owner of the package can allow it: select outbox.grant_emit('{user}')"
            yield checks.Warning(text, hint=hint, id="outbox.W003")
