"""Speculation as a transformation of steps: decoded tokens with drafted ones behind them (rule 20 of the contract)."""

from dataclasses import dataclass, replace

import numpy as np

from traces.steps import DECODE, Int, Lookahead, RequestSteps, grouped


@dataclass(frozen=True)
class Drafts:
    """How many tokens are drafted for each decode step, and how many of them are accepted.

    acceptance: the probability that a drafted token is accepted, if those before it are; drawn for each token of a
    request by `seed`, alike for every probability. Or the accepted tokens of step after step of each request, from the
    first one again when they are used up; a step accepts no more than it drafts. None: as the trace states of its own
    recording; what drafted more than `length` there is several steps.
    """

    length: int
    acceptance: float | tuple[int, ...] | None
    seed: int = 0

    def of(self, steps: RequestSteps, layers: int, experts: int, recorded: Int | None = None) -> RequestSteps:
        """Return the request with its decoded tokens in steps of 1 + `length`; the last may have fewer.

        What was drafted and rejected is routed as the tokens half of the decoded tokens away, counted in a circle.
        layers, experts: of the model. recorded: [decoded] what the trace states (`traces.schema.OPTIONAL`).
        """
        first = int(np.argmax(steps.phase == DECODE)) if (steps.phase == DECODE).any() else len(steps.phase)
        decoded = len(steps.phase) - first
        begins, kept, tokens = self._places(steps.request, decoded, recorded)
        step = np.repeat(np.arange(len(begins)), tokens)
        place = np.arange(len(step)) - np.repeat(np.cumsum(tokens) - tokens, tokens)  # in its step
        row = begins[step] + place
        row = np.where(place < kept[step], row, (row + decoded // 2) % max(decoded, 1))
        # The prefill stays as it is, one step or several.
        rows = np.concatenate([np.arange(first), first + row])
        step = np.concatenate([np.arange(first), first + step])
        count = first + len(begins)
        ahead, ids = steps.lookahead, steps.token_ids
        drafted, own = np.concatenate([np.zeros(first, np.int64), tokens - 1]), np.cumsum(steps.tokens) - steps.tokens
        taken_in = np.concatenate([np.arange(steps.tokens[:first].sum()), own[first + row]])
        values = steps.counts, *([] if steps.weights is None else [steps.weights])
        event, taken = _together(steps.offsets, rows, step, layers)
        offsets, chosen, counts, *weights = grouped(
            event, steps.experts[taken], [each[taken] for each in values], count * layers, layers * experts
        )
        if ahead is not None:
            event, taken = _together(ahead.offsets, rows, step, per := layers * ahead.depth)
            picks = [each[taken] for each in (ahead.counts, ahead.scores)]
            found = grouped(event, ahead.experts[taken], picks, count * per, layers * experts)
            ahead = Lookahead(layers, ahead.depth, *found)
        return replace(
            steps,
            phase=np.concatenate([steps.phase[:first], np.full(len(begins), DECODE, np.uint8)]),
            tokens=np.concatenate([steps.tokens[:first], tokens]),
            context=np.concatenate([steps.context[:first], steps.context[first:][begins] + tokens - 1]),
            offsets=offsets,
            experts=chosen,
            counts=counts,
            weights=weights[0] if weights else None,
            lookahead=ahead,
            token_ids=None if ids is None else ids[taken_in],
            choices=steps.choices and steps.choices.rows(taken_in),
            drafted=drafted,
            rejected=np.concatenate([np.zeros(first, np.int64), tokens - kept]),
        )

    def _places(self, request: int, decoded: int, recorded: Int | None) -> tuple[Int, Int, Int]:
        """Return of each decode step the token that it begins with, tokens that stay, and all of its tokens."""
        if self.acceptance is None:
            assert recorded is not None, "a trace that states no drafts needs an acceptance"
            return self._recorded(recorded)
        likely = np.zeros(0, np.int64)
        if isinstance(self.acceptance, float):
            draws = np.random.default_rng([self.seed, request]).random((decoded, self.length))
            likely = (draws < self.acceptance).cumprod(axis=1).sum(axis=1)
        found: list[tuple[int, int, int]] = []
        at = 0
        while at < decoded:
            drafted = min(self.length, decoded - 1 - at)
            if isinstance(self.acceptance, float):
                accepted = min(int(likely[at]), drafted)
            else:
                accepted = min(self.acceptance[len(found) % len(self.acceptance)], drafted)
            found.append((at, 1 + accepted, 1 + drafted))
            at += 1 + accepted
        begins, kept, tokens = np.array(found, np.int64).reshape(-1, 3).T
        return begins, kept, tokens

    def _recorded(self, drafted: Int) -> tuple[Int, Int, Int]:
        """Return the same of steps as they were recorded, those of too many tokens cut."""
        places, decoded = np.arange(len(drafted)), len(drafted)
        passes = np.maximum.accumulate(np.where((drafted >= 0) | (places == 0), places, 0))  # where each began
        begins = np.flatnonzero((places - passes) % (1 + self.length) == 0)
        kept = np.diff(begins, append=decoded)
        behind = drafted[passes[begins]] - (begins - passes[begins])  # of what was drafted
        return begins, kept, 1 + np.clip(behind, kept - 1, np.minimum(self.length, decoded - 1 - begins))


def _together(offsets: Int, rows: Int, step: Int, events: int) -> tuple[Int, Int]:
    """Return the event of each entry of some rows, of which each step is the union, and its place.

    offsets: of the events of all rows, so many a row. rows, step: [R] of each row that is taken.
    """
    bounds = offsets[rows[:, None] * events + np.arange(events + 1)]
    lengths = np.diff(bounds).ravel()
    begins = bounds[:, :-1].ravel()
    taken = np.repeat(begins - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())
    return np.repeat((step[:, None] * events + np.arange(events)).ravel(), lengths), taken
