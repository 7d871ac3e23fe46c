"""A gateway that passes bytes on: `passthrough.py LISTEN UPSTREAM`, both ports on loopback."""

from __future__ import annotations

import asyncio
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(listen: int, upstream: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", upstream)
        await asyncio.gather(copy(reader, forth), copy(back, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", listen, backlog=512)
    await server.serve_forever()


asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
