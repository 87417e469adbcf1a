"""Clients that are no honest ones: the server says so in a line, and serves the next one."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from fastapi import FastAPI

from replay.live.listening import MOST_AT_ONCE, MOST_CLIENTS, Listener, config_of, listen

ASK = b"GET /health HTTP/1.1\r\nHost: x\r\n"
LAST = ASK + b"Connection: close\r\n\r\n"


@pytest.fixture
def port() -> Iterator[int]:
    app = FastAPI()

    @app.get("/health")
    async def health() -> str:
        return "ok"

    running = uvicorn.Server(config_of(app))
    with listen("127.0.0.1", 0) as bound:
        thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield bound.getsockname()[1]
        running.should_exit = True
        thread.join()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def rest(client: socket.socket) -> bytes:
    """All that the server sends until it ends the connection."""
    return b"".join(iter(lambda: client.recv(65_536), b""))


def test_a_body_that_is_damaged_behind_the_answer_ends_that_connection(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    with connected(port) as client:
        client.sendall(ASK + b"Transfer-Encoding: chunked\r\n\r\n")
        answer = client.recv(65_536)
        assert answer.startswith(b"HTTP/1.1 200")
        client.sendall(b"ZZ\r\n")
        assert b"HTTP/1.1" not in rest(client)
    with connected(port) as client:
        client.sendall(LAST)
        assert rest(client).startswith(b"HTTP/1.1 200")
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


def test_clients_that_send_nothing_make_room_for_one_that_asks(port: int, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(connected(port)) for _ in range(MOST_CLIENTS + MOST_AT_ONCE)]
        asking = opened.enter_context(connected(port))
        asking.sendall(LAST)
        assert rest(asking).startswith(b"HTTP/1.1 200")
        assert rest(silent[0]) == b""
        silent[-1].sendall(LAST)
        assert rest(silent[-1]).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_a_closed_terminal_ends_the_server_as_other_signals_do_unless_that_is_ignored() -> None:
    ended = []
    for ignored in (False, True):
        server = Listener(FastAPI(), lambda: None, lambda: None)
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
        try:
            with server.capture_signals():
                if signal.getsignal(signal.SIGHUP) != signal.SIG_DFL:  # or the tests would end
                    signal.raise_signal(signal.SIGHUP)
        finally:
            signal.signal(signal.SIGHUP, before)
        ended.append(server.should_exit)
    assert ended == [True, False]
