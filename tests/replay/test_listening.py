"""Clients that are no honest ones: the server says so in a line, and serves the next one."""

import os
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_is_not_raised_again_behind_it(number: signal.Signals) -> None:
    before, told = signal.signal(number, signal.SIG_DFL), list[str]()  # `nohup` and shells ignore some in these tests
    listener = Listener(FastAPI(), lambda: os.kill(os.getpid(), number), lambda: told.append("it ends"))
    with listen("127.0.0.1", 0) as bound:
        listener.run([bound])
    assert told == ["it ends"]
    assert signal.signal(number, before) == signal.SIG_DFL


def test_what_is_ignored_from_the_start_does_not_end_the_server() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Listener(FastAPI(), lambda: None, lambda: None).capture_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
