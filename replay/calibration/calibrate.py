"""Calibration: what this machine reaches, and what models take on it, as a hardware profile for the simulator.

Everything is measured in several passes over the run; the profile holds the medians, and how far the passes lie from
each other says whether the machine is quiet enough to be described at all. A model is measured on the device that
replays it, opened as for a replay (`replay.calibration.measure`); where no trace of it is given, on synthetic routing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from statistics import median
from typing import Any

import torch

from policies.core.spec import PolicySpec
from replay.calibration.in_loop import parts_ns
from replay.calibration.measure import Measurement, combined, middle, one_pass, policy_ns
from replay.calibration.parts import top_k
from replay.calibration.rates import Rates, rates
from replay.choice import DEFAULT_STEPS, Choice, first_steps
from replay.device_choice import DeviceChoice
from replay.devices.gpu import Gpu
from replay.warmup import undisturbed
from sim.defaults import HARDWARE
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.device import Device
from sim.profiles.hardware_profile import hardware
from sim.profiles.measured import MeasuredModel
from sim.results.metrics import Row
from sim.results.provenance import commit
from traces.models import profile as model_profile
from traces.models.profile import ModelProfile
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.trace import concatenate

AGREES = 0.03  # passes of a quiet machine lie no further from each other
LONGEST = {"cuda": 2_048, "cpu": 128, "disk": 128}  # tokens of the longest prompt that is synthetic
REQUESTS, TOKENS = 24, 16
"""Further requests that are synthetic, and what each decodes: for policies to learn from."""

DISTINCT_BYTES = {"cuda": 8 << 30, "cpu": 256 << 20}
"""Host buffers together, unless --host-dedup says: more than a host's caches hold."""
SLOT_BYTES = {"cuda": 1 << 30, "cpu": 128 << 20, "disk": 1 << 30}
"""Of GPU memory at least taken for slots, where the model has so many experts."""
FREE_BYTES = 8 << 30  # of GPU memory left to everything else
ASSUMED = {"disk_bandwidth_gb_per_s": 6.5, "disk_latency_us": 100.0}
"""Of an NVMe disk on PCIe 4.0 x4: nothing here measures it."""

Say = Callable[[str], None]


@dataclass
class Calibration:
    """What is known of a machine so far; a pass more makes every figure surer."""

    facts: Row = field(default_factory=dict)
    rates: list[Rates] = field(default_factory=list)
    models: dict[str, MeasuredModel] = field(default_factory=dict)
    passes: dict[str, list[Measurement]] = field(default_factory=dict)  # by model: what each pass alone comes to
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)  # by model: layers, top-k
    computed_in: dict[str, str] = field(default_factory=dict)  # by model of packed experts: a type

    def disagreement(self) -> tuple[float, str]:
        """Return by what share passes differ at most, and in what."""
        series = {
            "link bandwidth": [each.link_bandwidth_gb_per_s for each in self.rates],
            "memory bandwidth": [each.memory_bandwidth_gb_per_s for each in self.rates],
            "matmul rate": [each.compute_tflop_per_s for each in self.rates],
        }
        for name, passes in self.passes.items():
            series[f"a transfer of {name}"] = [each.model.transfer_ns for each in passes]
            steps = [steps_ns(each.model, self.shapes[name]) for each in passes]
            for what in steps[0]:
                series[f"{what} of {name}"] = [each[what] for each in steps]
        apart = {what: (max(values) - min(values)) / max(median(values), 1e-9) for what, values in series.items()}
        worst = max(apart, key=lambda what: apart[what])
        return apart[worst], worst


def steps_ns(model: MeasuredModel, shape: tuple[int, int]) -> dict[str, int]:
    """Return what whole steps take where nothing is missing: what a simulation adds up from the tables."""
    layers, top_k = shape
    step = partial(parts_ns, model, layers, layers * top_k)
    decode = [context for tokens, context, _ in model.dense if tokens == 1]
    most = model.expert[-1][0]
    steps = {"a token": step(decode[0]), "a token of the longest context": step(decode[-1])}
    return steps | ({"the longest step": step(most, most)} if most > 1 else {})


# What is measured


def choices(profiles: Sequence[str], traces: Sequence[str], target: DeviceChoice) -> list[Choice]:
    """Return each model once: with the first trace that fits it, else with synthetic routing. Raise InputError."""
    named = {text: model_profile.model(text) for text in profiles}
    by_name: dict[str, TimedRun] = {}
    for trace in traces:
        meta = Shards.open(trace).meta
        shape = meta.layers, meta.experts, meta.top_k
        fitting = (text for text, of in named.items() if (of.moe_layers, of.experts, of.top_k) == shape)
        loaded = TimedRun.of(Experiment(trace, model_profile=next(fitting, None)))
        by_name.setdefault(loaded.profile.name, first_steps(loaded, DEFAULT_STEPS))
    for profile in named.values():
        by_name.setdefault(profile.name, with_synthetic_routing(profile, LONGEST[target.device]))
    return [_choice(loaded, target) for loaded in by_name.values()]


def with_synthetic_routing(profile: ModelProfile, longest: int) -> TimedRun:
    """Return a model with prompts of up to `longest` tokens, then short requests of decode."""
    shape = profile.moe_layers, profile.experts, profile.top_k
    prompts = [synthetic(1, 1, *shape, seed=0, prompt_tokens=longest // part) for part in (8, 2, 1)]
    trace = concatenate([*prompts, synthetic(REQUESTS, TOKENS, *shape, seed=1)])
    trace = replace(trace, meta=replace(trace.meta, model=profile.name))
    return TimedRun(Experiment(trace.name), trace, profile, hardware(HARDWARE))


def _choice(loaded: TimedRun, target: DeviceChoice) -> Choice:
    """Take slots for the experts of a token, and for more than a GPU's caches hold; fewer where memory is short."""
    profile = loaded.profile
    size, device = profile.expert_bytes, target.device
    wanted = max(profile.moe_layers * profile.top_k, -(-SLOT_BYTES[device] // size))
    if device == "cuda":
        capacity = torch.cuda.mem_get_info()[0] - FREE_BYTES - profile.dense_bytes
    else:
        capacity = max(SLOT_BYTES[device], 2 * profile.top_k * size)
    slots = min(loaded.all_experts, wanted, max(1, int(capacity // size)))
    if target.host_dedup is None and device != "disk":
        buffers = min(loaded.all_experts, max(2 * profile.top_k, -(-DISTINCT_BYTES[device] // size)))
        target = replace(target, host_dedup=buffers)
    room = slots if loaded.sizes is None else min(slots * size, loaded.whole_slots)
    return Choice(loaded, PolicySpec.of("lru"), room, target)


# Measuring


def calibrate(chosen: Sequence[Choice], policies: Sequence[PolicySpec], passes: int, say: Say) -> Calibration:
    """Measure machine, models and policies; `say` gets what comes next, `steps_of` times.

    chosen: at least one, all on one device. InputError for a policy that a model cannot have, or a device that fails.
    """
    for choice in chosen:
        for policy in policies:
            choice.loaded.require(policy, choice.slots)
    result, gpu = Calibration(), Gpu() if chosen[0].device == "cuda" else None

    def machine() -> None:
        say(f"the machine, pass {len(result.rates) + 1} of {passes}")
        result.rates.append(rates(gpu))
        if gpu:
            gpu.release()  # to the driver, which the model that comes next asks

    machine()
    for choice in chosen:
        assert choice.loaded.profile
        say(f"{choice.loaded.profile.name}: memory")
        opened = choice.stage()
        with opened as stage, stage.device(choice.device_slots, choice.contexts) as device, undisturbed(choice.run):
            facts = stage.facts
            if packed := facts.pop("computed_in"):
                result.computed_in[choice.loaded.profile.name] = packed
            result.facts = result.facts or facts
            add_model(result, choice, device, policies, passes, say)
        if gpu:
            gpu.release()
    for _ in range(1, passes):  # at the other end of the run: a machine that drifts shows
        machine()
    return result


def steps_of(chosen: Sequence[Choice], policies: Sequence[PolicySpec], passes: int) -> int:
    """Return how often `calibrate` says what comes next."""
    return passes + len(chosen) * (1 + passes + len(policies))


def add_model(
    result: Calibration, choice: Choice, device: Device, policies: Sequence[PolicySpec], passes: int, say: Say
) -> None:
    """Measure the model of `choice` on an open device, all passes one after another, and what policies cost here."""
    profile, run = choice.loaded.profile, choice.run
    assert profile
    name, taken = profile.name, []
    for number in range(1, passes + 1):
        say(f"{name}: pass {number} of {passes}")
        taken.append(one_pass(device, run, choice.most_tokens, name))
    result.shapes[name], result.passes[name] = (run.shape.layers, top_k(run)), [combined(run, [each]) for each in taken]
    model, costs = combined(run, taken).model, dict[str, float]()
    run = choice.on(model.timing(), model.link())
    for policy in policies:
        say(f"{name}: {policy.text}")
        costs[policy.text] = policy_ns(run.under(policy), device) / 1_000
    result.models[name] = replace(model, predictor_us=costs)


# The profile


def profile(result: Calibration) -> str:
    models = list(result.models.values())
    facts: dict[str, Any] = {key: value for key, value in result.facts.items() if value is not None}
    scalars: dict[str, Any] = {"title": str(facts["device_name"]), **middle([asdict(one) for one in result.rates])}
    scalars |= {**ASSUMED, "framework_us_per_layer": median([model.turnaround_ns for model in models]) / 1_000}
    if lanes := facts.get("lanes"):  # experts come from a disk
        link = models[0].link()
        for of in ("link", "disk"):
            scalars[f"{of}_bandwidth_gb_per_s"] = link.ns_per_byte_den / link.ns_per_byte_num
            scalars[f"{of}_latency_us"] = link.latency_ns / 1_000
    apart, where = result.disagreement()
    calibration = {  # for people
        "gpu" if facts.get("driver") else "cpu": facts.pop("device_name"),
        **facts,
        **({"computed_in": result.computed_in} if result.computed_in else {}),
        "commit": commit(),
        "date": date.today().isoformat(),
        "passes": len(result.rates),
        "disagreement": round(apart, 5),
        "disagreement_of": where,
        "noise": {  # of single repeats, in the mean over all figures
            name: round(max(one.noise for one in passes), 5) for name, passes in result.passes.items()
        },
    }
    of_disk = f"experts that {lanes} lanes read" if lanes else "a disk that is assumed, NVMe on PCIe 4.0 x4"
    head = (
        "# Written by `moe-replay calibrate`. Models under [[measured]] are simulated from what was measured here,\n"
        f"# other models from the rates: of large copies, the host's turnaround with these models, and {of_disk}.\n"
    )
    tables = {"calibration": calibration, "measured": [asdict(model) for model in models]}
    return f"{head}{dumps({**scalars, **tables})}\n"


def dumps(table: Mapping[str, Any], above: str = "") -> str:
    """Return a table as TOML, for which a GPU machine has no library; above: what it lies in, as in `a.b.`."""
    values, headed = [], []
    for key, value in table.items():
        name = key if key.isascii() and key.isidentifier() else _value(key)
        if isinstance(value, Mapping):
            headed += ["", f"[{above}{name}]", dumps(value, f"{above}{name}.")]
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            headed += [line for each in value for line in ("", f"[[{above}{name}]]", dumps(each, f"{above}{name}."))]
        else:
            values.append(f"{name} = {_value(value)}")
    return "\n".join([*values, *headed])


def _value(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON leaves as it is
