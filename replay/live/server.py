"""A small server of OpenAI's interface (chat completions and completions, streaming too) in front of a live model.

One request is answered at a time, the others wait in a queue. What cannot be served gets an error as OpenAI's, and
a request that fails leaves the server as it was.
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

from replay.live.metrics import Metrics
from replay.live.model import LiveModel
from replay.live.prompts import TokenIds, reading_ids
from replay.live.requests import ChatRequest, CompletionRequest, Requested, require_sampling
from replay.live.worker import ClosedError, Job, Piece, Worker
from traces.errors import InputError

NEW_TOKENS = 256
"""Of an answer, where a client does not say."""

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


def _error_body(error: HTTPException) -> dict[str, Any]:
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return {"error": {"message": error.detail, "type": kind, "param": None, "code": getattr(error, "code", None)}}


class Bounded:
    """Refuses requests that are larger than MOST_SENT, before they are in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = 0

        async def counted() -> Message:
            nonlocal sent
            message = await receive()
            sent += len(message.get("body", b""))
            if sent > MOST_SENT:
                raise HTTPException(413, f"the request has more than {MOST_SENT} bytes: shorten it")
            return message

        await self._app(scope, counted, send)


class Server:
    """The application and its worker. api_key: what clients must send; None: nothing."""

    def __init__(self, live: LiveModel, api_key: str | None = None, max_context: int | None = None) -> None:
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
        self.worker = Worker(live, loaded, self.metrics.served)
        self.app = self._application()

    @property
    def longest_answer(self) -> int:
        """Return how many tokens an answer has at most, as the generation config says; else those of the context."""
        return self._config.max_new_tokens or self.context

    def _application(self) -> FastAPI:
        app = FastAPI(title="moe-replay serve", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_middleware(Bounded)
        guarded = [Depends(self._allow)]

        @app.exception_handler(HTTPException)
        async def refused(_: Request, error: HTTPException) -> JSONResponse:
            return JSONResponse(_error_body(error), error.status_code)

        @app.exception_handler(InputError)
        async def unfit(_: Request, error: InputError) -> JSONResponse:
            return JSONResponse(_error_body(RefusedError(400, str(error))), 400)

        @app.exception_handler(RequestValidationError)
        async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part != "body")
            return JSONResponse(_error_body(RefusedError(400, f"{where or 'body'}: {first['msg']}")), 400)

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
            tokens = await asyncio.to_thread(self._chat_tokens, body)
            limit = body.max_completion_tokens or body.max_tokens or NEW_TOKENS
            return await self._answer(body, tokens, limit, Shape(self._loaded.name, True), request)

        @app.post("/v1/completions", dependencies=guarded)
        async def completions(body: CompletionRequest, request: Request) -> Response:
            tokens = await asyncio.to_thread(self._prompt_tokens, body)
            return await self._answer(body, tokens, body.max_tokens or 16, Shape(self._loaded.name, False), request)

        return app

    async def _allow(self, request: Request) -> None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(sent.encode(), self._key.encode()):
            raise RefusedError(401, "the API key is missing or wrong", "invalid_api_key")

    def _chat_tokens(self, body: ChatRequest) -> list[int]:
        if self._loaded.tokenizer is None:
            raise RefusedError(400, f"{self._loaded.name} has no tokenizer: ask /v1/completions with token ids")
        return self._loaded.chat_tokens([message.for_template for message in body.messages])

    def _prompt_tokens(self, body: CompletionRequest) -> list[int]:
        prompt = body.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            if self._loaded.tokenizer is None:
                raise RefusedError(400, f"{self._loaded.name} has no tokenizer: send token ids as the prompt")
            return self._loaded.prompt_tokens([prompt], template=False)
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise RefusedError(400, "prompt: one text, or one list of token ids")
        return self._ids.known(ids)

    async def _answer(
        self, body: Requested, tokens: list[int], limit: int, shape: "Shape", request: Request
    ) -> Response:
        job, pieces = self._submitted(body, tokens, limit, request)
        try:
            piece = await _next(pieces, request)
            if body.stream:
                usage = bool((body.stream_options or {}).get("include_usage"))
                return StreamingResponse(_events(job, piece, pieces, shape, usage), media_type="text/event-stream")
            text = piece.text
            while not piece.ends:
                piece = await _next(pieces, request)
                text += piece.text
        except BaseException:
            job.left.set()
            raise
        return JSONResponse(shape.whole(text, piece.finish, _usage(job, piece.tokens)))

    def _submitted(
        self, body: Requested, tokens: list[int], limit: int, request: Request
    ) -> tuple[Job, "asyncio.Queue[Piece]"]:
        """Put a job into the queue; return it, and where its pieces come. Raise RefusedError."""
        if body.model not in (None, self._loaded.name):
            raise RefusedError(404, f"there is no model {body.model}, only {self._loaded.name}", "model_not_found")
        if not_served := body.not_served:
            named = ", ".join(not_served)[:200]
            raise RefusedError(400, f"not served here: {named}; leave it out", "unsupported_parameter")
        if not tokens:
            raise RefusedError(400, "the prompt has no tokens")
        if len(tokens) >= self.context:
            text = f"the prompt has {len(tokens)} tokens, and the context {self.context}: shorten it"
            raise RefusedError(400, text, "context_length_exceeded")
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()

        def report(piece: Piece) -> None:  # on the worker's thread
            with suppress(RuntimeError):  # of a loop that is closed
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        limit = min(limit, self.longest_answer, self.context - len(tokens))
        job = Job(tokens, limit, report, body.sampling(self._config), body.seed, body.stop_strings)
        if not self.worker.put(job):
            raise RefusedError(429, "too many requests wait already: try again later", "queue_full")
        return job, pieces


class Shape:
    """How an answer is sent, whole or in pieces: of /v1/chat/completions, else of /v1/completions."""

    def __init__(self, model: str, is_chat: bool) -> None:
        prefix = "chatcmpl" if is_chat else "cmpl"
        self._common = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._is_chat = is_chat

    def whole(self, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
        """Return an answer that has ended."""
        content = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._common, "object": kind, "choices": _choices(finish, content), "usage": usage}

    def piece(self, text: str, finish: str | None = None, usage: dict[str, int] | None = None) -> dict[str, Any]:
        """Return a piece of one; at the end without text; behind it, where it was requested, with the usage alone."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        if usage:
            return {**self._common, "object": kind, "choices": [], "usage": usage}
        delta = {"delta": {} if finish else {"role": "assistant", "content": text}}
        return {**self._common, "object": kind, "choices": _choices(finish, delta if self._is_chat else {"text": text})}


def _choices(finish: str | None, content: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"index": 0, "finish_reason": finish, "logprobs": None, **content}]


async def _next(pieces: "asyncio.Queue[Piece]", request: Request) -> Piece:
    """Wait for a piece. Raise RefusedError where the request fails, or the client has gone meanwhile."""
    while True:
        try:
            piece = await asyncio.wait_for(pieces.get(), LOOK_S)
        except TimeoutError:
            if await request.is_disconnected():
                raise RefusedError(499, "the client has gone") from None
            continue
        if piece.error:
            raise _failed(piece.error)
        return piece


async def _events(
    job: Job, first: Piece, pieces: "asyncio.Queue[Piece]", shape: Shape, usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; a client that vanishes ends the job."""
    piece = first
    try:
        while not piece.ends:
            yield _event(shape.piece(piece.text))
            piece = await pieces.get()
        if piece.error:
            yield _event(_error_body(_failed(piece.error)))
            return
        yield _event(shape.piece("", piece.finish))
        if usage:
            yield _event(shape.piece("", usage=_usage(job, piece.tokens)))
        yield "data: [DONE]\n\n"
    finally:
        job.left.set()


def _failed(error: Exception) -> RefusedError:
    if isinstance(error, ClosedError):
        return RefusedError(503, str(error))
    return RefusedError(500, f"the request failed: {' '.join(str(error).split()) or type(error).__name__}")


def _usage(job: Job, tokens: int) -> dict[str, int]:
    prompt = len(job.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


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
