"""A warm start: what a policy has learned, kept in a file for the next time. So far `eamc` saves, its collection."""

from dataclasses import replace
from pathlib import Path

from policies.core.spec import Part, PolicySpec
from policies.eamc.eamc import EamcPrefetcher, EamcRetention
from replay.live.model import LiveModel
from traces.errors import InputError
from traces.output import replacing

OPTION = "collection"


def starting_from(policy: PolicySpec, file: Path) -> PolicySpec:
    """Return the policy as it starts from what `file` holds, if that is there. Raise InputError for one that cannot."""
    if not any(_saves(half) for half in (policy.evict, policy.prefetch)):
        raise InputError(f"--profile: {policy.text} does not save what it learns; eamc does")
    if not file.exists():
        return policy
    evict, prefetch = (
        half.having({OPTION: str(file)}) if _saves(half) else half for half in (policy.evict, policy.prefetch)
    )
    warm = PolicySpec.of(evict, prefetch, policy.scope, policy.placement)
    return replace(warm, typed=policy.typed)


def save(live: LiveModel, file: Path) -> None:
    """Write what the policy of a live model knows now."""
    for half in (live.decider.retention, live.decider.prefetcher):
        if isinstance(half, EamcRetention | EamcPrefetcher):
            learned = half.predictor.saved(live.loaded.name)
            with replacing(file) as part, part.open("wb") as written:
                learned.write(written)
            return


def _saves(half: Part) -> bool:
    return OPTION in half.values
