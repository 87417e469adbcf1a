"""A small server of OpenAI's interface (chat completions and completions, streaming too) in front of a live model.

One request is answered at a time, the others wait in a queue. What cannot be served gets an error as OpenAI's, and
a request that fails leaves the server as it was.
"""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replay.live.metrics import Metrics
from replay.live.model import LiveModel
from replay.live.prompts import TokenIds, reading_ids
from replay.live.requests import Asked, ChatAsked, CompletionAsked
from replay.live.sampling import require_sampling
from replay.live.worker import ClosedError, Job, Piece, Worker
from traces.errors import InputError

NEW_TOKENS = 256
"""Of an answer, where a client does not say."""

LOOK_S = 0.25
"""How often a client that waits for a whole answer is looked after."""

MOST_SENT = 16 << 20
"""Bytes of a request: more than a million tokens have, and what is made of them takes some thirty times as much."""


class RefusedError(Exception):
    """An answer that is an error, as OpenAI's clients read it."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        message = str(self).encode(errors="replace").decode()  # lone surrogates, which UTF-8 has no bytes for
        return {"error": {"message": message, "type": kind, "param": None, "code": self.code}}


class Bounded:
    """Refuses requests that are larger than MOST_SENT, before they are in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
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

        @app.exception_handler(RefusedError)
        async def refused(_: Request, error: RefusedError) -> JSONResponse:
            return JSONResponse(error.body, error.status)

        @app.exception_handler(InputError)
        async def unfit(_: Request, error: InputError) -> JSONResponse:
            return JSONResponse(RefusedError(400, str(error)).body, 400)

        @app.exception_handler(HTTPException)
        async def failed(_: Request, error: HTTPException) -> JSONResponse:
            return JSONResponse(RefusedError(error.status_code, str(error.detail)).body, error.status_code)

        @app.exception_handler(RequestValidationError)
        async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part != "body")
            return JSONResponse(RefusedError(400, f"{where or 'body'}: {first['msg']}").body, 400)

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
        async def chat(asked: ChatAsked, request: Request) -> Response:
            limit = asked.max_completion_tokens or asked.max_tokens
            tokens = await asyncio.to_thread(self._chat_tokens, asked)
            return await self._answer(asked, tokens, limit, Chat(self._loaded.name), request)

        @app.post("/v1/completions", dependencies=guarded)
        async def completions(asked: CompletionAsked, request: Request) -> Response:
            tokens = await asyncio.to_thread(self._prompt_tokens, asked)
            return await self._answer(asked, tokens, asked.max_tokens or 16, Completion(self._loaded.name), request)

        return app

    async def _allow(self, request: Request) -> None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(sent.encode(), self._key.encode()):
            raise RefusedError(401, "the API key is missing or wrong", "invalid_api_key")

    def _chat_tokens(self, asked: ChatAsked) -> list[int]:
        if self._loaded.tokenizer is None:
            raise RefusedError(400, f"{self._loaded.name} has no tokenizer: ask /v1/completions with token ids")
        return self._loaded.chat_tokens([message.for_template for message in asked.messages])

    def _prompt_tokens(self, asked: CompletionAsked) -> list[int]:
        prompt = asked.prompt
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
        self, asked: Asked, tokens: list[int], limit: int | None, shape: "Shape", request: Request
    ) -> Response:
        if asked.model not in (None, self._loaded.name):
            raise RefusedError(404, f"there is no model {asked.model}, only {self._loaded.name}", "model_not_found")
        if not_served := asked.not_served:
            raise RefusedError(
                400, f"not served here: {', '.join(not_served)[:200]}; leave it out", "unsupported_parameter"
            )
        if not tokens:
            raise RefusedError(400, "the prompt has no tokens")
        if len(tokens) >= self.context:
            raise RefusedError(
                400,
                f"the prompt has {len(tokens)} tokens, and the context {self.context}: shorten it",
                "context_length_exceeded",
            )
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[Piece]()
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        job = Job(
            tokens,
            min(limit or NEW_TOKENS, self.longest_answer, self.context - len(tokens)),
            lambda piece: _pass_on(loop, pieces, piece),
            asked.sampling(self._config),
            asked.seed,
            tuple(text for text in stop if text),
        )
        if not self.worker.put(job):
            raise RefusedError(429, "too many requests wait already: try again later", "queue_full")
        try:
            first = await _next(pieces, request)
        except BaseException:
            job.left.set()
            raise
        if first.error:
            raise _failed(first.error)
        if asked.stream:
            usage = bool((asked.stream_options or {}).get("include_usage"))
            return StreamingResponse(_events(job, first, pieces, shape, usage), media_type="text/event-stream")
        try:
            text, piece = first.text, first
            while not piece.ends:
                piece = await _next(pieces, request)
                text += piece.text
        except BaseException:
            job.left.set()
            raise
        if piece.error:
            raise _failed(piece.error)
        return JSONResponse(shape.whole(text, piece.finish, _usage(job, piece.tokens)))


class Shape:
    """How an answer is sent: whole, or piece by piece."""

    kind, piece_kind, prefix = "", "", ""

    def __init__(self, model: str) -> None:
        self._common = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, text: str, finish: str | None, usage: dict[str, int]) -> dict[str, Any]:
        """Return an answer that has ended."""
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **self.content(text)}
        return {**self._common, "object": self.kind, "choices": [choice], "usage": usage}

    def piece(self, text: str | None, finish: str | None) -> dict[str, Any]:
        """Return a piece of one; no text: the end."""
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **self.delta(text)}
        return {**self._common, "object": self.piece_kind, "choices": [choice]}

    def sum(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return what follows the last piece, where it was asked for."""
        return {**self._common, "object": self.piece_kind, "choices": [], "usage": usage}

    def content(self, text: str) -> dict[str, Any]:
        """Return the part of a choice that holds the text."""
        return {"text": text}

    def delta(self, text: str | None) -> dict[str, Any]:
        """Return the same of a piece."""
        return {"text": text or ""}


class Completion(Shape):
    """Of /v1/completions."""

    kind = piece_kind = "text_completion"
    prefix = "cmpl"


class Chat(Shape):
    """Of /v1/chat/completions."""

    kind, piece_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def content(self, text: str) -> dict[str, Any]:
        """Return a message."""
        return {"message": {"role": "assistant", "content": text}}

    def delta(self, text: str | None) -> dict[str, Any]:
        """Return what a message grows by."""
        return {"delta": {} if text is None else {"role": "assistant", "content": text}}


async def _events(
    job: Job, first: Piece, pieces: "asyncio.Queue[Piece]", shape: Shape, usage: bool
) -> AsyncIterator[str]:
    """Yield server-sent events; a client that vanishes ends the job."""
    piece = first
    try:
        while not piece.ends:
            yield _event(shape.piece(piece.text, None))
            piece = await pieces.get()
        if piece.error:
            yield _event(_failed(piece.error).body)
            return
        yield _event(shape.piece(None, piece.finish))
        if usage:
            yield _event(shape.sum(_usage(job, piece.tokens)))
        yield "data: [DONE]\n\n"
    finally:
        job.left.set()


async def _next(pieces: "asyncio.Queue[Piece]", request: Request) -> Piece:
    """Wait for a piece. Raise RefusedError where the client has gone meanwhile."""
    while True:
        try:
            return await asyncio.wait_for(pieces.get(), LOOK_S)
        except TimeoutError:
            if await request.is_disconnected():
                raise RefusedError(499, "the client has gone") from None


def _pass_on(loop: asyncio.AbstractEventLoop, pieces: "asyncio.Queue[Piece]", piece: Piece) -> None:
    """On the worker's thread; a loop that has ended hears nothing."""
    with suppress(RuntimeError):  # how a closed loop answers
        loop.call_soon_threadsafe(pieces.put_nowait, piece)


def _failed(error: Exception) -> RefusedError:
    if isinstance(error, ClosedError):
        return RefusedError(503, str(error))
    return RefusedError(500, f"the request failed: {' '.join(str(error).split()) or type(error).__name__}")


def _usage(job: Job, tokens: int) -> dict[str, int]:
    prompt = len(job.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
