"""What recording needs of a model that runs: its answers, and what each of their tokens was routed to.

Engines are transformers (`tracer.answers`) and llama.cpp (`tracer.llama`), alike in all that `tracer.record` calls.
Nothing here needs one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from tracer.loading import PANEL as RUN
from tracer.prompts import PANEL as PROMPTS
from traces.errors import refuse
from traces.schema import Picks
from traces.typed import Natural, Option

Tokens = list[int]

NEW_TOKENS = 32
"""Tokens that are generated for a request if no limit is given."""


@dataclass(frozen=True)
class Answers:
    """How a model is asked, and how it chooses new tokens: greedily at temperature 0, else drawn."""

    no_chat_template: Annotated[bool, Option("Do not apply the tokenizer's chat template.", PROMPTS)] = False
    max_new_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_000_000)] | None,
        Option("Tokens of a response, at most; of one that is given, all by default.", RUN, str(NEW_TOKENS)),
    ] = None
    temperature: Annotated[float, Option("0: greedy; else sampled.", RUN)] = 0.0
    top_p: Annotated[float, Option("Sample from the likeliest tokens of so much.", RUN)] = 1.0
    seed: Annotated[Natural, Option("Seed of all random numbers.", RUN)] = 0

    def __post_init__(self) -> None:
        """Raise InputError for what cannot be drawn with: logits divided by less are infinite."""
        warm = self.temperature == 0 or 0.0001 <= self.temperature <= 100
        refuse(
            (not warm, f"temperature {self.temperature}: use 0 (greedy), or a number from 0.0001 to 100"),
            (not 0 <= self.top_p <= 1, f"top_p {self.top_p}: use a number from 0 to 1"),
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Those of transformers' `generate`."""
        drawn = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return drawn if self.temperature else {"do_sample": False}


@dataclass(frozen=True)
class Wanted:
    """What is recorded besides the ids. lookahead: distances; picks: of each, None for twice k."""

    weights: bool = False
    lookahead: tuple[int, ...] = ()
    picks: int | None = None
    scores: int | None = None  # candidates of a token, of which these are recorded

    def candidates(self, top_k: int, experts: int) -> int | None:
        """Return how many candidates a token of a model has."""
        return max(top_k, min(self.scores, experts)) if self.scores else None

    def picked(self, top_k: int, experts: int) -> Picks | None:
        """Return what a trace of a model states of its lookahead."""
        return Picks(self.lookahead, min(self.picks or 2 * top_k, experts)) if self.lookahead else None


@dataclass(frozen=True)
class Pass:
    """The routing of one forward pass of one stack over T tokens (rows x columns, flattened by rows).

    L counts the layers of all stacks, k is the most experts of any; ids are -1 where nothing is routed: layers of
    the other stack, dropped tokens, experts that compute nothing. Weights and probabilities are 0 there.
    """

    stack: int  # 0: the only stack, or the encoder; 1: the decoder
    ids: NDArray[np.int32]  # [T, L, k], best expert first
    weights: NDArray[np.float16] | None = None  # [T, L, k]
    lookahead: NDArray[np.int32] | None = None  # [T, L, distances, picks], -1 where there is no layer so far before
    lookahead_scores: NDArray[np.float16] | None = None  # of these
    candidates: NDArray[np.int32] | None = None  # [T, L, C] the ids, then the likeliest others
    scores: NDArray[np.float32] | None = None  # of these, logarithms of probabilities


def messages_of(said: Sequence[str]) -> list[dict[str, str]]:
    """Return what user and model said in turn as a chat template takes it."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]


def candidates_of(
    ids: NDArray[np.int32], probabilities: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return candidates and their scores, as a pass has them. probabilities: [T, L, E]."""
    is_chosen = (np.arange(probabilities.shape[2]) == ids[..., None]).any(-2)
    others = np.argsort(np.where(is_chosen, 1, -probabilities), -1, kind="stable")[..., : count - ids.shape[2]]
    found = np.concatenate([ids, others.astype(np.int32)], -1)
    held = np.take_along_axis(probabilities, np.maximum(found, 0), -1)
    return found, np.log(np.maximum(held, np.finfo(np.float32).tiny)).astype(np.float32)


@dataclass(frozen=True)
class Answer:
    """One request that was answered: its tokens, and where the routing of each lies."""

    prompt: Tokens  # with an encoder: the encoder's tokens, then the decoder's first
    output: Tokens  # the last one was not fed back
    routed: list[tuple[Pass, slice]]  # prompt + output - 1 rows, in order
    drafted: list[int] | None = None  # of the rows behind the prompt, as a trace states it; None: nothing is drafted
