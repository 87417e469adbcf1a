"""A warm start: what a policy has learned, kept in a file for the next time."""

from dataclasses import replace
from pathlib import Path

from policies.core.policy import Listener
from policies.core.spec import Part, PolicySpec
from traces.errors import refuse
from traces.output import check_file, replacing


def starting_from(policy: PolicySpec, file: Path | None) -> PolicySpec:
    """Return the policy as it starts from what `file` holds, if that is there. Raise InputError for one that cannot."""
    saving = sum(bool(half.cls.starts_from) for half in (policy.evict, policy.prefetch))
    if not file:
        return policy
    apart = saving == 2 and not (policy.shares and policy.prefetch.cls.shares_state_with(policy.evict.cls))
    refuse(
        (not saving, f"--profile: {policy.text} does not save what it learns; eamc and eamc-blend do"),
        (apart, f"--profile: both halves of {policy.text} save what they learn, and a profile is of one"),
    )
    check_file(file, overwrite=True)  # better now than when all is learned
    if not file.exists():
        return policy
    evict, prefetch = _from(policy.evict, file), _from(policy.prefetch, file)
    return replace(PolicySpec.of(evict, prefetch, policy.scope, policy.placement), typed=policy.typed)


def _from(half: Part, file: Path) -> Part:
    return half.having({half.cls.starts_from: str(file)}) if half.cls.starts_from else half


def write_learned(halves: tuple[Listener, Listener], model: str, file: Path) -> None:
    """Write what the policy has learned from runs of `model`."""
    for half in halves:
        if half.starts_from:
            with replacing(file) as part, part.open("wb") as written:
                half.save(written, model)
            return
