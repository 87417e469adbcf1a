"""The device that a run is measured on, and how it runs there: each option once, a field with all that is known of it.

Options of commands, keywords of `replay.replay`, and what of the device decides a measurement's key are read off the
fields. Combinations in which an option would do nothing are refused here, once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from replay.model import DENSE
from sim.experiment import Option, options_of
from traces.errors import InputError, unknown
from traces.typed import typed

DEVICES = ("auto", "virtual", "cpu", "disk", "cuda")
MOST_THREADS = 256  # more of them is taken as a typo

Threads = Annotated[int, Meta(ge=1, le=MOST_THREADS)]


@dataclass(frozen=True)
class DeviceChoice:
    """A device and how it runs. InputError for options that contradict, once the device is not `auto` any more."""

    device: Annotated[str, Option("auto (cuda, or cpu without it), virtual, cpu, disk or cuda.", names=DEVICES)] = (
        "auto"
    )
    store: Annotated[Path | None, Option("File of experts for --device disk (moe-replay store writes it).")] = None
    lanes: Annotated[
        Threads | None, Option("Threads that read the disk. Default: measured, the fewest that are fast.")
    ] = None
    threads: Annotated[
        Threads | None, Option("Threads that compute on the CPU. Default: one less than there are cores.")
    ] = None
    host_dedup: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Option("Share N host buffers between all experts. Default: one buffer per expert."),
    ] = None
    dense: Annotated[str, Option("Dense part of the model: real, or none (experts only).", names=DENSE)] = DENSE[0]
    verify: Annotated[bool, Option("Compare slots with the host at each use (slow).")] = False

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            if option.names and getattr(self, name) not in option.names:
                raise unknown(f"`{name}`", getattr(self, name), option.names)
        if self.device == "auto":
            return
        if self.device == "virtual":
            self._refuse("the virtual device moves and computes nothing", "host_dedup", "verify", "dense")
        if self.device in ("virtual", "cuda"):
            self._refuse(f"only a CPU computes with them, and the device is {self.device}", "threads")
        if self.device != "disk":
            self._refuse(f"it needs the device disk, not {self.device}", "store", "lanes")
        if self.device == "disk":
            self._refuse("for experts in a file, use moe-replay store --dedup", "host_dedup")

    def _refuse(self, why: str, *names: str) -> None:
        """Raise InputError where one of these options has a value other than its default."""
        for each in fields(self):
            if each.name in names and getattr(self, each.name) != each.default:
                raise InputError(f"`{each.name}`: {why}; leave it out")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "DeviceChoice":
        """Return the choice of options as users write them, resolved. Raise InputError."""
        store = values.get("store")
        return typed(cls, {**values, "store": None if store is None else Path(store)}).resolved()

    def resolved(self) -> "DeviceChoice":
        """Return the choice with CUDA, or else the CPU, for `auto`. Raise InputError for a GPU that is not there."""
        if self.device == "cuda":
            require_cuda("cpu")
        if self.device != "auto":
            return self
        import torch

        return replace(self, device="cuda" if torch.cuda.is_available() else "cpu")


OPTIONS = options_of(DeviceChoice)  # the fields, by name


def require_cuda(instead: str) -> None:
    """Raise InputError where there is no GPU; instead: a device that needs none."""
    import torch

    if not torch.cuda.is_available():
        built = "torch finds no GPU" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        raise InputError(f"`device` cuda: {built}; `device` {instead} needs none")
