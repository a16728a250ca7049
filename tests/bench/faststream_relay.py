"""faststream-outbox with its relay to RabbitMQ, at its best; runs in an environment of its own, see faststream.py.

Arguments: the database, the broker, and the settings of the subscriber as JSON. With "create" instead of settings it
only makes the table.
"""

# What it imports is not in the environment of the project.
# mypy: disable-error-code="import-not-found, untyped-decorator"

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop
from faststream import FastStream
from faststream.rabbit import Channel, RabbitBroker, RabbitExchange
from faststream_outbox import OutboxBroker, make_outbox_table
from faststream_outbox.autovacuum import outbox_autovacuum_ddl
from sqlalchemy import MetaData, text
from sqlalchemy.ext.asyncio import create_async_engine


async def main(dsn: str, amqp_url: str, wanted: str) -> None:
    metadata = MetaData()
    table = make_outbox_table(metadata, table_name="outbox")
    settings = {} if wanted == "create" else json.loads(wanted)
    engine = create_async_engine(
        dsn.replace("postgresql://", "postgresql+asyncpg://", 1), pool_size=settings.get("max_workers", 1) + 1
    )
    if wanted == "create":
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
            await connection.execute(text(outbox_autovacuum_ddl("outbox")))
        await engine.dispose()
        return
    # Nothing is logged per message and no argument is validated: both cost time at every message.
    outbox = OutboxBroker(engine, outbox_table=table, logger=None, apply_types=False)
    rabbit = RabbitBroker(
        amqp_url, logger=None, default_channel=Channel(publisher_confirms=True, on_return_raises=True)
    )
    exchange = RabbitExchange("outbox", declare=False)

    @rabbit.publisher("bench", exchange, mandatory=True, persist=True)
    @outbox.subscriber("bench", **settings)
    async def forward(body: Any) -> Any:
        return body

    await FastStream(outbox, on_startup=[rabbit.connect], logger=None).run()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
