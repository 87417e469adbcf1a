"""Opening a live model: its dense part is loaded, its experts are put behind a cache, and the machine is timed.

On `disk`, experts stay in the checkpoint's files and slots are in host memory, where the CPU computes. On `cuda`,
experts are read into host memory once, slots and the dense part are in the GPU's.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from policies.core.policy import Shape
from policies.core.spec import FETCHED, PolicySpec, parse
from replay.device_choice import DeviceChoice, require_cuda
from replay.devices.cpu import nothing
from replay.devices.gpu import Gpu
from replay.devices.lanes import knee, rates
from replay.devices.store import require_host_memory, stride_of
from replay.live.device import LiveDevice, LiveGpu, host_experts
from replay.live.layout import ExpertLayer, without_interface
from replay.live.loading import IMPLEMENTATION, Opened, Progress, expert_store, opened
from replay.live.memory import cache_bytes, kv_name_in, memory_of
from replay.live.model import HOOK, LiveModel, starting_from
from replay.warmup import decide
from sim.defaults import CACHE_SIZE, POLICY
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import parse_cache_size, show_bytes
from tracer.hook import ExpertsHook
from tracer.models import LoadedModel, blaming
from traces.errors import InputError, refuse, unknown
from traces.synthetic import synthetic

DISK = DeviceChoice("disk")
DEVICES = ("disk", "cuda")
SMALLER = "choose a smaller --cache-size"

TRIED_TOKENS = 24
"""Of a prefill, from which the bytes of KV cache a token are measured."""


def _live_experts(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts: the implementation that transformers calls."""
    output: Tensor = getattr(module, HOOK)(hidden, index, weights)
    return output


@contextmanager
def open_live(
    source: str,
    target: DeviceChoice = DISK,
    *,
    policy: str | PolicySpec = POLICY,
    cache_size: str = CACHE_SIZE,
    dtype: str = "auto",
    profile: Path | None = None,
    name: str | None = None,
    progress: Progress = lambda count: nullcontext(lambda pieces: None),
    on_note: Callable[[str], None] = warnings.warn,
) -> Iterator[LiveModel]:
    """Load a model without its experts and put a cache of them in front of disk or host memory.

    source: a folder or a hub id. target: `disk` (with `lanes`, and `store`, a file for experts that loading converts;
    by default in the user's cache folder) or `cuda`. dtype: auto is the checkpoint's. profile: what the policy has
    learned before, if the file is there. name: of the model; by default the folder's, or the hub id. progress: is shown
    while experts are written to a store, or read into host memory; on_note: called with what no forward pass can raise.

    Raise InputError for a model, a device or a policy that cannot run so, and where memory does not suffice.
    """
    if target.device not in DEVICES:
        raise unknown("device", target.device, DEVICES)
    spec = starting_from(parse(policy), profile)
    require_causal(spec)
    if target.device == "cuda":
        require_cuda("disk")
    gpu = Gpu() if target.device == "cuda" else None
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _live_experts)
    with ExitStack() as opening:
        without = opening.enter_context(opened(source, dtype, name))
        loaded = without.loaded
        if gpu:
            _move(loaded.model, gpu.device)
        layers, hook = rehearse(without)
        store = opening.enter_context(expert_store(without, layers, target.store, progress))
        shape = Shape(len(layers), layers[0].experts)
        stride = stride_of(store.expert_bytes) if gpu else store.stride
        slots = parse_cache_size(cache_size, shape.total, stride, shape.layers)
        spec.divide(shape, slots)
        _require(gpu, slots * stride, f"a cache of {slots} experts")
        run = gpu_run((), shape, slots, spec, FixedTiming(1, 1, 0, 1, 1), Link(0, 1, 1, store.expert_bytes))
        _warm_up(run, hook.top_k)
        kv_per_token, dense_ns = _try_out(loaded, len(layers))
        memory = memory_of(loaded, without.dense_bytes, slots * stride, stride, hook.top_k, kv_per_token)
        if gpu:
            memory = replace(memory, program=0)
        beside = f"a cache of {slots} experts beside {show_bytes(memory.stated(0) - memory.slots)} of everything else"
        _require(gpu, memory.slots + memory.workspace(0), beside)
        lanes = 1
        if gpu:
            host = opening.enter_context(host_experts(store, layers, gpu, progress))
            device: LiveDevice = LiveGpu(host, slots, gpu)
        else:
            device = LiveDevice(store, slots)
        opening.callback(device.close)
        if not gpu:
            lanes = target.lanes or knee(rates(store, store.expert_bytes, slots=device.pool))
            device.read_with(lanes)
        unchanged = nothing if gpu else store.require_unchanged  # a GPU's experts have been read
        live = LiveModel(loaded, hook, layers, device, run, memory, lanes, dense_ns, on_note, unchanged)
        opening.callback(live.close)
        yield live


def _move(model: nn.Module, device: torch.device) -> None:
    """Move everything but experts to memory of its own; what is shared stays so."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device, copy=True)


def _require(gpu: Gpu | None, needed_bytes: int, what: str) -> None:
    """Raise InputError where memory does not suffice: the GPU's, or the host's."""
    if gpu is None:
        require_host_memory(needed_bytes, what, SMALLER, reserve_bytes=0)
    elif needed_bytes > (free := gpu.free_bytes()):
        needed = f"{what} needs {show_bytes(needed_bytes)}"
        raise InputError(f"{needed}, but {show_bytes(free)} of GPU memory are free: {SMALLER}")


def require_causal(policy: PolicySpec) -> None:
    """Raise InputError for a policy that a model which runs now cannot serve."""
    ahead = "asks the next layer's router ahead, which a live model does not do so far"
    refuse(
        (policy.oracle, f"{policy.text} knows the future, which a live model does not: choose another policy"),
        (policy.needs_lookahead, f"{policy.text} {ahead}"),
        (policy.placement != FETCHED, f"{policy.text}: a live model fetches every miss: leave the placement out"),
    )


def rehearse(model: Opened) -> tuple[list[ExpertLayer], ExpertsHook]:
    """Run a few tokens with experts that add nothing: find which layers run, in which order. Raise InputError."""
    by_module = {layer.module: layer for layer in model.layers}
    for layer in model.layers:
        setattr(layer.module, HOOK, lambda hidden, index, weights: torch.zeros_like(hidden))
    transformer = model.loaded.model
    with blaming(f"{model.loaded.name} cannot be run"):
        transformer.set_experts_implementation(IMPLEMENTATION)
        with ExpertsHook(transformer) as hook:
            hook.probe()
    for name, module in zip(hook.names, hook.modules, strict=True):
        if module not in by_module:
            raise without_interface(f"{name} ({type(module).__name__}) of {model.loaded.name}")
    return [by_module[module] for module in hook.modules], hook


def _warm_up(run: Run, top_k: int) -> None:
    """Have the policy compiled before memory is stated and time counts."""
    shape = run.shape
    steps = {"requests": 2, "tokens": 8, "prompt_tokens": 4}
    trace = synthetic(**steps, layers=shape.layers, experts=shape.experts, top_k=top_k, seed=0)
    tiers = (replace(run.gpu, experts_per_layer=1.0),)
    decide(replace(run, requests=Requests(trace), tiers=tiers))


def _try_out(loaded: LoadedModel, layers: int) -> tuple[int, int]:
    """Run a prefill and a few tokens with experts that add nothing: bytes of KV cache a token, and ns a layer."""
    model, ids = loaded.model, torch.zeros(1, TRIED_TOKENS, dtype=torch.int64, device=loaded.device)
    took, options = [], {"use_cache": True, "return_dict": True}  # whatever the config says
    with torch.inference_mode():
        name = kv_name_in(model)
        cache = model(input_ids=ids, **options)[name]
        size = cache_bytes(cache)
        for _ in range(3):
            began = perf_counter_ns()
            model(input_ids=ids[:, :1], **options, **{name: cache}).logits[0, 0, 0].item()
            took.append(perf_counter_ns() - began)
    return -(-size // TRIED_TOKENS), int(median(took)) // layers
