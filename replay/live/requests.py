"""Requests as clients of OpenAI's interface send them: what a server reads of them, and what it cannot serve.

How tokens are drawn is as a request says, else as the model's generation config says, like vLLM; transformers' own
processors of logits apply it. What else a generation config holds is not used, and reported.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tracer.observed import Sampling
from traces.errors import InputError

NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("tools", "functions", "stop_token_ids", "bad_words"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("top_logprobs", "presence_penalty", "frequency_penalty", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("length_penalty", "best_of"), (1,)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    "logprobs": (False,),  # 0 asks for those of the tokens themselves
    "modalities": (["text"],),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
}
"""Values, besides null, of OpenAI's and vLLM's parameters that are not served: those that request nothing."""

WITHOUT_EFFECT = {
    *("metadata", "parallel_tool_calls", "prediction", "prompt_cache_key", "prompt_cache_retention"),
    *("safety_identifier", "service_tier", "store", "user"),
}
"""Parameters that change no answer."""

UNUSED: dict[str, object] = {
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "force_words_ids")),
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_eos_token_id", "max_time")),
    **dict.fromkeys(("penalty_alpha", "sequence_bias", "stop_strings", "suppress_tokens", "top_h")),
    **dict.fromkeys(("min_new_tokens", "watermarking_config")),
    **dict.fromkeys(("diversity_penalty", "encoder_no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff"), 0),
    **dict.fromkeys(("min_length", "no_repeat_ngram_size"), 0),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "num_beams", "typical_p"), 1),
    "max_length": 20,
}
"""What changes answers of transformers' `generate` and none of a server; values without effect, besides null."""


@dataclass(frozen=True)
class ServedSampling(Sampling):
    """With what vLLM applies besides."""

    top_k: int = 0  # likeliest tokens that are drawn from; 0 or -1: all
    min_p: float = 0.0  # least probability of a token, as a share of the likeliest one's
    repetition_penalty: float = 1.0  # of tokens in prompt and answer, also where nothing is drawn

    @property
    def settings(self) -> dict[str, Any]:
        drawn = {"top_k": max(0, self.top_k), "min_p": self.min_p or None} if self.temperature else {}
        return {**super().settings, **drawn, "repetition_penalty": self.repetition_penalty}


class Sampled(BaseModel):
    """What a request, or a generation config, says about sampling."""

    model_config = ConfigDict(strict=True)

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.0001, le=100)] | None = None

    def sampling(self, config: Any) -> ServedSampling:
        """Return the sampling requested, by default the generation config's, else a temperature of 1.

        Raise InputError for a temperature or a top-p that cannot be drawn with.
        """
        values: dict[str, Any] = {"temperature": 1.0}
        for source in (config, self):
            stated = {name: getattr(source, name, None) for name in Sampled.model_fields}
            values |= {name: value for name, value in stated.items() if value is not None}
        return ServedSampling(**values)


class GenerationDefaults(Sampled):
    """What a server reads of a model's generation config."""

    max_new_tokens: Annotated[int, Field(ge=1)] | None = None


def require_sampling(config: Any, name: str) -> None:
    """Raise InputError where the generation config of a model cannot be drawn with."""
    try:
        stated = {field: getattr(config, field, None) for field in GenerationDefaults.model_fields}
        GenerationDefaults.model_validate(stated).sampling(None)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"the generation config of {name}: {first['loc'][0]}: {first['msg']}") from error


def unused(config: Any) -> list[str]:
    """Return what a generation config holds that would change answers and is not used."""
    return sorted(name for name, usual in UNUSED.items() if getattr(config, name, None) not in (None, usual))


class Requested(Sampled):
    """What both kinds of requests share."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: Literal[1] | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in stop if text)

    @property
    def not_served(self) -> list[str]:
        """Return the parameters that would change the answer and are not served."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if name not in WITHOUT_EFFECT}
        return [name for name, value in extra.items() if not _requests_nothing(name, value)]


def _requests_nothing(name: str, value: object) -> bool:
    """Return whether a parameter has a value without effect; 0 is not False, though Python says so."""
    same = (each for each in NEUTRAL.get(name, ()) if isinstance(each, bool) == isinstance(value, bool))
    return value is None or value in same


class Part(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Part]
    name: str | None = None

    @property
    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **({} if self.name is None else {"name": self.name})}

    @property
    def not_served(self) -> list[str]:
        """Return what else it has, such as calls of tools; clients send empty ones along."""
        return [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {}, "")]


class ChatRequest(Requested):
    """A conversation."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def not_served(self) -> list[str]:
        """Return also what of the messages is not served."""
        return super().not_served + [
            f"messages.{place}.{name}" for place, message in enumerate(self.messages) for name in message.not_served
        ]


class CompletionRequest(Requested):
    """A text, or token ids, to continue with."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)] | list[int]
