"""A trace at a URL is the trace that it is in a folder, and what cannot be had is told in one line."""

import os
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest

import tracer.commands
from tests.support.command import run
from tests.support.same import assert_same, assert_same_shards
from traces import Trace, demo_trace
from traces.reader import EXTRA, RUN
from traces.schema import REQUESTS
from traces.shards import Shards
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.trace import concatenate
from traces.writer import write_trace


@pytest.fixture
def memory() -> Iterator[str]:
    """The shipped trace, at a URL."""
    files = fsspec.filesystem("memory")
    files.put(f"{demo_trace()}/", "/place/demo/", recursive=True)
    yield "memory://place/demo"
    files.rm("/place", recursive=True)


class Ranges(SimpleHTTPRequestHandler):
    """Python's file server, and the part of a file that is asked for, which it cannot give by itself."""

    def do_GET(self) -> None:
        path, asked = Path(self.translate_path(self.path)), self.headers.get("Range")
        if not asked or not path.is_file():
            return super().do_GET()
        first, last = asked.removeprefix("bytes=").split("-")
        size = path.stat().st_size
        start, end = int(first), min(int(last or size), size - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        self.wfile.write(path.read_bytes()[start : end + 1])
        return None

    def end_headers(self) -> None:
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL at which `tmp_path` is served."""
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not there")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_trace_in_an_object_store_is_the_same_trace(memory: str) -> None:
    whole = Trace.read(demo_trace(), EXTRA)
    assert_same(whole, Trace.read(memory, EXTRA), EXTRA)
    assert_same(whole, concatenate(list(pieces(memory, EXTRA))), EXTRA)
    assert_same_shards(Trace.read(demo_trace(), RUN), Shards.open(memory))
    assert Shards.open(memory + "/").fingerprint == Shards.open(demo_trace()).fingerprint


def test_a_growing_trace_in_an_object_store_is_read(memory: str) -> None:
    files = fsspec.filesystem("memory")
    files.mv(f"/place/demo/{REQUESTS}", "/place/demo/requests/part-00000.parquet")
    assert_same_shards(Trace.read(demo_trace(), RUN), Shards.open(memory))


def test_a_trace_on_a_web_server_is_the_same_trace(served: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("traces.writer.FILE_ROWS", 50)
    monkeypatch.setattr("traces.parquet.ROW_GROUP_BYTES", 500)
    trace = synthetic(30, 5, 2, 6, 2, seed=0, prompt_tokens=3)
    write_trace(trace, tmp_path / "t")
    shards = Shards.open(f"{served}/t")
    assert_same_shards(Trace.read(tmp_path / "t", RUN), shards)
    assert shards.fingerprint == Shards.open(tmp_path / "t").fingerprint
    assert_same(Trace.read(tmp_path / "t"), Trace.read(f"{served}/t/"))


def test_a_relative_path_and_a_file_url_are_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_trace(synthetic(3, 5, 2, 6, 2, seed=0), tmp_path / "t")
    monkeypatch.chdir(tmp_path)
    prints = {Shards.open(path).fingerprint for path in ("t", "./t/", Path("t"), f"file://{tmp_path}/t")}
    assert len(prints) == 1
    assert {Shards.open(path).name for path in ("t", "./t/", "t/../t", f"file://{tmp_path}/t")} == {"t"}
    os.chdir("t")
    assert Shards.open(".").name == "t"
    np.testing.assert_array_equal(Shards.open(".").steps(0).experts, Trace.read(".").steps(0).experts)


def test_commands_read_a_trace_at_a_url(memory: str, tmp_path: Path) -> None:
    for sub in (("info", memory), ("slice", memory, "--requests", "0:1", "--out", tmp_path / "first")):
        ended = run(tracer.commands.main, *sub)
        assert ended.returncode == 0, ended.stderr
    np.testing.assert_array_equal(Trace.read(demo_trace()).head(1).experts, Trace.read(tmp_path / "first").experts)
