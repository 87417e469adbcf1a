"""`moe-replay serve` to OpenAI's own client: the whole model's answers, errors of OpenAI's form, and how it ends."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import uvicorn
from openai import OpenAI
from transformers.cli.serving import chat_completion, completion, model_manager, server, utils

from replay.commands import main
from replay.device_choice import DeviceChoice
from replay.live.memory import resident_bytes
from replay.live.opening import open_live
from replay.live.server import MOST_SENT, Generation, application
from replay.live.shards import Shard
from tests.support.command import run
from tests.support.live_models import saved, whole_model
from tests.support.tokenizer import byte_tokenizer
from traces import InputError

KEY = "sesame"
READS = [10**9]
"""The disk fails after so many more reads."""

TURN = "<|im_start|>assistant\n"
"""How an answer begins, by which transformers knows where it does."""

TEXTS = ("Hello there", "a", "bc d", "The quick brown fox", "0123456789", "y\u00e4y", "No", "Tokens? Bytes!")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = saved(tmp_path_factory.mktemp("tiny"), "qwen3_moe"), byte_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}" + TURN.replace("\n", "{{ '\\n' }}")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return whole_model(folder)


@pytest.fixture(scope="module")
def generation(folder: Path) -> Iterator[Generation]:
    torch.set_num_threads(1)
    with open_live(str(folder), DeviceChoice("disk", lanes=1), policy="lru", cache_size="5") as live:
        generation = Generation(live, 256)
        yield generation
        generation.close()


@pytest.fixture(scope="module")
def port(generation: Generation) -> Iterator[int]:
    """A server in this process."""
    read = Shard.read

    def maybe(self: Shard, offset: int, target: Any) -> None:
        READS[0] -= 1
        if READS[0] < 0:
            raise InputError('the disk cannot be read: "Input/output error"')
        read(self, offset, target)

    config = uvicorn.Config(application(generation, KEY, ("127.0.0.1", "[::1]")), port=0, log_level="warning")
    with pytest.MonkeyPatch.context() as patch, config.bind_socket() as bound:
        patch.setattr(Shard, "read", maybe)
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, args=([bound],), daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield bound.getsockname()[1]
        running.should_exit = True
        thread.join()


@pytest.fixture
def client(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return folder.name


def expected_ids(whole: Any, text: str, tokens: int) -> list[int]:
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    given: list[int] = whole.generate(ids, max_new_tokens=tokens, do_sample=False, eos_token_id=256)[0].tolist()
    return given[ids.shape[1] :]


def expected(whole: Any, text: str, tokens: int) -> str:
    return str(byte_tokenizer().decode(expected_ids(whole, text, tokens), skip_special_tokens=True))


def post(port: int, body: bytes, path: str = "/v1/completions", **head: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **head}
    connection.request("POST", path, body, head)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def metric(port: int, name: str) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    lines = connection.getresponse().read().decode().splitlines()
    return float(next((line.split()[-1] for line in lines if line.startswith(name)), 0))


def test_what_is_taken_from_transformers_is_there() -> None:
    """Its server is not a public interface: the extra `serve` allows the one minor version that was tried."""
    handlers = "chat_handler completion_handler response_handler transcription_handler systemone_handler"
    built = list(signature(server.build_server).parameters)
    assert built == ["model_manager", *handlers.split(" "), "generation_state", "enable_cors"]
    for function, parameters in (
        (utils.GenerateManager.generate_streaming, "model processor inputs gen_config request_id response_parser"),
        (utils.GenerateManager.generate_non_streaming, "model processor inputs gen_config request_id"),
        (utils.GenerateManager.submit, "fn args kwargs"),
        (utils.GenerationState.get_manager, "model_id use_cb"),
        (utils.DirectStreamer.__init__, "tokenizer loop queue response_parser"),
        (utils.BaseHandler._validate_request, "body"),
        (completion.CompletionHandler.handle_request, "body request_id"),
        (chat_completion.ChatCompletionHandler.handle_request, "body request_id"),
        (completion.CompletionHandler._build_generation_config, "body model_generation_config use_cb"),
        (chat_completion.ChatCompletionHandler._build_generation_config, "body model_generation_config use_cb"),
        (
            model_manager.ModelManager.load_model_and_processor,
            "model_id_and_revision progress_callback tqdm_class gguf_file",
        ),
        (model_manager.ModelManager.list_models, "cache_dir"),
    ):
        assert list(signature(function).parameters)[1:] == parameters.split(" "), function
    streamed = {"_first", "_cancelled", "_tokenizer", "_queue", "_parser", "total_tokens"}
    assert streamed <= vars(utils.DirectStreamer(None, None, None)).keys()
    assert issubclass(utils._GenerationCancelled, Exception)
    assert utils._StreamError("why").msg == "why"


def test_answers_are_those_of_the_whole_model(client: OpenAI, whole: Any, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    asked: Any = {"model": model, "max_tokens": 12, "temperature": 0}
    wanted = expected(whole, "Hello there", 12)
    for prompt in ("Hello there", ["Hello there"]):
        done = client.completions.create(**asked, prompt=prompt)
        assert (done.choices[0].text, done.choices[0].finish_reason) == (wanted, "length")
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (11, 12)
    said: Any = [{"role": "system", "content": "-"}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    chat, text = client.chat.completions.create(**asked, messages=said), expected(whole, f"Hello{TURN}", 12)
    assert chat.choices[0].message.content == text
    stopped = client.chat.completions.create(**asked, messages=said, stop=text[4:6])
    assert stopped.choices[0].message.content == text[: text.index(text[4:6])]
    pieces = list(client.chat.completions.create(**asked, messages=said, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert len(pieces) > 3
    assert pieces[-1].choices[0].finish_reason == "length"
    assert pieces[-1].usage.completion_tokens == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_before_it(client: OpenAI, whole: Any, model: str, stream: bool) -> None:
    text = expected(whole, "Hello", 20)
    asked: Any = {"model": model, "prompt": "Hello", "max_tokens": 20, "temperature": 0, "stop": [text[6:8], "never"]}
    done = client.completions.create(**asked, stream=stream)
    pieces = list(done) if stream else [done]
    assert "".join(piece.choices[0].text for piece in pieces) == text[: text.index(text[6:8])]
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_an_end_of_sequence_counts_as_a_token_and_is_no_text(
    client: OpenAI, generation: Generation, port: int, whole: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = expected_ids(whole, "Hello", 3)[2]
    monkeypatch.setattr(generation.live.loaded.model.generation_config, "eos_token_id", [third])
    before = metric(port, 'moe_requests_total{outcome="stop"}')
    for most in (3, 9):
        done = client.completions.create(model=model, prompt="Hello", max_tokens=most, temperature=0)
        assert (done.choices[0].finish_reason, done.usage.completion_tokens) == ("stop", 3)
        assert done.choices[0].text == expected(whole, "Hello", 2)
    assert metric(port, 'moe_requests_total{outcome="stop"}') == before + 2


def test_tokens_are_drawn_as_the_request_says_else_as_the_generation_config_does(
    client: OpenAI, generation: Generation, whole: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**said: Any) -> str:
        return str(client.completions.create(model=model, prompt="Hello", max_tokens=20, **said).choices[0].text)

    ids, greedy = torch.tensor([list(b"Hello")]), expected(whole, "Hello", 20)
    torch.manual_seed(1)
    drawn = whole.generate(ids, max_new_tokens=20, eos_token_id=256, do_sample=True, temperature=2.0, top_p=0.8)
    wanted = byte_tokenizer().decode(drawn[0, 5:], skip_special_tokens=True)
    assert ask() == ask(temperature=0, seed=1) == greedy != wanted
    assert ask(temperature=2, top_p=0.8, seed=1) == wanted
    assert len({(ask(temperature=2, seed=1), ask(temperature=2))[1] for _ in range(2)}) == 2, (
        "a seed outlives its request"
    )
    for name, value in {"do_sample": True, "temperature": 2.0, "top_p": 0.8, "max_new_tokens": 20}.items():
        monkeypatch.setattr(generation.live.loaded.model.generation_config, name, value)
    assert ask(seed=1) == wanted
    assert ask(temperature=0) == greedy


TALK = [{"role": "user", "content": "x"}]
MALFORMED: list[tuple[dict[str, Any] | bytes, int]] = [
    *((body, 400) for body in (b"", b"{", b"[]", b'"x"', {}, {"prompt": 5}, {"prompt": ""}, {"prompt": ["a", "b"]})),
    *(({"prompt": "x", **body}, 400) for body in ({"max_tokens": 0}, {"max_tokens": True}, {"max_tokens": "9"})),
    *(({"prompt": "x", **body}, 400) for body in ({"max_tokens": 10**9}, {"temperature": -1}, {"top_p": 7})),
    *(({"prompt": "x", **body}, 400) for body in ({"n": 2}, {"best_of": 2}, {"echo": True}, {"logprobs": 1})),
    *(({"prompt": "x", **body}, 400) for body in ({"seed": 1 << 64}, {"stop": 7}, {"stream": "y"}, {"suffix": "y"})),
    *(({"prompt": "x", **body}, 400) for body in ({"logit_bias": {"5": 1}}, {"generation_config": "{}"})),
    ({"prompt": "x" * 300}, 400),
    ({"prompt": "x", "model": "other"}, 404),
    ({"prompt": "x", "whatever": 0}, 422),
    *(({"messages": each}, 400) for each in ([], "x", [5], [{"role": "user"}], [{"role": "me", "content": "x"}])),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400),
    *(({"messages": TALK, **body}, 400) for body in ({"tools": "x"}, {"tools": [5]}, {"tool_choice": "required"})),
    *(({"messages": TALK, **body}, 400) for body in ({"response_format": {"type": "json_object"}},)),
]


def refused(port: int, body: dict[str, Any] | bytes) -> int:
    """Return the status of a refusal in OpenAI's form."""
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    status, answer = post(port, body if isinstance(body, bytes) else json.dumps(body).encode(), path)
    assert answer.keys() == {"error"}
    assert answer["error"].keys() == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    return status


@pytest.mark.parametrize(("body", "status"), MALFORMED)
def test_a_malformed_request_gets_an_error_of_openais_form(
    port: int, body: dict[str, Any] | bytes, status: int
) -> None:
    assert refused(port, body) == status


def test_parameters_without_effect_are_taken(client: OpenAI, whole: Any, model: str) -> None:
    nothing: Any = {"presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "user": "somebody", "echo": False}
    nothing |= dict.fromkeys(("temperature", "top_p", "n", "stream", "seed", "stop", "suffix", "logprobs"))
    done = client.completions.create(model=model, prompt="x" * 250, extra_body=nothing)
    assert done.choices[0].text == expected(whole, "x" * 250, 6), "as many tokens as are left"


def test_strangers_are_refused(port: int) -> None:
    ours: dict[str, Any] = {"prompt": "x", "max_tokens": 1}
    body = json.dumps(ours).encode()
    for key in ("Bearer wrong", "", "Bearer"):
        status, answer = post(port, body, Authorization=key)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert post(port, body, Host=f"[::1]:{port}")[0] == 200
    for host in ("evil.example", f"127.0.0.1.evil.example:{port}"):
        with pytest.raises(json.JSONDecodeError):  # a page of another site, whose name now leads here
            post(port, body, Host=host)
    status, answer = post(port, b"a" * (MOST_SENT + 1))
    assert (status, answer["error"]["type"]) == (413, "invalid_request_error")
    assert post(port, b"{}", "/load_model")[0] == post(port, b"{}", "/reset")[0] == 404


@pytest.fixture
def failing() -> Iterator[None]:
    yield
    READS[0] = 10**9


@pytest.mark.usefixtures("failing")
def test_a_disk_that_fails_fails_that_request_alone(client: OpenAI, whole: Any, model: str) -> None:
    for stream in (False, True):
        READS[0] = 0
        with pytest.raises(openai.APIError) as raised:
            list(client.completions.create(model=model, prompt="What now", max_tokens=9, stream=stream))
        assert '"Input/output error"' in str(raised.value.body)
        READS[0] = 10**9
        done = client.completions.create(model=model, prompt="Hi", max_tokens=5, temperature=0)
        assert done.choices[0].text == expected(whole, "Hi", 5)


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_a_crowd_gets_the_whole_models_answers_and_leaves_nothing_behind(
    client: OpenAI, port: int, generation: Generation, whole: Any, model: str, count: int
) -> None:
    """Eight at a time: a fifth leaves during its answer, streamed or not, and a tenth is malformed."""
    wanted = {text: expected(whole, text, 30) for text in TEXTS}
    sizes = list[int]()

    def one(number: int) -> str:
        sizes.append(resident_bytes())
        text = TEXTS[number % len(TEXTS)]
        asked: Any = {"model": model, "prompt": text, "max_tokens": 30, "temperature": 0}
        if number % 10 == 3:
            assert 400 <= refused(port, MALFORMED[number // 10 % len(MALFORMED)][0]) <= 422
            return "refused"
        if number % 10 == 0:
            with client.completions.create(**{**asked, "max_tokens": 200}, stream=True) as stream:
                next(iter(stream))
            return "left"
        if number % 10 == 5:
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.01).completions.create(**{**asked, "max_tokens": 200})
            return "left"
        if number % 2:
            return str(client.completions.create(**asked).choices[0].text == wanted[text])
        pieces = client.completions.create(**asked, stream=True)
        return str("".join(piece.choices[0].text for piece in pieces) == wanted[text])

    before = metric(port, 'moe_requests_total{outcome="left"}')
    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(one, range(count))) == {"True": 0.7 * count, "left": count / 5, "refused": count / 10}
    while metric(port, "moe_waiting"):
        time.sleep(0.05)
    assert metric(port, 'moe_requests_total{outcome="left"}') > before
    assert generation.live.rows == []
    assert sizes[-1] - sizes[count // 5] < 16 << 20


def counted(port: int, name: str, before: float) -> float:
    """Return a metric once it has changed: a request is counted behind its answer."""
    until = time.monotonic() + 10
    while metric(port, name) == before and time.monotonic() < until:
        time.sleep(0.01)
    return metric(port, name)


def test_the_server_drafts_and_answers_the_same(client: OpenAI, generation: Generation, port: int, model: str) -> None:
    asked: Any = {"model": model, "prompt": "abcdef" * 3 + "ab", "max_tokens": 60, "temperature": 0}
    before, text = metric(port, 'moe_cache_total{count="steps"}'), client.completions.create(**asked).choices[0].text
    one_by_one = counted(port, 'moe_cache_total{count="steps"}', before) - before
    generation.live.draft = 4
    try:
        assert client.completions.create(**asked).choices[0].text == text
    finally:
        generation.live.draft = 0
    assert counted(port, 'moe_cache_total{count="steps"}', before + one_by_one) - before < 2 * one_by_one


def test_metrics_count_tokens_and_lookups(client: OpenAI, port: int, model: str) -> None:
    names = (
        "moe_tokens_total",
        "moe_ttft_seconds_count",
        *(f'moe_cache_total{{count="{n}"}}' for n in ("steps", "tokens")),
    )
    before = [metric(port, name) for name in names]
    client.completions.create(model=model, prompt="Hello", max_tokens=7, temperature=0)
    assert [counted(port, name, was) - was for name, was in zip(names, before, strict=True)] == [7, 1, 7, 11]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_requests_with_an_error_and_the_server_without_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = saved(tmp_path / "tiny", "olmoe", max_position_embeddings=1 << 20)
    byte_tokenizer().save_pretrained(folder)
    command = ["serve", "--model", folder, "--cache-size", "5", "--lanes", "1", "--port", "0", "--threads", "1"]
    code = [sys.executable, "-c", "from replay.commands import main; main()"]
    with (
        subprocess.Popen([*code, *map(str, command)], stderr=subprocess.PIPE, text=True) as process,
        ThreadPoolExecutor() as pool,
    ):
        try:
            assert process.stderr
            address = re.search(r"http://\S+/v1", process.stderr.readline())
            assert address
            with OpenAI(base_url=address[0], api_key="none", max_retries=0, timeout=20) as client:
                asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 10**5}
                stream = client.chat.completions.create(**asked, temperature=0, stream=True)
                next(stream)
                waiting = pool.submit(lambda: client.chat.completions.create(**asked))
                time.sleep(1)
                process.send_signal(number)
                with pytest.raises(openai.APIError) as raised:
                    list(stream)
                assert raised.value.body == "the server is shutting down"
                with pytest.raises(openai.InternalServerError, match="503"):
                    waiting.result()
            written = process.stderr.read().splitlines()
            assert process.wait(20) == 0
        finally:
            process.kill()
    assert [line.partition(":")[0] for line in written] == ["memory", "stopped serving"]


def test_what_cannot_be_listened_at_is_refused_before_a_model_is_sought() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(main, "serve", "--model", "/nowhere", "--port", port)
    assert done.returncode == 2
    assert re.fullmatch(rf"moe-replay: error: cannot listen at .*{port}: .*in use.*\n", done.stderr)


@pytest.mark.parametrize(
    "options",
    [
        *((f"--host={host}", *key) for host in ("0.0.0.0", "::", "192.168.1.5") for key in ((), ("--api-key=",))),
        *(("--host=127.0.0.1", f"--api-key={key}") for key in ("", " \t")),
    ],
)
def test_beyond_this_computer_a_key_is_needed_and_an_empty_one_is_no_key(options: tuple[str, ...]) -> None:
    done = run(main, "serve", "--model", "/nowhere", *options)
    assert done.returncode == 2
    assert "--api-key" in done.stderr
