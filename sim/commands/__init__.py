"""The command `moe-sim`: which expert-cache policy serves a trace best, on which hardware, how large a cache."""

from traces.commands import program

EAMC = {
    "build": ("sim.commands.eamc:build", "Learn the EAMs of a trace's requests, in order, as the policy would."),
    "show": ("sim.commands.eamc:show", "Show what a file of EAMs holds."),
}

PROFILE = {
    "build": (
        "sim.commands.profile:build",
        "Learn from traces what eamc-blend would learn of a model while it runs them.",
    ),
}

app = program.group(
    "Which expert-cache policy serves a trace best: on which hardware, with how large a cache.",
    {
        "sweep": (
            "sim.commands.sweep:sweep",
            "Run several policies at several cache sizes over traces, and name the best.",
        ),
        "run": ("sim.commands.run:run", "Run one policy at one cache size, and report where the time went."),
        "plan": (
            "sim.commands.plan:plan",
            "Predict what a model would do on a machine: tokens per second, where to put what, and what would help.",
        ),
        "report": (
            "sim.commands.report:report",
            "Write one page about results: what to run, how certain that is, and how far the bound is.",
        ),
        "policies": (
            "sim.commands.policies:policies",
            "List the policies: eviction policies, prefetchers, pairs of both, and presets.",
        ),
        "hardware": ("sim.commands.profiles:hardware", "List the hardware profiles."),
        "models": ("sim.commands.profiles:models", "List the model profiles."),
        "conformance": (
            "sim.commands.conformance:conformance",
            "Run engine-neutral cases and write one result line for each.",
        ),
        "analyze": (
            "sim.commands.analysis:analyze",
            "Show whether misses are due to the policy or to the cache size, untimed.",
        ),
        "sensitivity": (
            "sim.commands.sensitivity:sensitivity",
            "Rank what would help most: a faster link, more cache, smaller experts, less policy overhead, another "
            "option.",
        ),
        "tune": (
            "sim.commands.tune:tune",
            "Search a policy's options on one half of the requests, and evaluate them on the other half.",
        ),
        "adapt": (
            "sim.commands.adapt:adapt",
            "Count the requests that a policy needs after a task shift until its hit rate recovers, untimed.",
        ),
        "train-stride": (
            "sim.commands.train:train_stride",
            "Train a predictor of the experts of later layers on the decoded tokens of a trace.",
        ),
        "compare": (
            "sim.commands.analysis:compare",
            "Compare results request by request, with 95% bootstrap intervals.",
        ),
        "backtest": (
            "sim.commands.backtest:backtest",
            "Predict published measurements of other systems, and print predicted, measured and the errors.",
        ),
        "systems": (
            "sim.commands.systems:systems",
            "Predict how fast other systems would run a trace: MoE-Infinity, vLLM, Ollama, llama.cpp and others.",
        ),
        "eamc": (EAMC, "Past EAMs as a file, for eamc to start from."),
        "profile": (PROFILE, "What eamc-blend has learned, as a file to start from."),
    },
)


def main() -> None:
    program.main(app, "moe-sim")
