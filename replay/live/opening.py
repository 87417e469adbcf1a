"""Opening a live model: its dense part is loaded, its experts are put behind a cache, and the machine is timed.

On `disk`, experts stay in the checkpoint's files and slots are in host memory, where the CPU computes. On `cuda`,
experts are read into host memory once, slots and the dense part are in the GPU's. `load_model` and `attach` return
transformers' own model; what is open hangs on its `expert_cache` (`LiveModel`). Commands go through `open_live` too.
"""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.core.bent import Commit, Rule
from policies.core.policy import Shape
from policies.core.spec import PolicyLike, PolicySpec, parse, read_rule
from replay.device_choice import DeviceChoice, require_cuda
from replay.devices.cpu import nothing
from replay.devices.expert_file import ExpertFile
from replay.devices.gpu import Gpu
from replay.devices.lanes import knee, rates
from replay.devices.store import RESERVE_BYTES, require_memory, stride_of
from replay.live.bender import Bender
from replay.live.device import LiveDevice, LiveGpu, host_experts
from replay.live.layout import ExpertLayer, ShardStore, expert_layers, held_store, without_interface
from replay.live.loading import IMPLEMENTATION, Opened, Progress, expert_store, opened
from replay.live.memory import EXPERTS, cache_bytes, kv_name_in, memory_of
from replay.live.model import HOOK, LiveModel, starting_from
from replay.live.next_routers import NextRouters
from replay.live.sources import end_of
from replay.warmup import decide
from sim.defaults import CACHE_SIZE, POLICY
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.probe.limits import available_memory_bytes
from sim.profiles.timing import FixedTiming, Link
from sim.quantities import CacheSize, cache_text, parse_cache_size, show_bytes
from sim.sweeps.config import seeded
from tracer import demo
from tracer.answers import LoadedModel
from tracer.blaming import blaming
from tracer.hook import ExpertsHook
from traces.errors import InputError, refuse, unknown
from traces.schema import Picks
from traces.synthetic import synthetic

DISK = DeviceChoice("disk")
DEVICES = ("disk", "cuda")
SMALLER = "choose a smaller --cache-size, or max"
MOST = "max"  # a cache of as many experts as fit into memory
TRIED_TOKENS = 24  # of a prefill, from which the bytes of KV cache a token are measured


def load_model(
    source: str | Path | None = None,
    policy: PolicyLike = POLICY,
    cache_size: CacheSize = CACHE_SIZE,
    *,
    device: str = "disk",
    seed: int = 0,
    profile: str | Path | None = None,
    dtype: str = "auto",
    lookahead: int = 0,
    routing: str | None = None,
    **options: Any,
) -> Any:
    """Load a transformers model whose experts stay on disk, or in host memory beside a GPU, behind a cache.

    source: a folder or a hub id; None: the shipped model. policy, cache_size: as for `replay.replay`; a cache of "max"
    is as large as fits into memory, with 537 MB left free. device: disk, or cuda. seed: of policies that draw.
    profile: a file for what the policy learns: it starts from it, and writes it when the model is closed. dtype: auto
    is the checkpoint's. lookahead: layers ahead whose routers run on a layer's input, for policies such as gate, in its
    time. routing: a rule that bends it at a loss, such as "drop:below=0.75/k" (rule 22). options: `lanes`, `store` and
    `threads`, as for `moe-replay generate`.

    The model is called as any other, for inference alone. Its `expert_cache` has `counters`, `report()`, `trace`,
    `clear()` and `close()`, and `with load_model(...) as model:` closes it. Raise InputError, a ValueError, for a
    model, a device or a policy that cannot run so, and where memory does not suffice.
    """
    return open_live(
        None if source is None else str(source),
        DeviceChoice.of({"device": device, **options}),
        policy=seeded(policy, seed),
        cache_size=cache_text(cache_size),
        dtype=dtype,
        profile=Path(profile) if profile else None,
        lookahead=lookahead,
        routing=routing,
    ).model


def attach(
    model: Any,
    policy: PolicyLike = POLICY,
    cache_size: CacheSize = CACHE_SIZE,
    *,
    seed: int = 0,
    profile: str | Path | None = None,
) -> Any:
    """Put a cache of experts into a transformers model that is in memory, to try a policy or to record; return it.

    Its experts are copied into slots, on a GPU from host memory, and computed as by experts_implementation="eager".
    `model.expert_cache.close()` gives the model back as it was. Parameters are those of `load_model`.

    Raise InputError likewise, and for a model that has a cache already, or is not all in one memory.
    """
    memories = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    name = Path(getattr(model.config, "_name_or_path", "")).name or type(model).__name__
    refuse(
        (hasattr(model, "expert_cache"), f"{name} has a cache of experts already: close that one first"),
        (memories not in ({"cpu"}, {"cuda"}), f"{name} is not in one memory: {', '.join(sorted(memories))}"),
    )
    kept = Path(profile) if profile else None
    spec = _prepared(DeviceChoice("cuda" if memories == {"cuda"} else "disk"), seeded(policy, seed), kept)
    with ExitStack() as opening:
        layers = expert_layers(model)
        opening.callback(_unhook, model, layers, model.get_experts_implementation())
        whole, gpu = Opened(LoadedModel(name, model, None), layers, {}, []), Gpu() if memories == {"cuda"} else None
        source, size = lambda layers: nullcontext(held_store(layers)), cache_text(cache_size)
        live = _cached(opening, whole, source, gpu, 1, spec, size, kept)
        opening.callback(live.detach)
        live.opening = opening.pop_all()
    return model


def open_live(
    source: str | None,
    target: DeviceChoice = DISK,
    *,
    policy: str | PolicySpec = POLICY,
    cache_size: str = CACHE_SIZE,
    dtype: str = "auto",
    profile: Path | None = None,
    progress: Progress = lambda count: nullcontext(lambda pieces: None),
    on_note: Callable[[str], None] = warnings.warn,
    lookahead: int = 0,
    routing: str | None = None,
) -> LiveModel:
    """Load a model without its experts and put a cache of them in front of disk or host memory. See `load_model`.

    target: `cuda`, or `disk` with `lanes`, `threads`, which all of torch has until the model is closed, and `store`, a
    file for experts that loading converts, by default in the user's cache folder. progress: is shown while experts are
    written or read; on_note: gets what no pass can raise.
    """
    spec, rule = _prepared(target, policy, profile, lookahead), read_rule(routing) if routing else None
    if isinstance(rule, Commit):
        lookahead = max(lookahead, rule.options.layers)
    gpu = Gpu() if target.device == "cuda" else None
    with ExitStack() as opening:
        if target.threads:
            opening.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(target.threads)
        without = opening.enter_context(opened(source or str(demo.MODEL), dtype, None if source else demo.NAME))
        if gpu:  # what tensors share stays so
            for tensor in (*without.loaded.model.parameters(), *without.loaded.model.buffers()):
                if not tensor.is_meta:
                    tensor.data = tensor.data.to(gpu.device, copy=True)
        experts = partial(expert_store, without, file=target.store, progress=progress)
        more = progress, on_note, lookahead, rule
        live = _cached(opening, without, experts, gpu, target.lanes, spec, cache_size, profile, *more)
        live.opening = opening.pop_all()
    return live


def _prepared(target: DeviceChoice, policy: str | PolicySpec, profile: Path | None, lookahead: int = 0) -> PolicySpec:
    """Return the policy as it starts. Raise InputError where it cannot run on this device."""
    if target.device not in DEVICES:
        raise unknown("device", target.device, DEVICES)
    spec = starting_from(parse(policy), profile)
    require_causal(spec, lookahead)
    if target.device == "cuda":
        require_cuda("disk")
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # it takes as long as all of torch

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, lambda module, *event: getattr(module, HOOK)(*event))
    return spec


def _cached(
    opening: ExitStack,
    model: Opened,
    source: Callable[[list[ExpertLayer]], AbstractContextManager[ShardStore | ExpertFile]],
    gpu: Gpu | None,
    lanes: int | None,
    spec: PolicySpec,
    cache_size: str,
    profile: Path | None,
    progress: Progress = lambda count: nullcontext(lambda pieces: None),
    on_note: Callable[[str], None] = warnings.warn,
    lookahead: int = 0,
    rule: Rule | None = None,
) -> LiveModel:
    """Put a cache between the experts of a model and their source, all of which `opening` closes. See `open_live`."""
    loaded = model.loaded
    layers, hook = rehearse(model)
    next_routers = NextRouters(loaded.model, lookahead, opening) if lookahead else None
    store = opening.enter_context(source(layers))
    shape = Shape(len(layers), layers[0].experts)
    stride = stride_of(store.expert_bytes) if gpu else store.stride
    if cache_size == MOST:
        free = gpu.free_bytes() if gpu else available_memory_bytes()
        free -= RESERVE_BYTES + EXPERTS * max(end_of(layer.rows) for layer in layers)  # of any forward pass
        slots = min(max(1, free // stride), shape.total)
    else:
        slots = parse_cache_size(cache_size, shape.total, stride, shape.layers)
    spec.divide(shape, slots)
    require_memory(slots * stride, f"a cache of {slots} experts", SMALLER, 0, gpu.free_bytes() if gpu else None)
    run = gpu_run((), shape, slots, spec, FixedTiming(1, 1, 0, 1, 1), Link(0, 1, 1, store.expert_bytes))
    _warm_up(run, hook.top_k)
    run = replace(run, routing=rule)
    kv_per_token, dense_ns = _try_out(loaded, len(layers))
    largest = max(stride, *(end_of(layer.rows) for layer in layers))  # as it lies in a slot, or is computed
    memory = memory_of(loaded, model.dense_bytes, slots * stride, largest, hook.top_k, kv_per_token)
    if gpu:
        memory = replace(memory, program=0)
    beside = f"a cache of {slots} experts beside {show_bytes(memory.stated(0) - memory.slots)} of everything else"
    require_memory(memory.slots + memory.workspace(0), beside, SMALLER, 0, gpu.free_bytes() if gpu else None)
    if gpu:
        device: LiveDevice = LiveGpu(opening.enter_context(host_experts(store, layers, gpu, progress)), slots, gpu)
    else:
        device = LiveDevice(store, slots)
    opening.callback(device.close)
    lanes = 1 if gpu else lanes or knee(rates(store, slots=device.pool))
    device.read_with(lanes)
    unchanged = nothing if gpu else store.require_unchanged  # a GPU's experts have been read
    beyond = on_note, unchanged, profile, next_routers
    live = LiveModel(loaded, hook, layers, device, run, memory, lanes, dense_ns, *beyond)
    opening.callback(live.end)
    if rule:
        Bender(rule, live, next_routers, opening)
    return live


def _unhook(model: Any, layers: Sequence[ExpertLayer], implementation: dict[str, str]) -> None:
    model.set_experts_implementation(implementation)
    for layer in layers:
        layer.module.__dict__.pop(HOOK, None)


def require_causal(policy: PolicySpec, lookahead: int = 0) -> None:
    """Raise InputError for a policy that a model which runs now cannot serve."""
    ahead = f"{policy.text} goes by the next layers' routers: say how many layers ahead by `lookahead`"
    refuse(
        (policy.oracle, f"{policy.text} knows the future, which a live model does not: choose another policy"),
        (policy.needs_lookahead and not lookahead, ahead),
        (policy.uses_host, f"{policy.text}: a live model fetches every miss: leave the placement out"),
        (policy.admits is not None, f"{policy.text}: a live model keeps what it fetches: leave the admission out"),
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
    for layer in model.layers:
        if layer.module not in hook.modules:
            setattr(layer.module, HOOK, partial(_not_cached, layer.name))
    return [by_module[module] for module in hook.modules], hook


def _not_cached(name: str, *_: Tensor) -> Tensor:
    raise InputError(f"text does not run through {name}, and a cache has the experts of text alone")


def _warm_up(run: Run, top_k: int) -> None:
    """Have the policy compiled before memory is stated and time counts."""
    shape = run.shape
    steps = {"requests": 2, "tokens": 8, "prompt_tokens": 4}
    trace = synthetic(**steps, layers=shape.layers, experts=shape.experts, top_k=top_k, seed=0)
    if run.policy.needs_lookahead:
        picks = trace.experts[:, :, None]
        meta, scores = replace(trace.meta, lookahead=Picks((1,), top_k)), np.ones(picks.shape, np.float16)
        trace = replace(trace, meta=meta, lookahead=picks, lookahead_scores=scores)
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
