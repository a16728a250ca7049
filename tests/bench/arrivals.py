"""Writes the number in each message that arrives, and when. A process of its own: whoever emits must not delay it."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiormq
from aiormq.abc import DeliveredMessage


async def note(message: DeliveredMessage) -> None:
    at = time.perf_counter()
    print(json.loads(message.body)["n"], at, flush=True)


async def main(amqp_url: str) -> None:
    connection = await aiormq.connect(amqp_url)
    channel = await connection.channel()
    await channel.basic_consume("bench", note, no_ack=True)
    print(flush=True)  # ready
    await connection.closing


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
