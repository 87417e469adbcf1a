"""A small server of OpenAI's interface (chat completions and completions, streaming too) in front of a live model.

Several requests are answered at a time, the others wait in a queue. What cannot be served gets an error as OpenAI's,
and a request that fails leaves the server as it was.
"""

import asyncio
import hmac
import json
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replay.live.answering import TokenIds, reading_ids
from replay.live.model import LiveModel
from replay.live.requests import ChatRequest, CompletionRequest, require_sampling
from replay.live.worker import ClosedError, Job, Metrics, Worker
from traces.errors import InputError

NEW_TOKENS = 256
"""Of an answer, where a client does not say."""

MAX_BATCH = 4
"""Requests that are answered at a time."""

LOOK_S = 0.25
"""How often the server looks whether a client that waits for a whole answer is still there."""

MOST_SENT = 16 << 20
"""Bytes of a request: more than a million tokens have, and what is made of them takes some thirty times as much."""

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end the server, unless what started it ignores them, as `nohup` does a closed terminal's SIGHUP."""

GRACE_S = 5
"""After a signal, how long clients have to read the rest of their answers."""


class RefusedError(HTTPException):
    """An answer that is an error, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(status, message)
        self.code = code


async def _refused(_: Request | None, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 400
    text = error.detail if isinstance(error, HTTPException) else str(error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        text = f"{'.'.join(str(part) for part in first['loc'] if part != 'body') or 'body'}: {first['msg']}"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"message": text, "type": kind, "param": None, "code": getattr(error, "code", None)}
    return JSONResponse({"error": body}, status)


def bounded(app: ASGIApp) -> ASGIApp:
    """Refuse requests that are larger than MOST_SENT, before they are in memory."""

    async def bounded_app(scope: Scope, receive: Receive, send: Send) -> None:
        sent = 0

        async def counted() -> Message:
            nonlocal sent
            message = await receive()
            sent += len(message.get("body", b""))
            if sent > MOST_SENT:
                raise HTTPException(413, f"the request has more than {MOST_SENT} bytes: shorten it")
            return message

        await app(scope, counted, send)

    return bounded_app


class Server:
    """The application and its worker. api_key: what clients must send; None: nothing."""

    def __init__(
        self, live: LiveModel, api_key: str | None = None, max_context: int | None = None, max_batch: int = MAX_BATCH
    ) -> None:
        self._loaded = live.loaded
        self._config = live.loaded.model.generation_config  # while a request runs, the model has another
        require_sampling(self._config, self._loaded.name)
        self._key = api_key
        longest = live.loaded.context or 1 << 30
        self.context = min(longest, max_context or longest)
        gpu = live.run.gpu
        self.metrics = Metrics(gpu.slots, live.run.shape.total, gpu.link.expert_bytes)
        by_ids = reading_ids(live.loaded)
        self._ids: TokenIds = by_ids.tokenizer
        loaded = by_ids if live.loaded.tokenizer is None else live.loaded
        if live.loaded.tokenizer is not None:
            live.loaded.prompt_tokens(["a"], template=False)  # drops its padding, after which threads may share it
        self.worker = Worker(live, loaded, self.metrics, max_batch)
        self.app = self._application()

    @property
    def longest_answer(self) -> int:
        """Return how many tokens an answer has at most, as the generation config says; else those of the context."""
        return self._config.max_new_tokens or self.context

    def _application(self) -> FastAPI:
        errors: Any = dict.fromkeys((HTTPException, InputError, RequestValidationError), _refused)
        app = FastAPI(
            title="moe-replay serve", docs_url=None, redoc_url=None, openapi_url=None, exception_handlers=errors
        )
        app.add_middleware(bounded)
        guarded = [Depends(self._allow)]

        @app.get("/health")
        async def health() -> dict[str, str]:
            return {"status": "ok"}

        @app.get("/metrics", dependencies=guarded)
        async def metrics() -> Response:
            return Response(self.metrics.text(self.worker.waiting), media_type="text/plain; version=0.0.4")

        @app.get("/v1/models", dependencies=guarded)
        async def models() -> dict[str, Any]:
            own = {"id": self._loaded.name, "object": "model", "created": 0, "owned_by": "moe-expert-cache"}
            return {"object": "list", "data": [own]}

        @app.post("/v1/chat/completions", dependencies=guarded)
        async def chat(body: ChatRequest, request: Request) -> Response:
            limit = body.max_completion_tokens or body.max_tokens or NEW_TOKENS
            return await self._answer(body, limit, request)

        @app.post("/v1/completions", dependencies=guarded)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            return await self._answer(body, body.max_tokens or 16, request)

        return app

    async def _allow(self, request: Request) -> None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(sent.encode(), self._key.encode()):
            raise RefusedError(401, "the API key is missing or wrong", "invalid_api_key")

    def _tokens(self, body: ChatRequest | CompletionRequest) -> list[int]:
        prompt = body.prompt if isinstance(body, CompletionRequest) else ""
        if isinstance(prompt, list):
            ids = [token for token in prompt if isinstance(token, int)]
            if len(ids) == len(prompt):
                return self._ids.known(ids)
            prompt = str(prompt[0])
        if self._loaded.tokenizer is None:
            raise RefusedError(400, f"{self._loaded.name} has no tokenizer: send token ids to /v1/completions")
        if isinstance(body, ChatRequest):
            return self._loaded.chat_tokens([message.for_template for message in body.messages])
        return self._loaded.prompt_tokens([prompt], template=False)

    async def _answer(self, body: ChatRequest | CompletionRequest, limit: int, request: Request) -> Response:
        tokens, name = await asyncio.to_thread(self._tokens, body), self._loaded.name
        too_long = f"the prompt has {len(tokens)} tokens, and the context {self.context}: shorten it"
        not_served = f"not served here: {', '.join(body.not_served)[:200]}; leave it out"
        refusals: tuple[tuple[object, int, str, str | None], ...] = (
            (body.model not in (None, name), 404, f"there is no model {body.model}, only {name}", "model_not_found"),
            (body.not_served, 400, not_served, "unsupported_parameter"),
            (not tokens, 400, "the prompt has no tokens", None),
            (len(tokens) >= self.context, 400, too_long, "context_length_exceeded"),
        )
        for applies, status, why, code in refusals:
            if applies:
                raise RefusedError(status, why, code)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def report(piece: Piece) -> None:  # on the worker's thread
            with suppress(RuntimeError):  # of a loop that is closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        limit = min(limit, self.longest_answer, self.context - len(tokens))
        job = Job(tokens, limit, body.sampling(self._config), body.seed, body.stop_strings, report)
        if not self.worker.put(job):
            raise RefusedError(429, "too many requests wait already: try again later", "queue_full")
        shape, texts = Shape(name, isinstance(body, ChatRequest)), _texts(job, pieces, request)
        if not body.stream:
            text = "".join([text async for text in texts])
            return JSONResponse(shape.whole(text, job.outcome, _usage(job)))
        first = await anext(texts, "")  # what fails before it has a status of its own
        usage = bool((body.stream_options or {}).get("include_usage"))
        return StreamingResponse(_events(job, first, texts, shape, usage), media_type="text/event-stream")


Piece = str | Exception | None
"""Text of an answer, its error, or None at its end."""


async def _texts(job: Job, pieces: asyncio.Queue[Piece], request: Request) -> AsyncIterator[str]:
    """Yield an answer's text as it comes; a client that vanishes ends the job. Raise RefusedError where it fails."""
    try:
        while True:
            try:
                piece = await asyncio.wait_for(pieces.get(), LOOK_S)
            except TimeoutError:
                if await request.is_disconnected():
                    raise RefusedError(499, "the client has gone") from None
                continue
            if piece is None:
                return
            if isinstance(piece, ClosedError):
                raise RefusedError(503, str(piece))
            if isinstance(piece, Exception):
                why = " ".join(str(piece).split()) or type(piece).__name__
                raise RefusedError(500, f"the request failed: {why}")
            yield piece
    finally:
        job.left.set()


class Shape:
    """How an answer is sent, whole or in pieces: of /v1/chat/completions, else of /v1/completions."""

    def __init__(self, model: str, is_chat: bool) -> None:
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._common = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._is_chat = is_chat

    def whole(self, text: str, finish: str, usage: dict[str, int]) -> dict[str, Any]:
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._sent(kind, finish, text, {"message": {"role": "assistant", "content": text}}) | {"usage": usage}

    def piece(self, text: str, finish: str | None = None) -> dict[str, Any]:
        """Return a piece of one; at the end without text."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._sent(kind, finish, text, {"delta": {} if finish else {"role": "assistant", "content": text}})

    def _sent(self, kind: str, finish: str | None, text: str, chat: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **(chat if self._is_chat else {"text": text})}
        return {**self._common, "object": kind, "choices": [choice]}


async def _events(
    job: Job, first: str, texts: AsyncIterator[str], shape: Shape, usage: bool
) -> AsyncIterator[str | bytes]:
    text = first
    try:
        while text:
            yield _event(shape.piece(text))
            text = await anext(texts, "")
        yield _event(shape.piece("", job.outcome))
        if usage:  # behind the end, alone
            yield _event({**shape.piece(""), "choices": [], "usage": _usage(job)})
        yield "data: [DONE]\n\n"
    except RefusedError as error:
        yield b"data: " + bytes((await _refused(None, error)).body) + b"\n\n"
    finally:
        job.left.set()


def _usage(job: Job) -> dict[str, int]:
    prompt, answer = len(job.tokens), job.answered
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; clients wait until it is served. Raise InputError where it cannot."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InputError(f"cannot listen at --host {host}, --port {port}: {error}; choose others") from error


class Listener(uvicorn.Server):
    """Serves `app` until a signal of ENDS. on_end: called before clients are left."""

    def __init__(self, app: FastAPI, on_end: Callable[[], None]) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=GRACE_S))
        self._on_end = on_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs end with its error; then leave clients that do not read it."""
        self._on_end()
        await super().shutdown(sockets)

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
