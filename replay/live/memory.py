"""The memory that a live model takes, part by part, stated before it is taken and compared with the peak afterwards."""

import contextlib
import resource
import sys
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import torch

from replay.devices.lanes import TRIED
from replay.live.shards import BOUNCE_BYTES
from sim.quantities import show_bytes

LEAST_WORKSPACE = 64 << 20  # of a forward pass: allocators keep so much for themselves
EXPERTS = 4  # kernels may reorder an expert's matrices, or widen them: so many experts in any forward pass
KV_NAMES = ("cache", "past_key_values")
"""What transformers calls a KV cache: since 5.24, and before. A model with code of its own may still use the second."""


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    program: int  # the interpreter, its libraries, the policy
    dense: int  # weights of all that is no expert
    slots: int
    kv_per_token: int
    pass_per_token: int  # of a forward pass
    fixed: int  # of any

    def kv(self, tokens: int) -> int:
        return self.kv_per_token * tokens

    def workspace(self, context: int) -> int:
        """Return the bytes of a prefill of so many tokens, with the part of the KV cache that is copied as it grows."""
        return self.fixed + (self.pass_per_token + self.kv_per_token) * context

    def stated(self, context: int) -> int:
        return self.program + self.dense + self.slots + self.kv(context) + self.workspace(context)

    def longest(self, free: int) -> int:
        """Return how many tokens a request may have, prompt and answer, that takes so many bytes."""
        return max(0, free - self.fixed) // (self.pass_per_token + 2 * self.kv_per_token)

    def sentence(self, context: int, peak: int) -> str:
        parts = {
            "program": self.program,
            "dense": self.dense,
            "slots": self.slots,
            f"KV cache of {context:,} tokens": self.kv(context),
            "workspace": self.workspace(context),
        }
        each = " + ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
        return f"memory: peak {show_bytes(peak)}, stated {show_bytes(self.stated(context))} = {each}"


def memory_of(loaded: Any, dense: int, slots: int, expert: int, top_k: int, kv_per_token: int) -> Memory:
    """Return what a model takes whose dense part is in memory, and whose slots are not yet; expert: bytes of one."""
    config = loaded.model.config.get_text_config()
    hidden, width = config.hidden_size, torch.float32.itemsize
    inner = max(size for size in (getattr(config, "intermediate_size", 0), hidden) if isinstance(size, int))
    return Memory(
        program=max(0, resident_bytes() - dense),
        dense=dense,
        slots=slots,
        kv_per_token=kv_per_token,
        pass_per_token=width * (hidden * (2 * top_k + 12) + 4 * inner),
        fixed=LEAST_WORKSPACE + EXPERTS * expert + max(TRIED) * BOUNCE_BYTES + 4 * width * config.vocab_size,
    )


def cache_bytes(cache: Any) -> int:
    held: dict[int, int] = {}
    seen: set[int] = set()

    def walk(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            held[thing.data_ptr()] = thing.nbytes
        elif isinstance(thing, dict | list | tuple):
            for value in thing.values() if isinstance(thing, dict) else thing:
                walk(value)
        elif type(thing).__module__.startswith("transformers.cache_utils"):
            walk(vars(thing))

    walk(cache)
    return sum(held.values())


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """Return the most that it ever had, its parent's not counted, as `ru_maxrss` does behind a fork."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def kv_name_in(model: Any) -> str:
    """Return what a model calls it, as an argument of forward() and in its output."""
    return KV_NAMES[0] if KV_NAMES[0] in signature(model.forward).parameters else KV_NAMES[1]
