"""`moe-replay serve` as a process: what it refuses before it loads a model, and how it ends."""

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest
from openai import OpenAI

from replay.commands import main
from tests.support.command import run
from tests.support.live_models import saved
from tests.support.tokenizer import byte_tokenizer


def _waits(address: str) -> bool:
    """Whether a request waits for its turn, by now or in a moment."""
    time.sleep(0.05)
    with urlopen(address.replace("v1", "metrics")) as metrics:
        return b"moe_waiting 1.0" in metrics.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_running_requests_with_an_error_and_the_server_without_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = saved(tmp_path / "tiny", "qwen3_moe", max_position_embeddings=1 << 20)
    byte_tokenizer().save_pretrained(folder)
    command = ["serve", "--model", folder, "--cache-size", "5", "--lanes", "1", "--port", "0", "--max-batch", "1"]
    code = [sys.executable, "-c", "from replay.commands import main; main()"]
    with (
        subprocess.Popen([*code, *map(str, command)], stderr=subprocess.PIPE, text=True) as server,
        ThreadPoolExecutor() as pool,
    ):
        try:
            assert server.stderr is not None
            address = re.search(r"http://\S+/v1", server.stderr.readline())
            assert address is not None
            with OpenAI(base_url=address[0], api_key="none", max_retries=0, timeout=20) as client:
                asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 10**6}
                stream = client.completions.create(**asked, temperature=0, stream=True)  # sampling would draw an end
                next(stream)
                waiting = pool.submit(lambda: client.completions.create(model="tiny", prompt="Hi", max_tokens=9))
                assert any(_waits(address[0]) for _ in range(200))
                server.send_signal(number)
                with pytest.raises(openai.APIError, match="shutting down"):
                    list(stream)
                with pytest.raises(openai.InternalServerError, match="503"):
                    waiting.result()
            told = server.stderr.read().splitlines()
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert [line.partition(":")[0] for line in told] == ["memory", "stopped serving"]


def test_what_cannot_be_listened_at_is_refused_before_a_model_is_sought() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(main, "serve", "--model", "/nowhere", "--port", port)
    assert done.returncode == 2
    assert re.fullmatch(rf"moe-replay: error: cannot listen at .*{port}: .*in use.*\n", done.stderr)


def test_beyond_this_computer_a_key_is_needed() -> None:
    done = run(main, "serve", "--model", "/nowhere", "--host", "0.0.0.0")
    assert done.returncode == 2
    assert "--api-key" in done.stderr
