"""`eamc` by its words (policies/eamc/eamc.py, PAPER.md): whole matrices in lists, everything again at every event."""

import numpy as np

from policies.core.events import Events
from policies.core.policy import Event, ScorePolicy, Shape
from policies.core.spec import parse
from policies.eamc.collection import EamcOptions
from traces.steps import RequestSteps


def cosine(a, b) -> float:
    norms = np.sqrt(float((a * a).sum())) * np.sqrt(float((b * b).sum()))
    return float((a * b).sum()) / norms if norms else 0.0


def mean_of_rows(a, b, rows) -> float:
    return sum(cosine(a[row], b[row]) for row in rows) / len(rows) if len(rows) else 0.0


def nearest(similarities, n) -> list[int]:
    """Of entries in order of age: the n most similar, ties to the oldest."""
    left, chosen = dict(enumerate(similarities)), list[int]()
    while left and len(chosen) < n:
        greatest = max(left.values())
        chosen.append(min(c for c, similarity in left.items() if similarity >= greatest * (1 - 1e-12)))
        del left[chosen[-1]]
    return chosen


def slow_representatives(eams, k) -> list[int]:
    """K-means by D = 1 - mean over layers of the rows' cosine, started at the first k; the EAM nearest each centre."""
    rows = range(len(eams[0]))

    def scaled(eam):
        return np.array([row / np.sqrt((row * row).sum()) if row.any() else row * 0.0 for row in eam.astype(float)])

    centres, groups = [scaled(eam) for eam in eams[:k]], list[int]()
    for _ in range(100):
        near = [[mean_of_rows(eam, centre, rows) for centre in centres] for eam in eams]
        before, groups = groups, [nearest(similarities, 1)[0] for similarities in near]
        if groups == before:
            break
        for g in set(groups):
            centres[g] = sum(scaled(eam) for eam, group in zip(eams, groups, strict=True) if group == g)
    chosen = []
    for g in set(groups):
        members = [i for i, group in enumerate(groups) if group == g]
        chosen.append(members[nearest([near[i][g] for i in members], 1)[0]])
    return sorted(chosen)


class SlowCollection:
    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.options, self.layers = options, range(shape.layers)
        self.stored: list[list] = []  # [EAM, uses], the oldest first
        self.waiting: list[np.ndarray] = []
        self.request = np.zeros((shape.layers, shape.experts), np.int64)

    def similarity(self, eam, stored, rows) -> float:
        if self.options.cosine == "flat":
            return cosine(eam[rows], stored[rows])
        return mean_of_rows(eam, stored, rows)

    def match(self, iteration, layer):
        """The sum of the matched EAMs, None without one."""
        L = len(self.layers)
        rows = {"all": range(L), "past": range(layer + 1), "future": range(layer + 1, L)}[self.options.layers]
        sources = {"iteration": [iteration], "request": [self.request], "both": [iteration, self.request]}
        found = nearest(
            [
                np.mean([self.similarity(eam, stored, list(rows)) for eam in sources[self.options.source]])
                for stored, _ in self.stored
            ],
            self.options.matches,
        )
        for entry in found:
            self.stored[entry][1] += 1
        return sum(self.stored[entry][0] for entry in found) if found else None

    def learn(self) -> None:
        eam, capacity = self.request.copy(), self.options.capacity
        self.request[:] = 0
        if not eam.any():
            return
        if len(self.stored) < capacity:
            self.stored.append([eam, 0])
            return
        if self.options.replacement == "k-means":
            self.waiting.append(eam)
            if len(self.waiting) == capacity:
                everything = self.stored + [[eam, 0] for eam in self.waiting]
                stay = slow_representatives([eam for eam, _ in everything], capacity)
                self.stored, self.waiting = [everything[i] for i in stay], []
            return
        goes = {
            "nearest": lambda: nearest([self.similarity(eam, old, list(self.layers)) for old, _ in self.stored], 1)[0],
            "least-used": lambda: min(range(capacity), key=lambda i: (self.stored[i][1], i)),
            "fifo": lambda: 0,
        }[self.options.replacement]()
        del self.stored[goes]
        self.stored.append([eam, 0])


class SlowEamc:
    """Scores and proposals of `eamc` with any options."""

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.shape, self.options = shape, options
        self.collections = [SlowCollection(shape, options) for _ in range(2 if options.split else 1)]
        self.step: int | None = None
        self.ratio, self.known = np.zeros((shape.layers, shape.experts)), False

    def observe(self, event: Event) -> None:
        step = int(event.steps[0])
        if self.step != step:
            self.step = step
            self.iteration = np.zeros(self.ratio.shape, np.int64)
        collection = self.collections[event.phase if self.options.split else 0]
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.iteration[divmod(expert, self.shape.experts)] += count
            collection.request[divmod(expert, self.shape.experts)] += count
        found = collection.match(self.iteration, event.layer)
        self.known = found is not None
        self.ratio = np.zeros(self.ratio.shape)
        for row in range(self.shape.layers):
            if self.known and found[row].any():
                self.ratio[row] = found[row] / found[row].sum()

    def proposal(self, layer: int) -> dict[int, float]:
        L, E = self.ratio.shape
        return {
            i * E + e: (self.ratio[i, e] + self.options.eps) * (1 - (i - layer) / L)
            for i in range(layer + 1, L)
            if self.known and (self.options.depth == 0 or i - layer <= self.options.depth)
            for e in range(E)
            if self.ratio[i, e] > self.options.threshold
        }

    def keep(self, layer: int) -> list[float]:
        """The primary scores: Algorithm 1, or 1 for candidates where those are spared."""
        L, E = self.ratio.shape
        if self.options.keep == "least-visited":
            return [0.0] * (L * E)
        if self.options.keep == "most-visited":
            return [float(expert in self.proposal(layer)) for expert in range(L * E)]
        steps = [i - layer if i > layer else i - layer + L for i in range(L)]  # layers until layer i comes (again)
        decay = {
            "first": [1 - i / L for i in range(L)],
            "none": [1.0] * L,
            "next": [1 - (steps[i] - 1) / L for i in range(L)],
        }
        return [
            (self.ratio[i, e] + self.options.eps) * decay[self.options.decay][i] for i in range(L) for e in range(E)
        ]

    def end_request(self, batch_slot: int) -> None:
        for collection in self.collections:
            collection.learn()
        self.step = None


def policy_of(options: EamcOptions) -> str:
    written = [f"{name}={str(value).lower()}" for name, value in vars(options).items()]
    return "eamc:" + ":".join(part for part in written if part != "collection=")


def events(requests: list[RequestSteps], L: int, first: int = 0):
    """(request, its events) of each."""
    for ordinal, request in enumerate(requests, first):
        made = Events.of(request, L)
        yield ordinal, [made.event(step, layer) for step in range(len(request.phase)) for layer in range(L)]


def compare(shape: Shape, options: EamcOptions, requests: list[RequestSteps]) -> int:
    """Hold `eamc` to its words, event by event; how many experts were proposed."""
    keeper, prefetcher = parse(policy_of(options)).build(shape)
    assert isinstance(keeper, ScorePolicy)
    slow, proposed = SlowEamc(shape, options), 0
    for _, heard in events(requests, shape.layers):
        for event in heard:
            keeper.observe(event)
            slow.observe(event)
            np.testing.assert_allclose(keeper.keep[0], slow.keep(event.layer), rtol=1e-12, err_msg=str(event))
            ids, priorities = prefetcher.propose(event)
            wanted = slow.proposal(event.layer)
            assert ids.tolist() == sorted(wanted), event
            np.testing.assert_allclose(priorities, [wanted[i] for i in ids.tolist()], rtol=1e-12)
            proposed += len(ids)
        for listener in (keeper, prefetcher, slow):
            listener.end_request(0)
    return proposed
