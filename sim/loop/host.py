"""What the host does in a run: it computes experts (rule 13), and reads others from a disk (rule 17).

Both are streams of the machine (`sim.loop.machine_compiled`); where misses are computed is decided here.
"""

from functools import partial

from policies.core.placement import Costs, Placement
from policies.core.policy import Int
from sim.loop import machine_compiled as streams
from sim.loop.machine import Machine
from sim.loop.run import Run


def needed(run: Run) -> bool:
    """Return whether anything of it matters to this run."""
    return run.host is not None or run.policy.uses_host or run.policy.admits is not None


class Placing:
    """Gives the host its part of each event."""

    def __init__(self, run: Run, machine: Machine) -> None:
        self._timing, self._link, self._machine = run.timing, run.gpu.link, machine
        spec = run.policy.placement
        self._placement: Placement = spec.cls(spec.options)

    def place(self, layer: int, chosen: Int, tokens: dict[int, int]) -> None:
        """Rule 13: before a lookup, choose which of its misses the host computes."""
        timing, machine = self._timing, self._machine
        costs = Costs(
            self._link_ready(tokens),
            timing.hop_ns,
            self._link.used_ns(self._link.bytes_of(layer)),
            partial(timing.expert_ns, layer=layer),
            partial(timing.host_ns, layer=layer),
        )
        placed = self._placement.on_host(layer, machine.residency.misses(chosen), tokens, costs)
        machine.residency.place_on_host(placed)
        x, n = machine.state.x, machine.n
        x[streams.HOST_EVENT, : len(placed)] = placed
        x[streams.HOST_TOKENS, placed] = [tokens[expert] for expert in placed]
        n.host_experts = n.host_left = len(placed)

    def _link_ready(self, awaited: dict[int, int]) -> int:
        """Return in how many ns the link is free of what nothing interrupts (rule 13).

        That is the transfer on it, if it is a demand or of the experts that are `awaited`, else its chunk.
        """
        machine, n, used_ns = self._machine, self._machine.n, self._link.used_ns
        if not n.flying:
            return 0
        expert, _, demand, first, upto = machine.state.pieces[n.first].tolist()
        until = int(machine.state.x[streams.BYTES, expert]) if demand or expert in awaited else upto
        return int(n.busy_since) + used_ns(until) - used_ns(first) - machine.device.now()
