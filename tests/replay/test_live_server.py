"""The server speaks OpenAI's interface to OpenAI's own client, and a request that fails leaves it as it was."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from openai import OpenAI

from replay.device_choice import DeviceChoice
from replay.live import LiveModel, Server, Shard, open_live
from replay.live.server import MOST_SENT
from tests.support.live_models import saved, whole_model
from tests.support.tokenizer import byte_tokenizer
from traces import InputError

KEY = "sesame"
READS = [10**9]
"""The disk fails after so many more reads."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved(tmp_path_factory.mktemp("tiny"), "qwen3_moe")
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[LiveModel]:
    torch.set_num_threads(1)
    with open_live(str(folder), DeviceChoice("disk", lanes=1), cache_size="5") as live:
        yield live


@pytest.fixture(scope="module")
def port(live: LiveModel) -> Iterator[int]:
    """A server in this process."""
    read = Shard.read

    def maybe(self: Shard, offset: int, target: Any) -> None:
        READS[0] -= 1
        if READS[0] < 0:
            raise InputError("the disk cannot be read: Input/output error")
        read(self, offset, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shard, "read", maybe)
        server = Server(live, KEY)
        config = uvicorn.Config(server.app, port=0, log_level="warning", timeout_graceful_shutdown=1)
        with config.bind_socket() as bound:
            running = uvicorn.Server(config)
            thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
            thread.start()
            while not running.started:
                time.sleep(0.01)
            yield bound.getsockname()[1]
            running.should_exit = True
            thread.join()
        server.worker.close()


@pytest.fixture
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return folder.name


def expected_ids(folder: Path, text: str, tokens: int) -> list[int]:
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    whole = whole_model(folder).generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=256)
    found: list[int] = whole[0, ids.shape[1] :].tolist()
    return found


def expected(folder: Path, text: str, tokens: int) -> str:
    return str(byte_tokenizer().decode(expected_ids(folder, text, tokens), skip_special_tokens=True))


def metric(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))


def test_answers_are_those_of_the_whole_model(client: OpenAI, folder: Path, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    wanted = expected(folder, "Hello there", 12)
    done = client.completions.create(model=model, prompt="Hello there", max_tokens=12, temperature=0)
    assert done.choices[0].text == wanted
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (11, 12)
    assert done.choices[0].finish_reason == "length"
    said: Any = [{"role": "user", "content": "Hello there"}]
    chat = client.chat.completions.create(model=model, messages=said, max_tokens=12, temperature=0)
    assert chat.choices[0].message.content == wanted
    ids = client.completions.create(model=model, prompt=list(b"Hello there"), max_tokens=12, temperature=0)
    assert ids.choices[0].text == wanted


def test_a_stream_is_the_same_in_pieces_and_counts_at_its_end(client: OpenAI, folder: Path, model: str) -> None:
    said: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    options: Any = {"stream_options": {"include_usage": True}}
    pieces = list(
        client.chat.completions.create(model=model, messages=said, max_tokens=9, temperature=0, stream=True, **options)
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == expected(folder, "Hello", 9)
    assert len(pieces) > 3
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 9


def test_a_stop_string_ends_an_answer_before_it(client: OpenAI, folder: Path, model: str) -> None:
    whole = expected(folder, "Hello", 20)
    stop = whole[6:8]
    done = client.completions.create(model=model, prompt="Hello", max_tokens=20, stop=[stop], temperature=0)
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"


def test_what_a_request_does_not_say_is_as_the_model_says_else_one(
    client: OpenAI, live: LiveModel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**said: Any) -> str:
        return str(client.completions.create(model=model, prompt="Hello", max_tokens=9, **said).choices[0].text)

    assert ask(seed=1) == ask(seed=1, temperature=1, top_p=1) != ask(temperature=0)
    assert ask(seed=1, top_p=1e-6) == ask(temperature=0)
    assert len({(ask(seed=1), ask())[1] for _ in range(2)}) == 2, "a seed outlives its request"
    monkeypatch.setattr(live.loaded.model.generation_config, "temperature", 0.5)
    monkeypatch.setattr(live.loaded.model.generation_config, "top_p", 0.3)
    assert ask(seed=1) == ask(seed=1, temperature=0.5, top_p=0.3) != ask(seed=1, temperature=1, top_p=1)


@pytest.mark.parametrize(
    "config",
    [
        {"repetition_penalty": 1.5, "do_sample": False},
        {"temperature": 2.0, "min_p": 0.2, "repetition_penalty": 1.3},
        {"temperature": 3.0, "top_k": 9, "top_p": 0.8},
    ],
)
def test_answers_are_drawn_as_transformers_draws_them_with_that_generation_config(
    client: OpenAI, live: LiveModel, folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    own = {"do_sample": True, "top_k": 0, **config}
    ids = torch.tensor([list(b"Hello")])
    torch.manual_seed(1)
    whole = whole_model(folder).generate(ids, max_new_tokens=20, eos_token_id=256, **own)[0, 5:].tolist()
    wanted = byte_tokenizer().decode(whole, skip_special_tokens=True)
    said = {name: value for name, value in config.items() if name != "do_sample"}
    asked: Any = {"model": folder.name, "prompt": "Hello", "max_tokens": 20, "seed": 1}
    if not own["do_sample"]:
        asked["temperature"] = 0
    assert client.completions.create(**asked, extra_body=said).choices[0].text == wanted
    for name, value in said.items():
        monkeypatch.setattr(live.loaded.model.generation_config, name, value)
    assert client.completions.create(**asked).choices[0].text == wanted
    neutral = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    greedy = client.completions.create(**asked | {"extra_body": neutral}).choices[0].text
    assert greedy == expected(folder, "Hello", 20) != wanted


def test_an_answer_is_no_longer_than_the_generation_config_allows(
    client: OpenAI, live: LiveModel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.loaded.model.generation_config, "max_new_tokens", 2)
    for asked, given in ((9, 2), (1, 1)):
        done = client.completions.create(model=model, prompt="Hello", max_tokens=asked, temperature=0)
        assert done.usage is not None
        assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("length", given)


def test_an_end_of_sequence_counts_as_a_token_and_is_no_text(
    client: OpenAI, port: int, folder: Path, live: LiveModel, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = expected_ids(folder, "Hello", 3)[2]
    monkeypatch.setattr(live.loaded.model.generation_config, "eos_token_id", [third])
    names = ('moe_tokens_total{kind="answer"}', "moe_tpot_seconds_count")
    before = [metric(port, name) for name in names]
    done = client.completions.create(model=model, prompt="Hello", max_tokens=9, temperature=0)
    assert done.usage is not None
    assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("stop", 3)
    assert done.choices[0].text == expected(folder, "Hello", 2)
    assert [metric(port, name) - was for name, was in zip(names, before, strict=True)] == [3, 2]


def test_what_cannot_be_served_is_refused_and_the_next_request_works(client: OpenAI, model: str) -> None:
    def refused(error: type[openai.APIStatusError], code: str | None = None, **asked: Any) -> None:
        with pytest.raises(error) as raised:
            client.completions.create(**{"model": model, "prompt": "x", **asked})
        assert raised.value.code == code

    refused(openai.BadRequestError, "context_length_exceeded", prompt="x" * 300)
    refused(openai.NotFoundError, "model_not_found", model="other")
    invalid: list[Any] = [{"prompt": [999]}, {"prompt": ""}, {"temperature": -1}, {"n": 3}, {"seed": 1 << 64}]
    invalid += [{"max_tokens": True}, {"temperature": True}, {"seed": True}]
    for body in invalid:
        refused(openai.BadRequestError, extra_body=body)
    not_served: list[Any] = [{"echo": True}, {"logit_bias": {"5": 1}}, {"ignore_eos": True}, {"whatever": 0}]
    for body in [*not_served, {"logprobs": 0}]:
        refused(openai.BadRequestError, "unsupported_parameter", extra_body=body)
    with (
        OpenAI(base_url=client.base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    nothing: Any = {"presence_penalty": 0, "logit_bias": {}, "logprobs": None, "best_of": 1, "user": "somebody"}
    nothing |= dict.fromkeys(("temperature", "top_p", "n", "stream", "seed", "stop"))
    more = {"ignore_eos": False, "guided_json": None, "store": True, "presence_penalty": 0.0}
    done = client.completions.create(model=model, prompt="x" * 250, max_tokens=50, extra_body=nothing | more)
    assert done.usage is not None
    assert done.usage.total_tokens <= 256


@pytest.fixture
def failing() -> Iterator[None]:
    yield
    READS[0] = 10**9


@pytest.mark.usefixtures("failing")
def test_a_disk_that_fails_is_told_to_that_client_alone(client: OpenAI, folder: Path, model: str) -> None:
    asked: Any = {"model": model, "prompt": "Hi", "max_tokens": 5, "temperature": 0}
    wanted = expected(folder, "Hi", 5)
    for stream in (False, True):
        READS[0] = 0
        with pytest.raises(openai.APIError, match="Input/output error"):
            list(client.completions.create(model=model, prompt="What now", max_tokens=9, stream=stream))
        READS[0] = 10**9
        assert client.completions.create(**asked).choices[0].text == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_vanishes_does_not_hold_up_the_next_one(
    client: OpenAI, port: int, folder: Path, model: str, stream: bool
) -> None:
    before = metric(port, 'moe_requests_total{outcome="left"}')
    asked = {"model": model, "prompt": "Once", "max_tokens": 240, "temperature": 0, "stream": stream}
    body = json.dumps(asked).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port)) as gone:
        gone.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        if stream:
            gone.recv(100)
    wanted = expected(folder, "Hi", 5)
    assert client.completions.create(model=model, prompt="Hi", max_tokens=5, temperature=0).choices[0].text == wanted
    deadline = time.monotonic() + 30
    while stream and metric(port, 'moe_requests_total{outcome="left"}') == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_several_clients_share_steps_and_each_gets_what_it_gets_alone(client: OpenAI, port: int, model: str) -> None:
    """Six clients, more than a batch has room for, some of which draw tokens."""
    texts = ("a", "bc", "def", "ghij", "klmno", "pqrstu")
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        temperature = len(text) % 2
        said = client.completions.create(model=model, prompt=text, max_tokens=60, seed=7, temperature=temperature)
        found[text] = said.choices[0].text

    before = metric(port, "moe_steps_total")
    for text in texts:
        ask(text)
    alone, expected = metric(port, "moe_steps_total") - before, dict(found)
    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert metric(port, "moe_steps_total") - before - alone < alone


def test_a_request_that_would_fill_the_memory_is_refused(client: OpenAI, port: int, model: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", b'{"prompt": "' + b"a" * MOST_SENT + b'"}', head)
    refused = connection.getresponse()
    assert refused.status == 413
    assert json.loads(refused.read())["error"]["message"] == f"the request has more than {MOST_SENT} bytes: shorten it"
    client.completions.create(model=model, prompt="a", max_tokens=1)


def test_metrics_count_requests_tokens_and_lookups(client: OpenAI, port: int, model: str) -> None:
    names = ('moe_tokens_total{kind="answer"}', 'moe_requests_total{outcome="length"}', "moe_tpot_seconds_count")
    before = [metric(port, name) for name in names]
    looked = sum(metric(port, f'moe_lookups_total{{found="{found}"}}') for found in ("hits", "late", "misses"))
    client.completions.create(model=model, prompt="Hello", max_tokens=7, temperature=0)
    assert [metric(port, name) - was for name, was in zip(names, before, strict=True)] == [7, 1, 6]
    again = sum(metric(port, f'moe_lookups_total{{found="{found}"}}') for found in ("hits", "late", "misses"))
    assert again - looked >= 6 * 3 * 2
