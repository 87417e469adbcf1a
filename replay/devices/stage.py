"""What a model takes on a machine before a run: its experts in host memory, pinned for a GPU, or in a file on a disk;
its network; and devices over both.

A stage is opened once for a model and serves one run after another, each with a device of its own number of slots.
"""

import platform
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch

from replay.device_choice import DeviceChoice
from replay.devices.cpu import CpuDevice
from replay.devices.cuda import CudaDevice, Launches
from replay.devices.expert_file import ExpertFile
from replay.devices.gpu import Gpu, pinned
from replay.devices.lanes import knee, rates
from replay.devices.store import ExpertSource, HostMemory, HostStore, require_memory, stride_of
from replay.model.network import Network
from sim.loop.device import Device
from sim.probe.cores import processor
from sim.quantities import show_bytes
from sim.results.metrics import Row
from traces.errors import InputError
from traces.models.profile import ModelProfile


@dataclass(frozen=True)
class Stage:
    """Open: `device` makes one device after another over the same store and network."""

    target: DeviceChoice
    store: HostStore | ExpertFile
    network: Network
    gpu: Gpu | None = None
    launches: Launches | None = None
    lanes: int = 1

    @property
    def host(self) -> HostStore:
        assert isinstance(self.store, HostStore)
        return self.store

    @property
    def facts(self) -> Row:
        return {
            **facts(self.gpu, self.store),
            "fallbacks": "; ".join(self.launches.fallbacks) or None if self.launches else None,
            "host_pinned": self.gpu is not None,
            "lanes": self.lanes if self.target.store else None,
            "past_cache": self.store.past_cache if isinstance(self.store, ExpertFile) else None,
            "computed_in": self.network.computed_in,
            "dense": self.target.dense,
        }

    @contextmanager
    def device(
        self, slots: int, contexts: Iterable[int], verify: bool = False, path: type[CudaDevice] = CudaDevice
    ) -> Iterator[Device]:
        """Open one with so many slots, ready to decode at these contexts. path: another way to move bytes, on a GPU.

        InputError where memory does not suffice, or what was computed is not finite.
        """
        gpu_bytes = slots * self.store.stride
        needed = f"{slots} slots beside the dense weights"
        try:
            require_memory(gpu_bytes, needed, SMALLER, gpu_free=self.gpu.free_bytes() if self.gpu else None)
            if self.gpu and self.launches:
                device: Device = path(self.host, self.network, slots, self.gpu, self.launches, verify)
            else:
                device = CpuDevice(self.store, self.network, slots, verify, self.lanes)
            try:
                device.prepare(contexts)
                yield device
                if not self.network.finite():
                    why = "try another --seed"
                    if isinstance(self.store, ExpertFile):
                        self.store.require_unchanged()
                        why = f"with --verify, experts in {self.store.path} are compared with their checksums"
                    raise InputError(f"the network's output is not finite, its figures are worth nothing: {why}")
            finally:
                device.close()
        except (torch.OutOfMemoryError, MemoryError):
            raise _out_of_memory(needed, gpu_bytes) from None


@contextmanager
def open_stage(
    target: DeviceChoice,
    profile: ModelProfile,
    most_tokens: int,
    most_context: int,
    seed: int = 0,
    *,
    memory: HostMemory | None = None,
    gpu: Gpu | None = None,
) -> Iterator[Stage]:
    """Take memory, pin it, fill it, make the network. most_tokens: of a step; most_context: of a KV cache, in tokens.

    memory: one that exists, and is registered where `gpu` is passed with it, for models that come one after another.
    Raise InputError where memory does not suffice.
    """
    if target.device == "cuda" and gpu is None:
        gpu = Gpu()

    def network_on(device: torch.device) -> Network:
        return Network(profile, device, most_tokens, most_context, seed, target.dense)

    network_bytes = network_on(torch.device("meta")).nbytes
    if memory is None:
        _require_host_memory(target, profile, network_bytes)
    with ExitStack() as opened:
        lanes = 1
        if target.store:
            store: HostStore | ExpertFile = opened.enter_context(closing(ExpertFile(target.store, profile)))
            lanes = target.lanes or knee(rates(store))
        else:
            total, size = profile.moe_layers * profile.experts, profile.expert_bytes
            sizes = [profile.bytes_of(expert // profile.experts) for expert in range(total)]
            if memory:
                store = HostStore(memory, total, size, sizes=sizes)
            else:
                store = HostStore.of(total, size, seed, target.host_dedup, sizes)
            if gpu and not memory:
                opened.enter_context(pinned(store.memory, gpu, is_required=True))
        if gpu is None:
            opened.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(target.threads or max(1, torch.get_num_threads() - 1))  # one for driver and link
        try:
            opened.enter_context(torch.inference_mode())
            network = network_on(gpu.device if gpu else torch.device("cpu"))
            yield Stage(target, store, network, gpu, Launches(gpu, network) if gpu else None, lanes)
            if isinstance(store, ExpertFile):
                store.require_unchanged()
        except (torch.OutOfMemoryError, MemoryError):
            raise _out_of_memory("the dense weights and the KV cache", network_bytes, advice=FEWER) from None


def _require_host_memory(target: DeviceChoice, profile: ModelProfile, network_bytes: int) -> None:
    if target.store:
        require_memory(network_bytes, "the dense part with its KV cache", FEWER)
        return
    total = profile.moe_layers * profile.experts
    buffers = target.host_dedup or total
    nbytes: float = buffers * stride_of(profile.expert_bytes)
    what, advice = f"a host store of {buffers} of {total} experts", "--host-dedup N shares N between them all"
    if target.device == "cpu":
        what += f", beside dense weights and KV cache of {show_bytes(network_bytes)},"
        nbytes += network_bytes
    require_memory(nbytes, what, advice)


SMALLER, FEWER = "choose a smaller --cache-size, or --dense none", "continue with --dense none"


def _out_of_memory(what: str, needed_bytes: float, advice: str = SMALLER) -> InputError:
    return InputError(f"out of memory: {what} need {show_bytes(needed_bytes)}; {advice}")


def facts(gpu: Gpu | None, store: ExpertSource) -> Row:
    """Return the columns of a replay's row that the machine decides."""
    return {
        "device_name": gpu.name if gpu else processor() or platform.machine(),
        "driver": driver() if gpu else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "host_experts": store.distinct,
    }


def machine_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else processor() or platform.machine()


def driver() -> str | None:
    """Return the version of the GPU's driver; None if it is unknown."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
