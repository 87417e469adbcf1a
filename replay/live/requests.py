"""Requests as clients of OpenAI's interface send them: what a server reads of them, and what it cannot serve."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from replay.live.sampling import Sampled

NEUTRAL: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "logit_bias": ({},),
    "logprobs": (False,),  # 0 asks for those of the tokens themselves
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "priority": (0,),
}
"""Values, besides null, of OpenAI's and vLLM's parameters that are not served: those that ask for nothing."""

WITHOUT_EFFECT = {
    *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user"),
}
"""Parameters that change no answer."""


def _asks_nothing(name: str, value: object) -> bool:
    """Whether a parameter that is not served has a value without effect; 0 is not False, though Python says so."""
    same = (each for each in NEUTRAL.get(name, ()) if isinstance(each, bool) == isinstance(value, bool))
    return value is None or value in same


class Asked(Sampled):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = None

    @property
    def not_served(self) -> list[str]:
        """What the request asks for and this server cannot do."""
        asked = {name: value for name, value in (self.model_extra or {}).items() if name not in WITHOUT_EFFECT}
        return [name for name, value in asked.items() if not _asks_nothing(name, value)]


class Part(BaseModel):
    """Of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """What somebody has said."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part]
    name: str | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)

    @property
    def for_template(self) -> dict[str, str]:
        """What chat templates know."""
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": self.text, **named}

    @property
    def not_served(self) -> list[str]:
        """What else it has, such as calls of tools, and this server would leave out; clients send empty ones along."""
        return [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {}, "")]


class ChatAsked(Asked):
    """A conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def not_served(self) -> list[str]:
        """Also of the messages."""
        return super().not_served + [
            f"messages.{place}.{name}" for place, message in enumerate(self.messages) for name in message.not_served
        ]


class CompletionAsked(Asked):
    """A text, or token ids, to continue with."""

    prompt: str | list[str] | list[int]
