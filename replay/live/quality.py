"""The price of bent routing: a model under a rule beside the whole model, on the same text, one token at a time.

Both read the text token by token and give a probability to each next one. Intervals resample stretches of tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, product, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.core.policy import Float
from replay.live.memory import kv_name_in
from replay.live.model import LiveModel
from sim.results.compare import Sample, interval
from tracer.prompts import Prompt
from traces.errors import refuse

STRETCH = 16  # tokens that are drawn together: those that lie side by side are alike


@dataclass(frozen=True)
class Reading:
    """What a model makes of a text."""

    likely: list[Tensor]  # by request float32[tokens, words]: logarithms of the probabilities of the next word
    fetches: float  # experts a token
    ms: float  # a token
    row: dict[str, Any]  # of the run (`sim.results.metrics.RESULTS`)


def read(live: LiveModel, requests: Sequence[Sequence[int]]) -> Reading:
    """Have a model read the tokens of requests, one at a time."""
    name, likely = kv_name_in(live.model), []
    live.clear()
    for ids in requests:
        rows, cache = list[Tensor](), dict[str, Any]()
        for token in ids[:-1]:
            with torch.inference_mode():
                output = live.model(
                    input_ids=torch.tensor([[token]], device=live.loaded.device),
                    **{"use_cache": True, "return_dict": True, **cache},
                )
            cache = {name: output[name]}
            rows.append(output.logits[0, -1].float().log_softmax(-1).cpu())
        live.end_request()
        likely.append(torch.stack(rows))
    counted, tokens = live.counters, sum(map(len, likely))
    fetches = counted["demand_transfers"] + counted["prefetch_transfers"]
    return Reading(likely, fetches / tokens, counted["step_ns"] / tokens / 1e6, live.report().row)


def _totals(requests: Sequence[Sequence[int]], whole: Reading, bent: Reading) -> Float:
    """[5, stretches]: surprise by the bent model, by the whole one, tokens on which both agree, divergence, tokens."""
    totals = []
    for ids, by_whole, by_bent in zip(requests, whole.likely, bent.likely, strict=True):
        following = torch.tensor(ids[1:])[:, None]
        surprise = [-each.gather(-1, following)[:, 0] for each in (by_bent, by_whole)]
        same = (by_whole.argmax(-1) == by_bent.argmax(-1)).float()
        divergence = torch.where(by_whole.isfinite(), by_whole.exp() * (by_whole - by_bent), 0).sum(-1)
        each = torch.stack([*surprise, same, divergence, torch.ones(len(by_whole))]).double().numpy()
        totals.append(np.add.reduceat(each, np.arange(0, len(by_whole), STRETCH), axis=1))
    return np.concatenate(totals, axis=1)


def price(routing: str, requests: Sequence[Sequence[int]], whole: Reading, bent: Reading) -> dict[str, Any]:
    """Return what a rule costs and saves by name, with intervals of 95%."""
    by_bent, by_whole, agreement, kl, tokens = _totals(requests, whole, bent)

    def span(sums: Float, beside: Float) -> Float:
        """Return the mean of a token, less another one, and its interval."""
        mean = (sums.sum() - beside.sum()) / tokens.sum()
        return np.array([mean, *interval(Sample(np.stack([sums, tokens, beside, tokens]), 0))])

    perplexity = {"whole": by_whole, "bent": by_bent}
    found = {name: float(np.exp(sums.sum() / tokens.sum())) for name, sums in perplexity.items()}
    more = np.exp(span(by_bent, by_whole))
    more[0] = found["bent"] / found["whole"]
    spans = {"perplexity_more": more - 1, "agreement": span(agreement, 0 * tokens), "kl": span(kl, 0 * tokens)}
    return {
        **{name: bent.row[name] for name in ("policy", "cache_experts", "cache_fraction")},
        "routing": routing,
        "tokens": int(tokens.sum()),
        "fetches_whole": whole.fetches,
        "fetches": bent.fetches,
        "ms_whole": whole.ms,
        "ms": bent.ms,
        **{name: bent.row[name] for name in ("lost_weight", "changed_choices")},
        "perplexity_whole": found["whole"],
        "perplexity": found["bent"],
        **{
            f"{name}{end}": float(value)
            for name, each in spans.items()
            for end, value in zip(("", "_low", "_high"), each, strict=True)
        },
    }


def sentence(row: dict[str, Any]) -> str:
    low, more, high = (f"{100 * row[f'perplexity_more{end}']:+.1f}" for end in ("_low", "", "_high"))
    share = f"{100 * row['cache_fraction']:.3g}%"
    saved = 1 - row["fetches"] / row["fetches_whole"] if row["fetches_whole"] else 0.0
    return (
        f"Not lossless: {row['routing']} fetches {row['fetches']:.1f} experts a token instead of "
        f"{row['fetches_whole']:.1f} ({saved:.0%} fewer) under {row['policy']} with {share} of the "
        f"experts; perplexity {row['perplexity']:.2f} instead of {row['perplexity_whole']:.2f} ({more}%; 95%: {low} to "
        f"{high}) on {row['tokens']:,} tokens, and {row['agreement']:.1%} of the likeliest next tokens are the same."
    )


def prices(
    opening: Callable[[str, str, str | None], LiveModel],
    prompts: Sequence[Prompt],
    policies: Sequence[str],
    sizes: Sequence[str],
    rules: Sequence[str],
    tokens: int,
) -> list[dict[str, Any]]:
    """Return a row for each policy, cache size and rule, of the first tokens of a text; see `price`.

    opening: opens a model with these three, without a rule for None. Raise InputError for a text without a next token.
    """
    rows = []
    for policy, size in product(policies, sizes):
        readings = {}
        for rule in (None, *rules):
            with opening(policy, size, rule) as live:
                requests = _requests(live, prompts, tokens)
                readings[rule] = read(live, requests)
        rows += [price(rule, requests, readings[None], readings[rule]) for rule in rules]
    return rows


def _requests(live: LiveModel, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """Return the ids of prompts with their answers, of so many tokens together, but for requests of a single one."""
    found: list[list[int]] = []
    for each in prompts:
        turns = filter(None, chain(*zip_longest(each.turns, each.responses)))
        found.append(live.loaded.prompt_tokens(list(turns), template=False)[:tokens])
        tokens -= len(found[-1])
    found = [ids for ids in found if len(ids) > 1]
    refuse((not found, "the text has no request of two tokens: there is no next one"))
    return found
