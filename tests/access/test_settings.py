"""Whatever is set for a role, the functions do and answer the same; or they refuse, and say why."""

from __future__ import annotations

from urllib.parse import urlsplit

import psycopg
import pytest
from access.rights import refused
from access.story import tell

import databases
from databases import SERVER, Roles, as_user, psql, query

# What roles may set for themselves, and what a superuser may set for them.
SETTINGS = {
    "how values are written": (
        "array_nulls = off",
        "backslash_quote = off",
        "bytea_output = escape",
        "DateStyle = German",
        "extra_float_digits = -15",
        "IntervalStyle = iso_8601",
        "lc_monetary = 'C'",
        "lc_numeric = 'C'",
        "quote_all_identifiers = on",
        "TimeZone = 'Asia/Kathmandu'",
        "transform_null_equals = on",
        "xmlbinary = hex",
    ),
    "how values are written, otherwise": (
        "DateStyle = 'SQL, DMY'",
        "IntervalStyle = sql_standard",
        "TimeZone = 'America/New_York'",
    ),
    "how values are written, at length": ("DateStyle = Postgres", "IntervalStyle = postgres_verbose"),
    "how constants are read": ("escape_string_warning = off", "standard_conforming_strings = off"),
    "plans without indexes": (
        "enable_bitmapscan = off",
        "enable_hashagg = off",
        "enable_hashjoin = off",
        "enable_indexonlyscan = off",
        "enable_indexscan = off",
        "enable_tidscan = off",
        "from_collapse_limit = 1",
        "geqo_threshold = 2",
        "jit_above_cost = 0",
        "join_collapse_limit = 1",
        "parallel_setup_cost = 0",
        "plan_cache_mode = force_custom_plan",
        "work_mem = '64kB'",
    ),
    "plans with nothing else": (
        "cursor_tuple_fraction = 1",
        "enable_material = off",
        "enable_mergejoin = off",
        "enable_nestloop = off",
        "enable_seqscan = off",
        "enable_sort = off",
        "plan_cache_mode = force_generic_plan",
    ),
    "how tables are made and found": (
        "check_function_bodies = off",
        "default_table_access_method = heap",
        "default_tablespace = no_such_tablespace",
        "default_toast_compression = pglz",
        "row_security = off",
        "search_path = ''",
        "temp_tablespaces = no_such_tablespace",
    ),
    "transactions": (
        "default_transaction_deferrable = on",
        "idle_in_transaction_session_timeout = '1min'",
        "lock_timeout = '1min'",
        "statement_timeout = '1min'",
        "synchronous_commit = off",
    ),
    "what is said": (
        "client_min_messages = debug5",
        "plpgsql.extra_errors = 'all'",
        "plpgsql.extra_warnings = 'all'",
    ),
    "no triggers": ("session_replication_role = replica",),
    "our own": ("outbox.context = ''", "outbox.notify = off", "outbox.relay = ''", "outbox.tracking = ''"),
}
# Settings under which a role cannot do its work, and what it is told when it emits and when it claims.
REFUSED = {
    "default_transaction_isolation = serializable": ("", "OB010"),
    "default_transaction_read_only = on": ("25006", "25006"),
    "outbox.context = 'nonsense'": ("OB003", ""),
    "outbox.context = '{\"x-death\": 1}'": ("OB003", ""),
    "outbox.context = '{\"x'": ("22P02", ""),
    "outbox.tracking = 'nonsense'": ("OB003", ""),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_same_under(dsn: str, roles: Roles, kind: str) -> None:
    parts = {part: roles.make(part) for part in ("emit", "relay", "admin")}
    psql(dsn, text="".join(f"select outbox.grant_{part}('{role}');" for part, role in parts.items()))
    with databases.database(SERVER, template=urlsplit(dsn).path[1:]) as reference:
        expected = tell(reference, parts)
    for role in parts.values():
        psql(SERVER, text="".join(f"alter role {role} set {setting};" for setting in SETTINGS[kind]))
    told = tell(dsn, parts)
    assert {key: told[key] for key in told if told[key] != expected[key]} == {}


@pytest.mark.parametrize("setting", REFUSED)
def test_refused_under(dsn: str, roles: Roles, setting: str) -> None:
    shop, relay = roles.make("shop"), roles.make("relay")
    query(dsn, f"select outbox.grant_emit('{shop}'), outbox.grant_relay('{relay}')")
    for role in (shop, relay):
        query(SERVER, f"alter role {role} set {setting}")
    codes = []
    for role, call in ((shop, "emit('a', '1')"), (relay, "claim_batch(gen_random_uuid())")):
        with psycopg.connect(as_user(dsn, role), autocommit=True) as connection:
            codes.append(refused(connection, f"select outbox.{call}"))
    assert tuple(codes) == REFUSED[setting]
    assert query(dsn, "select count(*) from outbox.message") == ("0" if codes[0] else "1")
