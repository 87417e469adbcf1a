"""Where the server listens, and how it ends: a signal ends running requests with an error, and then the process."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from traces.errors import InputError

GRACE_S = 5
"""After a signal, how long clients have to read the rest of their answers."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; clients wait until it is served. Raise InputError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError, TypeError) as error:  # the last two: a host that is no text, or none of a host's
        raise InputError(f"cannot listen at --host {host!a}, --port {port}: {error}; choose others") from error


class Listener(uvicorn.Server):
    """Serves `app` until SIGINT or SIGTERM. on_start: called once clients are served; on_end: before they are left."""

    def __init__(self, app: FastAPI, on_start: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._on_start, self._on_end = on_start, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve."""
        await super().startup(sockets)
        self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs end with its error; then leave clients that do not read it."""
        self._on_end()
        asyncio.get_running_loop().call_later(GRACE_S, self._leave)
        await super().shutdown(sockets)

    def _leave(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Let signals end the server only; uvicorn would raise them again after it, and SIGTERM kills the process."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
