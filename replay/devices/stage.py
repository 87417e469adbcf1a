"""What a model needs on a machine before a run: host memory, pinned for a GPU, its network, and devices over both.

A stage is opened once for a model and serves one run after another, each with a device of its own number of slots.
"""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from replay.devices.cpu import CpuDevice
from replay.devices.cuda import CudaDevice
from replay.devices.device_facts import facts
from replay.devices.gpu import Gpu
from replay.devices.launches import Launches
from replay.devices.pinning import REQUIRE, pinned
from replay.devices.store import HostMemory, HostStore, require_host_memory, stride_of
from replay.model.network import Network, dtype_of
from replay.model.weights import Checkpoint
from sim.loop.device import Device
from sim.profiles.model_profile import ModelProfile
from sim.quantities import show_bytes
from sim.results.metrics import Row
from traces.errors import InputError


@dataclass(frozen=True)
class Needs:
    """What a stage is opened for."""

    profile: ModelProfile
    device: str  # cpu or cuda
    most_tokens: int  # of a step
    most_context: int
    seed: int = 0
    host_dedup: int | None = None  # distinct host buffers; None: one for each expert
    dense: str = "real"  # or none: experts alone
    weights: Path | None = None  # a checkpoint; None: random ones
    pin: str = REQUIRE

    @property
    def experts(self) -> int:
        """Of all MoE layers."""
        return self.profile.moe_layers * self.profile.experts


@dataclass(frozen=True)
class Stage:
    """Open: `device` makes one device after another over the same store and network."""

    needs: Needs
    store: HostStore
    network: Network
    is_pinned: bool
    gpu: Gpu | None = None
    launches: Launches | None = None

    @property
    def facts(self) -> Row:
        """Columns of a replay's row that the stage decides."""
        return {
            **facts(self.gpu, self.store),
            "fallbacks": "; ".join(self.launches.fallbacks) or None if self.launches else None,
            "host_pinned": self.is_pinned,
            "dense": self.needs.dense,
            "dense_loaded": self.network.loaded_share if self.needs.weights else None,
        }

    @contextmanager
    def device(
        self, slots: int, contexts: Iterable[int], verify: bool = False, path: type[CudaDevice] = CudaDevice
    ) -> Iterator[Device]:
        """One with so many slots, ready to decode at these contexts; closed afterwards, whatever happens.

        path: another way to move bytes (`replay.gpu_check.baselines`), on a GPU alone.
        InputError where memory does not suffice, the GPU fails, or what was computed is not finite.
        """
        gpu_bytes = slots * self.store.stride
        needed = f"{slots} slots beside the dense weights"
        try:
            self._require_gpu_memory(gpu_bytes, needed)
            if self.gpu and self.launches:
                device: Device = path(self.store, self.network, slots, self.gpu, self.launches, verify)
            else:
                device = CpuDevice(self.store, self.network, slots, verify)
            try:
                device.prepare(contexts)
                yield device
                if not self.network.finite():
                    why = "try another --seed"
                    if folder := self.needs.weights:
                        why = f"the checkpoint in {folder} does not fit, or is damaged"
                    raise InputError(f"the network's output is not finite, its figures are worth nothing: {why}")
            finally:
                device.close()
        except (torch.OutOfMemoryError, MemoryError):
            raise _out_of_memory(needed, gpu_bytes) from None
        except torch.AcceleratorError as error:
            told = str(error).splitlines()[0]
            raise InputError(f"the GPU reports an error, and the run cannot go on: {told}") from error

    def _require_gpu_memory(self, needed_bytes: float, what: str) -> None:
        if self.gpu is None:
            require_host_memory(needed_bytes, what, SMALLER)
        elif needed_bytes > (free := self.gpu.free_bytes()):
            raise _out_of_memory(what, needed_bytes, f", but {show_bytes(free)} of GPU memory are free")


@contextmanager
def open_stage(needs: Needs, memory: HostMemory | None = None, gpu: Gpu | None = None) -> Iterator[Stage]:
    """Take memory, pin it, fill it, make the network.

    memory: one that exists, registered where `gpu` is given with it, for models that come one after another; the store
    takes what fits of it.
    """
    profile = needs.profile
    dtype_of(profile.expert_bytes_per_parameter, "an expert's")
    checkpoint = Checkpoint(needs.weights, profile) if needs.weights else None
    if needs.device == "cuda" and gpu is None:
        gpu = Gpu()
    if memory:
        store = HostStore(memory, needs.experts, profile.expert_bytes)
    else:
        _require_host_memory(needs)
        store = HostStore.of(needs.experts, profile.expert_bytes, needs.seed, needs.host_dedup)
    if checkpoint:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(lambda expert: checkpoint.fill(expert, store[expert]), range(store.distinct)))
    device = gpu.device if gpu else torch.device("cpu")
    if gpu is None:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core is the link's
    pin = pinned(store.memory, needs.pin, gpu) if gpu and not memory else nullcontext(gpu is not None)
    sizes = needs.most_tokens, needs.most_context
    try:
        with torch.inference_mode(), pin as is_pinned:
            network = Network(profile, device, *sizes, needs.seed, needs.dense, checkpoint)
            yield Stage(needs, store, network, is_pinned, gpu, Launches(gpu, network) if gpu else None)
    except (torch.OutOfMemoryError, MemoryError):
        raise _out_of_memory("the dense weights and the KV cache", _network_bytes(needs), advice=FEWER) from None


def _require_host_memory(needs: Needs) -> None:
    """InputError before anything is taken."""
    buffers = needs.host_dedup or needs.experts
    nbytes: float = buffers * stride_of(needs.profile.expert_bytes)
    what, advice = f"a host store of {buffers} of {needs.experts} experts", "--host-dedup N shares N between them all"
    if needs.device == "cpu":
        network_bytes = _network_bytes(needs)
        what += f", beside dense weights and KV cache of {show_bytes(network_bytes)},"
        nbytes += network_bytes
    require_host_memory(nbytes, what, advice)


def _network_bytes(needs: Needs) -> int:
    """Of dense weights and KV cache, before they are taken."""
    sizes = needs.most_tokens, needs.most_context
    return Network(needs.profile, torch.device("meta"), *sizes, needs.seed, needs.dense).nbytes


SMALLER, FEWER = "choose a smaller --cache-size, or --dense none", "go on with --dense none"


def _out_of_memory(what: str, needed_bytes: float, but: str = "", advice: str = SMALLER) -> InputError:
    return InputError(f"out of memory: {what} need {show_bytes(needed_bytes)}{but}; {advice}")
