"""What requests of OpenAI's interface may hold: transformers' server checks names of parameters alone."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)] | None

HARMLESS = {
    *("best_of", "metadata", "n", "parallel_tool_calls", "prediction", "service_tier", "store", "stream_options"),
    "user",
}
"""Parameters that transformers ignores and that change no answer; `n` and `best_of` can only be 1."""

NOT_SERVED = {"chat_template_kwargs", "frequency_penalty", "generation_config", "logit_bias", "suffix"}
"""Parameters that transformers reads otherwise than OpenAI, or which are its own."""

NEUTRAL: tuple[object, ...] = (None, 0, {}, [], "", "auto", ["text"], {"type": "text"})
"""Values of parameters that are not served which request nothing."""


class Requested(BaseModel, strict=True):
    """What both kinds of requests share."""

    model: str | None = None
    max_tokens: Count = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    stream: bool | None = None
    n: Literal[1] | None = None
    best_of: Literal[1] | None = None


class CompletionRequest(Requested):
    """A text to continue with."""

    prompt: NonEmpty | Annotated[list[NonEmpty], Field(min_length=1, max_length=1)]


class TextPart(BaseModel, strict=True):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class TextMessage(BaseModel, strict=True):
    """A message with text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]


class ToolCallMessage(BaseModel, strict=True):
    """A message of the model that calls tools."""

    role: Literal["assistant"]
    tool_calls: Annotated[list[dict[str, Any]], Field(min_length=1)]


class ChatRequest(Requested):
    """A conversation."""

    messages: Annotated[list[TextMessage | ToolCallMessage], Field(min_length=1)]
    max_completion_tokens: Count = None
    tools: list[dict[str, Any]] | None = None


def not_served(body: dict[str, Any], ignored: Collection[str]) -> list[str]:
    """Return the parameters of a request that would change its answer and are not served. ignored: by transformers."""
    return [name for name in {*ignored, *NOT_SERVED} - HARMLESS if body.get(name) not in NEUTRAL]
