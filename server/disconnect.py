"""Tells when the client of a request leaves, by waiting for it rather than asking after each token."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive


@asynccontextmanager
async def on_disconnect(receive: Receive, act: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `act` once if the client leaves while the block runs. The request's body must have been read."""
    watcher = asyncio.create_task(_watch(receive, act))
    try:
        yield
    finally:
        watcher.cancel()
        # Not awaited directly: that could swallow a cancellation meant for us.
        await asyncio.wait([watcher])


async def _watch(receive: Receive, act: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    act()
