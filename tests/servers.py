"""A web server in a thread of its own, which runs its own event loop there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from faces import in_thread


class _Server(uvicorn.Server):
    """Says when it is up, or will never be."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.up.set()


@asynccontextmanager
async def served(app: Any, loop: str = "asyncio") -> AsyncIterator[str]:
    """Serve an app until the end of the block; gives the address, `127.0.0.1:port`."""
    server = _Server(uvicorn.Config(app, port=0, loop=loop, lifespan="on", log_level="error"))
    serving = asyncio.create_task(in_thread(server.run))
    await in_thread(server.up.wait, 20)
    assert server.started, "the server did not start"
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
