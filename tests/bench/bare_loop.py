"""The least that forwards: LISTEN, publish each row confirmed, delete. What the relay's latency is compared with."""

from __future__ import annotations

import asyncio
import sys

import aio_pika
import psycopg

from outbox import loop


async def main(dsn: str, amqp_url: str) -> None:
    broker = await aio_pika.connect(amqp_url)
    channel = await broker.channel(publisher_confirms=True, on_return_raises=True)
    exchange = await channel.get_exchange("outbox", ensure=False)
    listener = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
    worker = await psycopg.AsyncConnection.connect(dsn)
    await listener.execute("listen bare")
    while True:
        async for _ in listener.notifies(timeout=1, stop_after=1):
            pass
        while True:
            async with worker.transaction():
                found = await worker.execute("select id, body from bare order by id limit 100 for update skip locked")
                rows = await found.fetchall()
                await asyncio.gather(
                    *(
                        exchange.publish(
                            aio_pika.Message(body.encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT),
                            "bench",
                            mandatory=True,
                        )
                        for _, body in rows
                    )
                )
                await worker.execute("delete from bare where id = any (%s)", [[number for number, _ in rows]])
            if not rows:
                break


if __name__ == "__main__":
    loop.run(main(*sys.argv[1:]))
