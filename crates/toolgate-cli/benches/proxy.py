"""A FastMCP proxy before an upstream. Its first line has its address.

    python proxy.py UPSTREAM fresh|shared

`fresh` opens an upstream session for each request, which is the default of FastMCP. `shared` opens
one session for all requests, with the revision of the proxy's own clients.
"""

import asyncio
import logging
import socket
import sys

from fastmcp import Client
from fastmcp.server import create_proxy

logging.disable(logging.CRITICAL)


async def main(upstream, sessions):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {"transport": "http", "host": "127.0.0.1", "port": port, "log_level": "critical", "show_banner": False}
    print(f"http://127.0.0.1:{port}/mcp", flush=True)
    if sessions == "fresh":
        await create_proxy(upstream, name="proxy").run_async(**options)
        return
    # The proxy uses a client that is already connected.
    async with Client(upstream, mode="legacy") as client:
        await create_proxy(client, name="proxy").run_async(**options)


asyncio.run(main(*sys.argv[1:]))
