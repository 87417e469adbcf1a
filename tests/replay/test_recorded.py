"""A recorded forward pass gives what the code gives, for other inputs, or is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from replay.live.experts import Program, Recording

Forward = Callable[[Tensor, Tensor], Tensor]


def recorded(forward: Forward, *inputs: Tensor) -> tuple[Program | None, Tensor]:
    """What is recorded of adding up `forward` of some inputs, and what is added."""
    output, token = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
    with Recording(inputs) as found:
        output.index_add_(0, token, forward(*inputs))
    assert found.values is not None
    assert not output.any(), "nothing is added while it is recorded"
    return found.program(), found.values


def inputs(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(1, 4, generator=made), torch.randn(2, 8, 4, generator=made)


def gated(hidden: Tensor, weights: Tensor) -> Tensor:
    """As experts of transformers are: a mask that depends on no input, and a value that is used by nothing."""
    mask = functional.one_hot(torch.zeros(1, 1, dtype=torch.int64), 2).permute(2, 1, 0)
    unused = hidden * 3
    for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        if expert[0] == 1:
            continue
        _, token = torch.where(mask[expert[0]])
        gate, up = functional.linear(hidden[token], weights[expert[0]]).chunk(2, dim=-1)
        hidden = functional.silu(gate) * up
    del unused
    return hidden.to(torch.float32)


def test_it_gives_what_the_code_gives_for_other_inputs() -> None:
    program, first = recorded(gated, *inputs(0))
    assert program
    for seed in range(5):
        assert torch.equal(program(*inputs(seed)), gated(*inputs(seed)))
    assert torch.equal(program(*inputs(0)), first)


def test_what_depends_on_no_input_or_is_used_by_nothing_is_not_done_again() -> None:
    program, _ = recorded(gated, *inputs(0))
    assert program
    names = [held.__name__ for name, held in program._constants.items() if name[0] == "c" and callable(held)]
    assert names == ["__getitem__", "__getitem__", "linear", "chunk", "silu", "mul", "to"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda hidden, _: hidden if hidden.sum() > 0 else -hidden,
        lambda hidden, _: hidden * float(hidden[0, 0]),
        lambda hidden, _: hidden if torch.equal(hidden, hidden) else -hidden,
        lambda hidden, _: hidden[hidden > 0],
        lambda hidden, _: hidden.nonzero(),
        lambda hidden, _: hidden.add_(1),
        lambda hidden, weights: torch.mul(hidden, 2, out=torch.empty(1, 4)),
        lambda hidden, _: torch.ones(1, 4),
    ],
    ids=["branch", "number", "equal", "mask", "nonzero", "in-place", "out", "constant"],
)
def test_what_depends_on_values_or_writes_is_refused(forward: Forward) -> None:
    program, _ = recorded(forward, *inputs(1))
    assert program is None
