"""Every kind of connection that emit() takes, opened by its own library, behind the same few verbs."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import django
import psycopg
from django.conf import settings as django_settings
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

from outbox.testing import Emitted, Outbox


@dataclass
class Waiting:
    """What other sessions see."""

    db: psycopg.Connection[Any]

    def __call__(self) -> list[Emitted]:
        found: list[Emitted] = Outbox(self.db).messages()
        return found

    def keys(self) -> list[str]:
        return [message.routing_key for message in self()]


async def value(result: Any) -> Any:
    """What a sync call returned, or what an async one returns when awaited."""
    return await result if inspect.isawaitable(result) else result


@dataclass
class Opened:
    """A connection with a transaction to write in. nested() is a block of its own that is rolled back at its end."""

    conn: Any
    commit: Callable[[], Any]
    rollback: Callable[[], Any]
    nested: Callable[[], AbstractAsyncContextManager[Any]]


def as_async(make: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def block() -> AsyncIterator[None]:
        with make():
            yield

    return block


@asynccontextmanager
async def psycopg_sync(dsn: str) -> AsyncIterator[Opened]:
    with psycopg.connect(dsn) as conn:
        yield Opened(conn, conn.commit, conn.rollback, as_async(lambda: conn.transaction(force_rollback=True)))


@asynccontextmanager
async def psycopg_cursor(dsn: str) -> AsyncIterator[Opened]:
    async with psycopg_sync(dsn) as opened:
        opened.conn = opened.conn.cursor()
        yield opened


@asynccontextmanager
async def psycopg_set_up_otherwise(dsn: str) -> AsyncIterator[Opened]:
    """Other rows and other placeholders than psycopg's own."""
    async with psycopg_sync(dsn) as opened:
        opened.conn.row_factory = psycopg.rows.dict_row
        opened.conn.cursor_factory = psycopg.RawCursor
        yield opened


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[Opened]:
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        yield Opened(conn, conn.commit, conn.rollback, lambda: conn.transaction(force_rollback=True))


@asynccontextmanager
async def psycopg_async_cursor(dsn: str) -> AsyncIterator[Opened]:
    async with psycopg_async(dsn) as opened:
        opened.conn = opened.conn.cursor()
        yield opened


def url(dsn: str, driver: str) -> str:
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


def rolled_back(begin_nested: Callable[[], Any]) -> Callable[[], AbstractAsyncContextManager[Any]]:
    @asynccontextmanager
    async def block() -> AsyncIterator[None]:
        nested = await value(begin_nested())
        yield
        await value(nested.rollback())

    return block


@contextmanager
def engine(dsn: str) -> Iterator[Any]:
    made = create_engine(url(dsn, "psycopg"), poolclass=NullPool)
    yield made
    made.dispose()


@asynccontextmanager
async def sqlalchemy_connection(dsn: str) -> AsyncIterator[Opened]:
    with engine(dsn) as made, made.connect() as conn:
        yield Opened(conn, conn.commit, conn.rollback, rolled_back(conn.begin_nested))


@asynccontextmanager
async def sqlalchemy_session(dsn: str) -> AsyncIterator[Opened]:
    with engine(dsn) as made, Session(made) as session:
        yield Opened(session, session.commit, session.rollback, rolled_back(session.begin_nested))


@asynccontextmanager
async def sqlalchemy_scoped_session(dsn: str) -> AsyncIterator[Opened]:
    with engine(dsn) as made:
        session = scoped_session(sessionmaker(made))
        yield Opened(session, session.commit, session.rollback, rolled_back(session.begin_nested))
        session.remove()


def sqlalchemy_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[Opened]]:
    @asynccontextmanager
    async def kind(dsn: str) -> AsyncIterator[Opened]:
        made = create_async_engine(url(dsn, driver), poolclass=NullPool)
        async with made.connect() as conn:
            yield Opened(conn, conn.commit, conn.rollback, rolled_back(conn.begin_nested))
        await made.dispose()

    return kind


def sqlalchemy_async_session(driver: str) -> Callable[[str], AbstractAsyncContextManager[Opened]]:
    @asynccontextmanager
    async def kind(dsn: str) -> AsyncIterator[Opened]:
        made = create_async_engine(url(dsn, driver), poolclass=NullPool)
        async with AsyncSession(made) as session:
            yield Opened(session, session.commit, session.rollback, rolled_back(session.begin_nested))
        await made.dispose()

    return kind


@asynccontextmanager
async def sqlalchemy_async_scoped_session(dsn: str) -> AsyncIterator[Opened]:
    made = create_async_engine(url(dsn, "asyncpg"), poolclass=NullPool)
    session = async_scoped_session(async_sessionmaker(made), scopefunc=lambda: None)
    yield Opened(session, session.commit, session.rollback, rolled_back(session.begin_nested))
    await session.remove()
    await made.dispose()


def django_place(dsn: str) -> dict[str, Any]:
    """A database as Django's settings name it."""
    at = urlsplit(dsn)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": at.path[1:],
        "USER": at.username,
        "PASSWORD": at.password,
        "HOST": at.hostname,
        "PORT": at.port,
    }


def django_connection(dsn: str) -> Any:
    """django.db.connection, for this database."""
    if not django_settings.configured:
        django_settings.configure(DATABASES={"default": django_place(dsn)}, INSTALLED_APPS=["outbox.django"])
        django.setup()
    from django.db import connection  # noqa: PLC0415 - needs the settings

    connection.close()
    connection.settings_dict.update(django_place(dsn))
    return connection


@asynccontextmanager
async def django_sync(dsn: str) -> AsyncIterator[Opened]:
    connection = django_connection(dsn)
    from django.db import transaction  # noqa: PLC0415 - needs the settings

    @contextmanager
    def nested() -> Iterator[None]:
        with transaction.atomic():
            yield
            transaction.set_rollback(rollback=True)

    transaction.set_autocommit(autocommit=False)
    yield Opened(connection, connection.commit, connection.rollback, as_async(nested))
    connection.rollback()
    connection.close()


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[Opened]:
    conn = await asyncpg.connect(dsn)
    # As applications set it up that keep JSON in columns.
    await conn.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    async with in_transaction(conn) as opened:
        yield opened
    await conn.close()


@asynccontextmanager
async def asyncpg_pooled(dsn: str) -> AsyncIterator[Opened]:
    async with (
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool,
        pool.acquire() as conn,
        in_transaction(conn) as opened,
    ):
        yield opened


@asynccontextmanager
async def in_transaction(conn: Any) -> AsyncIterator[Opened]:
    outer = conn.transaction()
    await outer.start()

    @asynccontextmanager
    async def nested() -> AsyncIterator[None]:
        inner = conn.transaction()
        await inner.start()
        yield
        await inner.rollback()

    yield Opened(conn, outer.commit, outer.rollback, nested)
    with contextlib.suppress(asyncpg.InterfaceError):  # when the test has ended it already
        await outer.rollback()


KINDS: dict[str, Callable[[str], AbstractAsyncContextManager[Opened]]] = {
    "psycopg Connection": psycopg_sync,
    "psycopg Cursor": psycopg_cursor,
    "psycopg with other rows": psycopg_set_up_otherwise,
    "psycopg AsyncConnection": psycopg_async,
    "psycopg AsyncCursor": psycopg_async_cursor,
    "SQLAlchemy Connection": sqlalchemy_connection,
    "SQLAlchemy Session": sqlalchemy_session,
    "SQLAlchemy scoped_session": sqlalchemy_scoped_session,
    "SQLAlchemy AsyncConnection, psycopg": sqlalchemy_async_connection("psycopg"),
    "SQLAlchemy AsyncConnection, asyncpg": sqlalchemy_async_connection("asyncpg"),
    "SQLAlchemy AsyncSession, psycopg": sqlalchemy_async_session("psycopg"),
    "SQLAlchemy AsyncSession, asyncpg": sqlalchemy_async_session("asyncpg"),
    "SQLAlchemy async_scoped_session": sqlalchemy_async_scoped_session,
    "Django": django_sync,
    "asyncpg Connection": asyncpg_connection,
    "asyncpg pooled": asyncpg_pooled,
}
