"""A FastMCP proxy before an upstream; says on its first line where it listens.

    python proxy.py UPSTREAM fresh|shared

`fresh` opens a session with the upstream for each request, as a proxy of FastMCP does of itself; `shared` has one for all of them, of the
revision that its own clients speak here.
"""

import asyncio
import logging
import socket
import sys

from fastmcp import Client
from fastmcp.server import create_proxy

logging.disable(logging.CRITICAL)


async def main(upstream, sessions):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"transport": "http", "host": "127.0.0.1", "port": port, "log_level": "critical", "show_banner": False}
    print(f"http://127.0.0.1:{port}/mcp", flush=True)
    if sessions == "fresh":
        await create_proxy(upstream, name="proxy").run_async(**options)
        return
    # A client that is connected already is the one that its proxy uses.
    async with Client(upstream, mode="legacy") as client:
        await create_proxy(client, name="proxy").run_async(**options)


asyncio.run(main(*sys.argv[1:]))
