"""Drafts that are looked up: what followed the same last tokens before, in prompt or answer (rule 20 of the contract).

transformers finds and compares them (`prompt_lookup_num_tokens`). It would also draft behind the prompt, and more
tokens than the answer may still have; here neither is done, so that a prefill is the prompt alone.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch import Tensor
from transformers.generation import CandidateGenerator


class LookupDrafts(CandidateGenerator):  # type: ignore[misc]  # transformers has no types
    """What `own`, a prompt lookup of transformers, drafts behind decoded tokens."""

    def __init__(self, own: Any) -> None:
        self._own, self._is_prefill = own, True

    def get_candidates(self, input_ids: Tensor, **more: Any) -> tuple[Tensor, None]:
        """Return the tokens so far, [1, tokens], with the drafted ones behind them."""
        if self._is_prefill:
            self._is_prefill = False
            return input_ids, None
        found, _ = self._own.get_candidates(input_ids, **more)
        return found[:, : self._own.max_length - 1], None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Learn nothing."""


def drafting(model: Any) -> AbstractContextManager[Any]:
    """Let `generate` of a model draft so, where its generation config has `prompt_lookup_num_tokens`."""
    own = model._get_candidate_generator
    return patch.object(model, "_get_candidate_generator", lambda **settings: LookupDrafts(own(**settings)))
