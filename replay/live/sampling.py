"""How a server's model draws tokens: as a request says, else as the model's generation config does, like vLLM.

transformers' own processors of logits apply it. What else a generation config holds is not used, and reported.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tracer.answers import Sampling
from traces.errors import InputError, located

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

    def __post_init__(self) -> None:
        """Raise InputError for what cannot be drawn with."""
        super().__post_init__()
        if self.top_k < -1:
            raise InputError(f"top_k {self.top_k}: use 0 (all tokens), or a number of tokens")
        if not 0 <= self.min_p <= 1:
            raise InputError(f"min_p {self.min_p}: use a number from 0 to 1")
        if not 0.0001 <= self.repetition_penalty <= 100:
            raise InputError(f"repetition_penalty {self.repetition_penalty}: use 1 (none), or one from 0.0001 to 100")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of `generate`."""
        drawn = {"top_k": max(0, self.top_k), "min_p": self.min_p or None} if self.temperature else {}
        return {**super().settings, **drawn, "repetition_penalty": self.repetition_penalty}


class Sampled(BaseModel):
    """What a request, or a generation config, says of it."""

    model_config = ConfigDict(strict=True)

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def sampling(self, config: Any) -> ServedSampling:
        """Return what is asked for; by default what the generation config says, else a temperature of 1.

        Raise InputError for what cannot be drawn with.
        """
        found: dict[str, Any] = {"temperature": 1.0}
        for said in (config, self):
            values = {name: getattr(said, name, None) for name in Sampled.model_fields}
            found |= {name: value for name, value in values.items() if value is not None}
        return ServedSampling(**found)


def require_sampling(config: Any, name: str) -> None:
    """Raise InputError where the generation config of a model cannot be drawn with."""
    with located(f"the generation config of {name}"):
        try:
            own = Sampled.model_validate({each: getattr(config, each, None) for each in Sampled.model_fields})
        except ValidationError as error:
            first = error.errors()[0]
            raise InputError(f"{first['loc'][0]}: {first['msg']}") from error
        own.sampling(None)
        longest = config.max_new_tokens
        if longest is not None and (type(longest) is not int or longest < 1):
            raise InputError(f"max_new_tokens {longest!r}: use a number of tokens, at least 1")


def unused(config: Any) -> list[str]:
    """Return what a generation config holds that would change answers and is not used."""
    return sorted(name for name, usual in UNUSED.items() if getattr(config, name, None) not in (None, usual))
