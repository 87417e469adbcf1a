"""transformers' server of OpenAI's interface in front of a live model, with the checks and limits that it leaves out.

Requests are generated one after another on one thread; a client that leaves ends its own. What is taken from
`transformers.cli.serving`, which is not a public interface, is pinned by tests/replay/test_serve.py.
"""

import asyncio
import hmac
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import anyio
import torch
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from openai.types import Model
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import (
    DirectStreamer,
    GenerateManager,
    GenerationState,
    _GenerationCancelled,
    _StreamError,
    get_response_template,
)

from replay.devices.cpu import nothing
from replay.live.model import LiveModel
from replay.live.requests import ChatRequest, CompletionRequest, Requested, not_served
from tracer.lookup import drafting
from traces.errors import refuse

NEW_TOKENS = 256  # of an answer, at most, where neither the request nor the model's generation config says
MOST_WAIT = 64  # requests that run or wait
MOST_SENT = 4 << 20  # bytes of a request: about a million tokens
PATHS = ("/health", "/v1/chat/completions", "/v1/completions", "/v1/models")
"""Of transformers' server, what is served here: it could also load and unload models."""

LINES = "{% for message in messages %}{{ message.content }}{{ '' if loop.last else '\n' }}{% endfor %}"
"""The chat template of a model without one, of whose kind transformers knows none either."""


class RefusedError(HTTPException):
    """A request is answered with an error."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status, message)
        self.code, self.param = code, param


async def refusal(_: object, error: Any) -> JSONResponse:
    if isinstance(error, ValidationError | RequestValidationError):
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        error = RefusedError(400, f"{'.'.join(place)}: {first['msg']}", param=place[0])
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    more = {name: getattr(error, name, None) for name in ("param", "code")}
    return JSONResponse({"error": {"message": error.detail, "type": kind, **more}}, error.status_code)


class Answer(DirectStreamer):  # type: ignore[misc]  # transformers has no types
    """Takes the tokens of an answer from `generate`, and queues its text up to a stop string."""

    def __init__(self, tokenizer: Any, parser: Any, config: Any) -> None:
        """config: the generation config, with `stop` and `seed` as the request has them."""
        super().__init__(tokenizer._tokenizer, asyncio.get_running_loop(), asyncio.Queue(), parser)
        self.config, self.tokens, self.moments = config, list[int](), [time.monotonic()]  # of coming, and of passes
        self.outcome, self.error = "length", RefusedError(500, "")
        self._ends = config.eos_token_id or []
        self._stops = [config.stop] if isinstance(config.stop, str) else config.stop or []
        self._text, self._sent, self.is_cut = "", 0, False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then what each pass gives. Raise _GenerationCancelled where no more is needed."""
        if self._first or self._cancelled.is_set():
            super().put(value)
            return
        self.moments.append(time.monotonic())
        for token in value.reshape(-1).tolist():
            self.tokens.append(token)
            if token in self._ends:  # which is no text
                self.total_tokens += 1
                self.outcome = "stop"
            else:
                super().put(torch.tensor([token]))
            if self.outcome == "stop":
                raise _GenerationCancelled

    def _enqueue(self, item: Any) -> None:
        if type(item) is not str:  # the end, or a part of a chat that is not text
            self._send(len(self._text) if item is None else 0)
            super()._enqueue(item)
        elif not self.is_cut:
            self._text += item
            places = [place for stop in self._stops if (place := self._text.find(stop)) >= 0]
            if places:
                self.is_cut, self.outcome = True, "stop"
            self._text = self._text[: min(places, default=None)]
            longest = max(map(len, self._stops), default=1)
            self._send(len(self._text) - (0 if places else longest - 1))

    def _send(self, end: int) -> None:
        if end > self._sent:
            super()._enqueue(self._text[self._sent : end])
            self._sent = end

    def end(self) -> None:
        """Do nothing, as `generate` calls it: `finish` ends the answer after the last check."""

    def finish(self) -> None:
        if not self.is_cut and self._parser is None:
            tokens = [token for token in self.tokens if token not in self._ends]
            self._text = self._tokenizer.decode(tokens, skip_special_tokens=True)  # letters that are not whole, too
        super().end()

    def fail(self, status: int, message: str) -> None:
        self.outcome, self.error = "error", RefusedError(status, message)
        super()._enqueue(_StreamError(json.dumps(message)[1:-1]))  # which is sent between quotation marks


class Generation(GenerateManager):  # type: ignore[misc]
    """Generates answers one after another. context: tokens of a request, prompt and answer, at most."""

    def __init__(self, live: LiveModel, context: int) -> None:
        super().__init__()
        self.live, self._context, self._answers = live, context, set[Answer]()
        self.metrics = Metrics(lambda: len(self._answers))

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, response_parser: Any = None
    ) -> tuple[Any, Answer]:
        """Queue a request. Raise RefusedError for one that is too long, or one too many."""
        prompt = inputs["input_ids"].shape[-1]
        left = self._context - prompt
        limit = gen_config.max_new_tokens or max(1, min(model.generation_config.max_new_tokens or NEW_TOKENS, left))
        if not prompt:
            raise RefusedError(400, "the prompt has no tokens")
        if limit > left:
            why = f"{prompt} tokens of prompt and {limit} of answer are more than the context of {self._context}"
            raise RefusedError(400, why, "context_length_exceeded", "max_tokens")
        if len(self._answers) >= MOST_WAIT:
            raise RefusedError(429, "too many requests wait already: try again later", "queue_full")
        gen_config.max_new_tokens = limit
        answer = Answer(processor, response_parser, gen_config)
        self._answers.add(answer)
        self.submit(self._run, inputs, answer)
        return answer._queue, answer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Return the text, the tokens of the prompt, and those of the answer. Raise RefusedError where it fails."""
        queue, answer = self.generate_streaming(model, processor, inputs, gen_config, request_id)
        pieces = list[str]()
        try:
            while (piece := await queue.get()) is not None:
                if isinstance(piece, _StreamError):
                    raise answer.error
                pieces.append(piece)
        finally:
            answer.cancel()
        text = "".join(pieces)
        ids = processor(text, add_special_tokens=False)["input_ids"] if answer.is_cut else answer.tokens
        return text, inputs["input_ids"].shape[-1], ids  # which the handler of chats decodes again

    def _run(self, inputs: Any, answer: Answer) -> None:
        """Generate an answer, on transformers' thread."""
        live, config = self.live, answer.config
        ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        torch.manual_seed(torch.seed() if config.seed is None else config.seed)
        try:
            with suppress(_GenerationCancelled), drafting(live.model) if live.draft else nullcontext():
                live.model.generate(**ids, generation_config=config, streamer=answer)
            live.end_request()
            if answer._cancelled.is_set():
                answer.outcome = "left"
            if answer.outcome == "stop":
                config.max_new_tokens = None  # or the handler would take an answer of that many tokens for a cut one
            answer.finish()
        except Exception as error:
            answer.fail(500, f"the request failed: {' '.join(str(error).split()) or type(error).__name__}")
        self._answers.discard(answer)
        self.metrics.served(answer, live.counters)
        live.clear()

    def stop(self) -> None:
        for answer in list(self._answers):
            answer.fail(503, "the server is shutting down")
            answer.cancel()

    def close(self) -> None:
        """Return when none runs."""
        self.stop()
        self.submit(nothing).result()


class Metrics:
    """Of one server, in Prometheus' format; names begin with `moe_`."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter("moe_requests", "Requests that have ended.", ["outcome"], registry=own)
        self._tokens = Counter("moe_tokens", "Tokens of answers.", registry=own)
        self._first = Histogram("moe_ttft_seconds", "From a request to its first token.", registry=own)
        self._later = Histogram("moe_tpot_seconds", "Of a later token, the mean of a request.", registry=own)
        self._cache = Counter("moe_cache", "Sums over steps, as results count them.", ["count"], registry=own)
        Gauge("moe_waiting", "Requests that run or wait.", registry=own).set_function(waiting)

    def served(self, answer: Answer, counters: dict[str, int]) -> None:
        """Count a request that has ended. counters: of the cache, since the request before it."""
        self._requests.labels(answer.outcome).inc()
        self._tokens.inc(len(answer.tokens))
        if answer.tokens:
            self._first.observe(answer.moments[1] - answer.moments[0])
        if len(answer.tokens) > 1:
            self._later.observe((answer.moments[-1] - answer.moments[1]) / (len(answer.tokens) - 1))
        for name, count in counters.items():
            self._cache.labels(name).inc(count)

    async def text(self) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")


class OneModel(ModelManager):  # type: ignore[misc]
    """The live model, under its name."""

    def __init__(self, live: LiveModel) -> None:
        """Raise InputError for a model without a tokenizer."""
        super().__init__()
        self.force_model, self.live, tokenizer = live.loaded.name, live, live.loaded.tokenizer
        refuse((not hasattr(tokenizer, "_tokenizer"), f"{self.force_model} has no fast tokenizer: use `generate`"))
        start = tokenizer("")["input_ids"]  # which drops its padding, after which threads may share it
        if not (tokenizer.chat_template or get_response_template(tokenizer, live.model)):
            tokenizer.chat_template = tokenizer.decode(start) + LINES

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self.live.model, self.live.loaded.tokenizer

    def list_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
        return [Model(id=self.force_model, created=0, object="model", owned_by="moe-expert-cache").model_dump()]


class CheckedHandler:
    """Checks a request before a handler of transformers reads it, and says how tokens are drawn."""

    requested: type[Requested]

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Response:
        try:
            response: Response = await super().handle_request(body, request_id)  # type: ignore[misc]
        except (HTTPException, ValidationError):
            raise
        except Exception as error:  # of the chat template, or the tokenizer
            raise RefusedError(400, f"{type(error).__name__}: {error}") from error
        return response

    def _validate_request(self, body: dict[str, Any]) -> None:
        super()._validate_request(body)  # type: ignore[misc]
        self.requested.model_validate(body)
        name: str = self.model_manager.force_model  # type: ignore[attr-defined]
        if body.get("model") not in (None, name):
            raise RefusedError(404, f"there is no model {body['model']}, only {name}", "model_not_found", "model")
        if names := not_served(body, self._unused_fields):  # type: ignore[attr-defined]
            raise RefusedError(400, f"not served here: {', '.join(names)}", "unsupported_parameter", names[0])
        if isinstance(body.get("prompt"), list):
            (body["prompt"],) = body["prompt"]

    def _build_generation_config(self, body: dict[str, Any], model_generation_config: Any, use_cb: bool) -> Any:
        without = {**body, "seed": None, "stop": None}  # which it would apply to the request that runs, or include
        config = super()._build_generation_config(without, model_generation_config, use_cb)  # type: ignore[misc]
        live, temperature = self.model_manager.live, body.get("temperature")  # type: ignore[attr-defined]
        config.update(
            max_new_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            do_sample=config.do_sample if temperature is None else temperature > 0,
            num_beams=1,
            use_cache=True,
            eos_token_id=live.loaded.stop_ids or None,
            pad_token_id=live.loaded.pad_id,
            prompt_lookup_num_tokens=live.draft or None,
        )
        config.seed, config.stop = body.get("seed"), body.get("stop")
        return config


class Chat(CheckedHandler, ChatCompletionHandler):  # type: ignore[misc]
    """Conversations."""

    requested = ChatRequest


class Completion(CheckedHandler, CompletionHandler):  # type: ignore[misc]
    """Texts to continue with."""

    requested = CompletionRequest


def guarded(app: ASGIApp, api_key: str | None) -> ASGIApp:
    """Refuse requests without the API key, or larger than MOST_SENT; cancel those whose client has left."""

    async def guarded_app(scope: Scope, receive: Receive, send: Send) -> None:
        head, error = Headers(scope=scope), None
        key = head.get("authorization", "").removeprefix("Bearer ")
        if api_key and scope["path"] != "/health" and not hmac.compare_digest(key.encode(), api_key.encode()):
            error = RefusedError(401, "the API key is missing or wrong", "invalid_api_key")
        elif "transfer-encoding" in head or int(head.get("content-length", 0)) > MOST_SENT:
            error = RefusedError(413, f"the request has more than {MOST_SENT} bytes, or does not say how many")
        if error:
            await (await refusal(None, error))(scope, receive, send)
            return
        is_complete = False

        async def received() -> Message:
            nonlocal is_complete
            if is_complete:
                await anyio.sleep_forever()
            message = await receive()
            if is_complete := not message.get("more_body"):
                group.start_soon(watch)
            return message

        async def watch() -> None:
            await receive()  # which returns when the client leaves
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            await app(scope, received, send)
            group.cancel_scope.cancel()

    return guarded_app


def application(generation: Generation, api_key: str | None = None, hosts: Sequence[str] = ("*",)) -> FastAPI:
    """Return the server. api_key: what clients must send; None: nothing. hosts: names by which it may be reached."""
    models, state = OneModel(generation.live), GenerationState()
    state.get_manager = lambda *_, **__: generation
    chat, completion = Chat(models, state), Completion(models, state)
    app: FastAPI = build_server(models, chat, completion, None, None, None, state)
    app.router.routes = [route for route in app.routes if getattr(route, "path", None) in PATHS]
    app.add_api_route("/metrics", generation.metrics.text)
    for kind in (HTTPException, RequestValidationError, ValidationError):
        app.add_exception_handler(kind, refusal)
    app.add_middleware(guarded, api_key=api_key)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts)
    return app
