"""Where the server listens, and how it ends: a signal ends running requests with an error, and then the process."""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from traces.errors import InputError

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the server, unless what started it ignores them, as `nohup` does a closed terminal's SIGHUP."""

GRACE_S = 5
"""After a signal, how long clients have to read the rest of their answers."""

MOST_CLIENTS = 128
"""Connections at a time: some systems let a process open 256 files."""

MOST_AT_ONCE = 32
"""Connections that are accepted before any of them is looked at."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; clients wait until it is served. Raise InputError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError, TypeError) as error:  # the last two: a host that is no text, or none of a host's
        raise InputError(f"cannot listen at --host {host!a}, --port {port}: {error}; choose others") from error


class Connection(H11Protocol):
    """A client. Where there are too many, the one whose request has been awaited longest is left."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's own
        """Take a client, in another's place if need be."""
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > MOST_CLIENTS:
            others = [each for each in self.connections if isinstance(each, Connection) and each.is_awaited]
            longest = min(others, key=lambda each: each._since)  # this one is among them
            self.connections.discard(longest)
            longest.transport.abort()

    @property
    def is_awaited(self) -> bool:
        """Whether a request has not arrived whole."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; behind the beginning of another answer none can follow."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()


def config_of(app: FastAPI) -> uvicorn.Config:
    """Return how `app` is served."""
    return uvicorn.Config(app, http=Connection, backlog=MOST_AT_ONCE, log_level="warning", lifespan="off")


class Listener(uvicorn.Server):
    """Serves `app` until a signal of ENDS. on_start: called once clients are served; on_end: before they are left."""

    def __init__(self, app: FastAPI, on_start: Callable[[], None], on_end: Callable[[], None]) -> None:
        super().__init__(config_of(app))
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
        numbers = [number for number in ENDS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
