"""`outbox relay --check`: tries everything a relay needs, changes nothing, and says what it found."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping
from dataclasses import replace

import psycopg
from aiormq.exceptions import ChannelAccessRefused, ChannelPreconditionFailed
from pamqp.commands import Basic
from psycopg.conninfo import conninfo_to_dict
from yarl import URL

from outbox import store
from outbox.config import RelaySettings
from outbox.errors import ConfigurationError, OutboxError, UnavailableError
from outbox.publish import Publisher, within
from outbox.session import connection_settings, translated
from outbox.store import Store
from outbox.tls import is_local

FACTS = """
    select current_setting('server_version'), current_user, s.version
    from pg_stat_ssl as s
    where s.pid = pg_backend_pid()
"""
DENIED = """
    select p.proname
    from pg_proc as p
    where p.pronamespace = (select n.oid from pg_namespace as n where n.nspname = 'outbox')
      and p.proname = any (%s)
      and not has_function_privilege(p.oid, 'execute')
    order by 1
"""
# What a relay calls is what its statements name.
CALLED = sorted(
    {name for text in vars(store).values() if isinstance(text, str) for name in re.findall(r"outbox\.(\w+)\(", text)}
)
LISTEN_WITHIN = 5.0
ENOUGH = {"verify-full", "verify-ca"}


class Report:
    def __init__(self) -> None:
        self.status = 0

    def say(self, word: str, text: str) -> None:
        sys.stdout.write(f"{word:<5} {text}\n")
        sys.stdout.flush()

    def failed(self, what: str, error: OutboxError) -> None:
        self.say("FAIL", f"{what}: {error}")
        self.status = max(self.status, 1 if isinstance(error, UnavailableError) else 2)


async def check(every: Mapping[str, RelaySettings]) -> int:
    report, exchanges = Report(), set()
    first = next(iter(every.values()))
    report.say("ok", f"settings: lease {first.lease:g} s, window {first.window}, batches of {first.batch_size}")
    for name, settings in every.items():
        try:
            exchanges.add(await check_database(f"database {name}", settings, report))
        except OutboxError as error:
            report.failed(f"database {name}", error)
    for number, url in enumerate(first.brokers, 1):
        what = "broker" if len(first.brokers) == 1 else f"broker {number}"
        for exchange in exchanges or {""}:
            try:
                await check_broker(what, first, url, exchange, report)
            except OutboxError as error:
                report.failed(what, error)
    report.say(
        "ok" if report.status == 0 else "FAIL", "ready to relay" if report.status == 0 else "a relay would not work"
    )
    return report.status


async def check_database(what: str, settings: RelaySettings, report: Report) -> str:
    with translated(None):
        connection = await psycopg.AsyncConnection.connect(
            settings.dsn, autocommit=True, **connection_settings(settings.dsn)
        )
    async with connection:
        with translated(connection):
            facts = await (await connection.execute(FACTS)).fetchone()
            assert facts is not None
            version, role, tls = facts
            report.say("ok", f"{what}: PostgreSQL {version}, role {role}, {tls or 'not encrypted'}")
            parts = conninfo_to_dict(settings.dsn)
            if (
                not is_local(parts)
                and (connection_settings(settings.dsn).get("sslmode") or parts.get("sslmode")) not in ENOUGH
            ):
                report.say("note", f"{what}: its certificate is not verified; sslmode=verify-full does that")
            denied = [name for (name,) in await (await connection.execute(DENIED, [CALLED])).fetchall()]
    own = Store(settings)
    try:
        if denied:
            raise ConfigurationError(
                f"role {role!r} may not call {', '.join(denied)}: the owner of the package can allow it"
                f" with `select outbox.grant_relay('{role}')`"
            )
        await own.connect()
        report.say("ok", f"{what}: has the package, and the role may relay")
        listening = asyncio.Event()
        task = asyncio.create_task(own.listen(listening.set, lambda: None))
        done, _ = await asyncio.wait({task, asyncio.create_task(listening.wait())}, timeout=LISTEN_WITHIN,
                                     return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        if task in done:
            report.say("note", f"{what}: {task.exception()}; messages leave within --poll {settings.poll:g} s")
        else:
            report.say("ok", f"{what}: notifications arrive")
        task.cancel()
        await asyncio.wait({task})
        return own.default_exchange
    finally:
        await own.close()


async def check_broker(what: str, settings: RelaySettings, url: str, exchange: str, report: Report) -> None:
    at = URL(url)
    publisher = await Publisher(replace(settings, declare=False)).open(url, exchange or "amq.topic")
    try:
        report.say(
            "ok", f"{what}: {at.host}, user {at.user or 'guest'}, {'TLS' if at.scheme == 'amqps' else 'not encrypted'}"
        )
        if at.scheme != "amqps" and not is_local({"host": at.host}):
            report.say("note", f"{what}: what it is sent, and the password, can be read on the way; amqps:// encrypts")
        if exchange:
            async with within(settings.confirm_timeout):
                channel = await publisher.connection.channel()
                try:
                    # Never accepted: the broker looks at the rights first and at this second.
                    never = Basic.Properties(expiration="-1")
                    await channel.basic_publish(b"", exchange=exchange, routing_key="outbox.check", properties=never)
                except ChannelPreconditionFailed:
                    pass
                except ChannelAccessRefused:
                    raise ConfigurationError(
                        f"user {at.user or 'guest'!r} may not write to exchange {exchange!r}:"
                        " an administrator of the broker gives it the permission `write` there"
                    ) from None
            report.say("ok", f"{what}: exchange {exchange!r} is there, and the user may write to it")
    finally:
        await publisher.close()
