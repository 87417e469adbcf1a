"""Options of several commands of `moe-replay`, read off descriptions: the requests of a replay, and its device."""

from dataclasses import fields
from typing import Annotated

from replay.device_choice import DeviceChoice
from sim.commands import options
from terminal.options import Fields
from traces.errors import InputError

_SHOWN = {each.name: each.default for each in fields(DeviceChoice) if isinstance(each.default, str)}


def device(*names: str, default: str = "auto", **help: str) -> Fields:
    """Return these fields of a device as options, with another help for those that have one here."""
    return options.some(*names, of=DeviceChoice, defaults={**_SHOWN, "device": default}, **help)


_REPLAYED = ("device", "store", "lanes", "threads", "host_dedup", "dense")

Replayed = Annotated[
    options.Stated,
    options.some(
        *("model_profile", "requests", "as_decode", "cold", "chunk_bytes", "warmup_requests", "seed"),
        requests="Run the first N requests only. Default: about 1,000 steps; disk: 100 tokens; virtual: all.",
        seed="Seed of the weights. Default: 0.",
    ),
]
"""Which requests are run, and how."""

Compared = Annotated[options.Stated, device(*_REPLAYED)]  # the device of a comparison

Measured = Annotated[options.Stated, device(*_REPLAYED, "verify")]  # the device of a run

Calibrated = Annotated[
    options.Stated,
    device(
        *("device", "host_dedup", "store", "dense"),
        device="auto (cuda, else cpu), cpu, disk or cuda.",
        host_dedup="Share N host buffers between all experts; else as many as hold 8 GiB.",
        store="File of the model's experts, for --device disk.",
    ),
]
"""The device that is calibrated."""

Live = Annotated[
    options.Stated,
    device(
        *("device", "lanes", "store", "threads"),
        default="disk",
        device="disk (experts there, the CPU computes), or cuda (experts in host memory).",
        lanes="Threads that read the disk. Default: measured.",
        store="File for experts that loading converts, written once. Default: in the cache folder.",
        threads="Threads that compute on the CPU; fewer are faster beside other work. Default: torch's.",
    ),
]
"""The device of a model that generates."""


def chosen(on: options.Stated, replayed: options.Stated) -> DeviceChoice:
    """Return the device. Raise InputError for one that is not there, or has no weights that a seed could draw."""
    target = DeviceChoice.of(on)
    if target.device == "virtual" and "seed" in replayed:
        raise InputError("`seed`: the virtual device has no weights; leave it out")
    return target
