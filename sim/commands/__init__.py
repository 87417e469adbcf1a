"""The command `moe-sim`: which expert-cache policy serves a trace best, on which hardware, how large a cache."""

from terminal import program

EAMC, PROFILE = ({"build": f"sim.commands.learned:build_{name}"} for name in ("eamc", "profile"))

app = program.group(
    "Which expert-cache policy serves a trace best: on which hardware, with how large a cache.",
    {
        "sweep": "sim.commands.sweep:sweep",
        "run": "sim.commands.run:run",
        "plan": "sim.commands.plan:plan",
        "probe": "sim.commands.probe:probe",
        "report": "sim.commands.report:report",
        "policies": "sim.commands.listings:policies",
        "hardware": "sim.commands.listings:hardware",
        "models": "sim.commands.listings:models",
        "conformance": "sim.commands.conformance:conformance",
        "analyze": "sim.commands.analysis:analyze",
        "speculate": "sim.commands.speculate:speculate",
        "board": "sim.commands.board:board",
        "compare": "sim.commands.analysis:compare",
        "backtest": "sim.commands.backtest:backtest",
        "systems": "sim.commands.systems:systems",
        "eamc": ("Past EAMs as a file, for eamc to start from.", EAMC),
        "profile": ("What eamc-blend has learned, as a file to start from.", PROFILE),
    },
)


def main() -> None:
    program.main(app, "moe-sim")
