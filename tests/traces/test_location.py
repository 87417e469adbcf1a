"""A trace at a URL is the trace that it is in a folder, and what cannot be had is told in one line."""

import os
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.registry import _registry

import sim.commands
import tracer.commands
from tests.support.command import run
from tests.support.same import assert_same, assert_same_shards
from traces import demo_trace
from traces.edit import Source, join
from traces.errors import InputError
from traces.location import Location
from traces.reader import EXTRA
from traces.schema import REQUESTS, ROUTING
from traces.shards import Shards
from traces.stream import pieces
from traces.synthetic import synthetic
from traces.trace import Trace, concatenate
from traces.writer import write_trace

PART = f"{ROUTING}/part-00000.parquet"


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
    assert_same_shards(Trace.read(demo_trace(), ["lookahead", "token_id"]), Shards.open(memory))
    assert Shards.open(memory + "/").fingerprint == Shards.open(demo_trace()).fingerprint


def test_a_growing_trace_in_an_object_store_is_read(memory: str) -> None:
    files = fsspec.filesystem("memory")
    files.mv(f"/place/demo/{REQUESTS}", "/place/demo/requests/part-00000.parquet")
    assert_same_shards(Trace.read(demo_trace(), ["lookahead", "token_id"]), Shards.open(memory))


def test_a_trace_at_a_url_can_be_joined(memory: str, tmp_path: Path) -> None:
    join([Source.open(memory)], tmp_path / "demo")
    np.testing.assert_array_equal(Trace.read(demo_trace()).experts, Trace.read(tmp_path / "demo").experts)


def test_a_trace_on_a_web_server_is_the_same_trace(served: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("traces.writer.FILE_ROWS", 50)
    monkeypatch.setattr("traces.parquet.ROW_GROUP_BYTES", 500)
    trace = synthetic(30, 5, 2, 6, 2, seed=0, prompt_tokens=3)
    write_trace(trace, tmp_path / "t")
    shards = Shards.open(f"{served}/t")
    assert_same_shards(Trace.read(tmp_path / "t", ["lookahead"]), shards)
    assert shards.fingerprint == Shards.open(tmp_path / "t").fingerprint
    assert_same(Trace.read(tmp_path / "t"), Trace.read(f"{served}/t/"))


def told(url: str) -> str:
    with pytest.raises(InputError) as error:
        Shards.open(url)
    with pytest.raises(InputError):
        Trace.read(url)
    assert "\n" not in str(error.value)
    return str(error.value)


class Plain(SimpleHTTPRequestHandler):
    """Python's file server as it is: it gives whole files alone."""

    def log_message(self, *_: Any) -> None:
        pass


def test_a_web_server_without_byte_ranges_is_told_with_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not there")
    write_trace(synthetic(20, 500, 8, 64, 6, seed=0), tmp_path / "t")  # larger than what is fetched at once
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Plain, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        assert "does not answer byte ranges: copy the trace here" in told(f"http://127.0.0.1:{server.server_port}/t")
        server.shutdown()


def test_a_web_server_that_does_not_answer_or_lacks_the_trace_is_told(served: str, tmp_path: Path) -> None:
    assert told(f"{served}/none").startswith(f"no trace at {served}/none: there is no such folder")
    (tmp_path / "empty").mkdir()
    assert "is not a trace: it has no requests.parquet" in told(f"{served}/empty")
    assert "http://127.0.0.1:9/t cannot be" in told("http://127.0.0.1:9/t")


def test_a_file_that_goes_while_it_is_read_over_the_network_is_told(served: str, tmp_path: Path) -> None:
    write_trace(synthetic(3, 5, 2, 6, 2, seed=0), tmp_path / "t")
    shards = Shards.open(f"{served}/t")
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(InputError, match=rf"{served}/t/{PART} "):
        shards.steps(0)


def test_a_place_without_a_trace_is_told() -> None:
    assert told("memory://nowhere/t").startswith("no trace at memory://nowhere/t: there is no such folder")


def test_an_unknown_protocol_is_told() -> None:
    assert told("nonsense://bucket/t") == "nonsense://bucket/t cannot be opened: Protocol not known: nonsense"


def test_a_protocol_that_lacks_its_package_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("s3fs", "aiobotocore", "aiobotocore.session"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(_registry, "s3", raising=False)
    assert "s3://bucket/t cannot be opened: Install s3fs" in told("s3://bucket/t")


@pytest.mark.parametrize("name", [REQUESTS, PART])
def test_a_damaged_file_in_an_object_store_is_told(memory: str, name: str) -> None:
    files = fsspec.filesystem("memory")
    files.pipe(f"/place/demo/{name}", b"")
    assert told(memory) == f"{memory}/{name} is empty (0 bytes)"
    files.pipe(f"/place/demo/{name}", b"PAR1 and no more")
    assert f"{memory}/{name} is truncated, or no Parquet file" in told(memory)
    files.rm(f"/place/demo/{name}")
    assert "not a" in told(memory)


def test_a_file_at_a_url_is_no_trace(memory: str) -> None:
    assert told(f"{memory}/{REQUESTS}") == f"{memory}/{REQUESTS} is a file; a trace is a folder"


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
    for command in ("info", "validate"):
        ended = run(tracer.commands.main, command, memory)
        assert (ended.returncode, memory in ended.stdout) == (0, True), ended.stderr
    for sub in (("slice", memory, "--requests", "0:1"), ("cat", memory)):
        ended = run(tracer.commands.main, *sub, "--out", tmp_path / sub[0])
        assert ended.returncode == 0, ended.stderr
    ended = run(sim.commands.main, "eamc", "build", memory, "--out", tmp_path / "eamc.npz")
    assert ended.returncode == 0, ended.stderr


def test_a_nul_in_a_path_is_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="cannot be opened: no path holds a NUL"):
        Location.of("a\0b")
