"""What a policy costs an event: the predictor of rule 14, as every timed cell pays it by default.

`profiles/predictors.toml` is measured by `python -m benchmarks predictors --write` at two shapes; other shapes lie on
the line through both, over the experts of a layer or over all of them, whichever gives more, so that no policy is
flattered. Recency, victims and the queue are any cache's work, so `lru` costs 0; so do oracles, which cannot be run.
"""

from pathlib import Path

from policies.core.spec import PolicySpec, parse
from traces.files import read_toml

TABLE = Path(__file__).parent / "predictors.toml"
COSTS: dict[str, dict[str, list[float]]] = read_toml(TABLE)["us"]

MEASURED = ((26, 64, 6), (58, 256, 8))
"""Layers, experts and top-k at which the table's two columns were measured (DeepSeek-V2-Lite, DeepSeek-V3)."""


def cost_us(policy: PolicySpec, layers: int, experts: int) -> float | None:
    """Return the microseconds an event of a model of `layers` x `experts`; None for a policy of somebody else.

    A preset's own row counts; halves that share what they learn are one predictor, others add up; options do not count.
    """
    rows: list[list[float] | None]
    halves = policy.evict, policy.prefetch
    presets = [
        row
        for name, row in COSTS["preset"].items()
        if name == policy.preset or ((preset := parse(name)).evict, preset.prefetch) == halves
    ]
    if presets:
        rows = list(presets[:1])
    elif policy.shares:
        rows = [COSTS["pair"].get(policy.evict.name)]
    else:
        rows = [COSTS["retention"].get(policy.evict.name), COSTS["prefetch"].get(policy.prefetch.name)]
    costs = [_at(layers, experts, row) for row in rows if row is not None]
    return sum(costs) if len(costs) == len(rows) else None


def _at(layers: int, experts: int, row: list[float]) -> float:
    """Return the cost on the higher of two lines through both points, but at least half of the lower point."""
    (few, small, _), (many, large, _) = MEASURED
    over_layer = (experts - small) / (large - small)
    over_all = (layers * experts - few * small) / (many * large - few * small)
    return max(row[0] + (row[1] - row[0]) * max(over_layer, over_all), min(row) / 2)
