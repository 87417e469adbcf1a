"""The fused expert kernels without a GPU: run by Triton's interpreter, and compiled for a Hopper GPU."""

import ctypes
import dataclasses
import mmap
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from traces.models.profile import model

triton = pytest.importorskip("triton", reason="Triton is not installed")
from replay.model import kernels  # noqa: E402  needs Triton

Doubles = NDArray[np.float64]

GUARD = 64
"""Numbers on either side of the output, NaN before and after."""
GPU = triton.backends.compiler.GPUTarget("cuda", 90, 32)


@dataclasses.dataclass(frozen=True)
class Case:
    hidden_size: int
    intermediate_size: int
    matrices: int
    dtype: torch.dtype
    slots: tuple[int, ...]
    pool_slots: int = 5
    stride: int | None = None  # None: the next multiple of 16

    @property
    def parameters(self) -> int:
        return self.matrices * self.hidden_size * self.intermediate_size

    def inputs(self) -> tuple[torch.Tensor, dict[int, torch.Tensor], torch.Tensor]:
        """x [H], the parameters of each slot, and what the output held before [H]."""
        rng = torch.Generator().manual_seed(self.parameters)
        x, before = torch.randn(2, self.hidden_size, generator=rng)
        scale = self.hidden_size**-0.5
        weights = {slot: torch.randn(self.parameters, generator=rng) * scale for slot in dict.fromkeys(self.slots)}
        return x.to(self.dtype), {slot: each.to(self.dtype) for slot, each in weights.items()}, before


WEIGHT = 0.375
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {
    "one tile, 3 matrices, fp32": Case(72, 40, 3, FP32, (2,)),
    "one tile, 3 matrices, bf16": Case(72, 40, 3, BF16, (0, 3, 1)),
    "one tile, 2 matrices, bf16": Case(56, 50, 2, BF16, (4, 0)),
    "odd sizes": Case(37, 23, 3, BF16, (1, 4)),
    "hidden size of two tiles, bf16": Case(1060, 18, 3, BF16, (3,)),
    "intermediate size of two tiles, bf16": Case(26, 1060, 2, BF16, (2,)),
    "as many experts as a launch takes": Case(20, 8, 3, FP32, tuple(range(12)), pool_slots=12),
    "one more, and repeated slots": Case(20, 8, 3, FP32, (*range(12), 3), pool_slots=12),
    "three launches": Case(16, 10, 2, BF16, tuple(n % 7 for n in range(26)), pool_slots=7),
    "several slots behind 16 bits and 4 GiB": Case(
        32, 20, 3, BF16, (299_999, 1, 262_144), pool_slots=300_000, stride=1 << 14
    ),
}

REAL = {
    "DeepSeek-V2-Lite": Case(2048, 1408, 3, BF16, (5, 0, 3, 1, 2, 4), pool_slots=6),
    "gpt-oss": Case(2880, 2880, 3, BF16, (1, 0)),
    "Switch, fp32": Case(768, 3072, 2, FP32, (2,)),
}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    """A process of its own in which Triton interprets kernels: that is settled when Triton is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            process.submit(_mend_interpreter).result()
        yield process


def _mend_interpreter() -> None:
    """Triton 3.6 takes int() of arrays of one element, which NumPy 2.4 refuses.

    It also copies each whole storage onto itself after a launch, which would touch all pages of a sparse pool.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def mended(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = mended
    interpreter.GridExecutor._restore_args_dev = lambda *_: None


def _fenced(size: int) -> torch.Tensor:
    """uint8[size] that begins at a multiple of 16 bytes; at most 15 behind its end, reading ends the process."""
    taken = -(-size // 16) * 16
    body = -(-taken // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, body + mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(memory.ctypes.data + body), mmap.PAGESIZE, 0) == 0
    return torch.from_numpy(memory)[body - taken : body - taken + size]


def _fused(case: Case, device: str = "cpu") -> NDArray[np.float32]:
    """The output between its guards, of kernels that find NaN, or a fence, wherever they should not look."""
    assert isinstance(kernels.gate_up, triton.JITFunction) == (device != "cpu")
    allocate = _fenced if device == "cpu" else partial(torch.empty, dtype=torch.uint8, device=device)
    x, weights, before = case.inputs()
    used = case.parameters * case.dtype.itemsize
    if case.stride:  # most of it is never touched, so takes no memory
        pool = torch.empty(case.pool_slots, case.stride, dtype=torch.uint8, device=device)
    else:
        stride = -(-used // 16) * 16
        pool = allocate(case.pool_slots * stride).fill_(0xFF).view(case.pool_slots, stride)  # NaN in both formats
    for slot, each in weights.items():
        pool[slot, :used] = each.view(torch.uint8).to(device)
    guarded = torch.full((case.hidden_size + 2 * GUARD,), torch.nan, device=device)
    out = guarded[GUARD:-GUARD]
    out[:] = before.to(device)
    experts = kernels.FusedExperts(
        case.hidden_size, case.intermediate_size, case.matrices, case.dtype, torch.device(device)
    )
    experts._inner = allocate(experts._inner.nbytes).view(case.dtype).view_as(experts._inner).fill_(torch.nan)
    experts(allocate(x.nbytes).view(case.dtype).copy_(x), pool, case.slots, WEIGHT, out)
    return guarded.cpu().numpy()


def _expected(case: Case) -> tuple[Doubles, Doubles]:
    """The output in float64, and how far float32 sums may be from it.

    A float32 sum of n products errs by at most (n + a few) * 2^-24 of the sum of their magnitudes, in any order. It
    passes through silu, whose slope is at most 1.1, or relu, and is stored in the experts' dtype: for bfloat16 that
    is 2^-8 of the value on a GPU, and 2^-7 here, since the interpreter cuts off instead of rounding.
    """
    x, weights, before = case.inputs()
    H, I, ups = case.hidden_size, case.intermediate_size, case.matrices - 1  # noqa: E741
    u, stored = 2.0**-24, 2.0**-7 if case.dtype == BF16 else 2.0**-24
    vector = x.double().numpy()
    total, slack = np.zeros(H), np.zeros(H)
    for slot in case.slots:
        numbers = weights[slot].double().numpy()
        first, down = numbers[: ups * I * H].reshape(ups, I, H), numbers[ups * I * H :].reshape(H, I)
        linear, error = first @ vector, (H + 8) * u * (np.abs(first) @ np.abs(vector))
        if ups == 2:
            (gate, up), (gate_error, up_error) = linear, error
            silu = gate / (1 + np.exp(-gate))
            inner = silu * up
            inner_error = 1.1 * gate_error * (np.abs(up) + up_error) + np.abs(silu) * up_error
        else:
            inner, inner_error = np.maximum(linear[0], 0), error[0]
        inner_error = inner_error + (stored + 16 * u) * np.abs(inner)
        total += down @ inner
        terms = len(case.slots) * I + 8
        slack += np.abs(down) @ (inner_error + terms * u * (np.abs(inner) + inner_error))
    expected = before.double().numpy() + WEIGHT * total
    return expected, WEIGHT * slack + 32 * u * (np.abs(expected) + np.abs(before.double().numpy()))


def _require_sums(case: Case, guarded: NDArray[np.float32]) -> None:
    out = guarded[GUARD:-GUARD].astype(np.float64)
    assert np.isnan(guarded[:GUARD]).all()
    assert np.isnan(guarded[-GUARD:]).all()
    expected, slack = _expected(case)
    assert (np.abs(out - expected) <= slack).all()
    for others in (case.slots[:-1], (*case.slots, case.slots[0])):  # one expert less or more is told apart
        wrong, _ = _expected(dataclasses.replace(case, slots=others))
        assert np.linalg.norm(out - wrong) > 5 * np.linalg.norm(out - expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_interpreted_kernels_add_the_experts_as_float64_does(interpreter: Executor, case: Case) -> None:
    _require_sums(case, interpreter.submit(_fused, case).result())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("case", [*CASES.values(), *REAL.values()], ids=[*CASES, *REAL])
def test_compiled_kernels_do_too_and_repeat_to_the_bit(case: Case) -> None:
    guarded = _fused(case, "cuda")
    _require_sums(case, guarded)
    np.testing.assert_array_equal(guarded, _fused(case, "cuda"))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing compiled earlier is taken for what the source says now."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _machine_code(hidden_size: int, intermediate_size: int, dtype: torch.dtype = BF16) -> Iterator[tuple[Any, str]]:
    """Both kernels, compiled, each with its name."""
    both = kernels.constants(hidden_size, intermediate_size, 3, dtype)
    for kernel, constants in zip((kernels.gate_up, kernels.down), both, strict=True):
        yield kernels.compiled(kernel, dtype, constants, GPU), kernel.__name__


def _cuobjdump(option: str, cubin: bytes, folder: Path) -> str:
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    return subprocess.run([tool, option, file], check=True, capture_output=True, text=True).stdout


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gpt-oss-20b-bf16"])
def test_real_shapes_compile_to_16_byte_loads_issued_by_whole_tiles(name: str, tmp_path: Path) -> None:
    profile = model(name)
    for code, kernel in _machine_code(profile.hidden_size, profile.expert_intermediate_size):
        loads = re.findall(r"ld\.global\S*", code.asm["ptx"])
        assert loads
        assert all(".v4.b32" in load for load in loads)
        assert "STACK:0 " in (usage := _cuobjdump("-res-usage", code.asm["cubin"], tmp_path))
        assert "LOCAL:0 " in usage
        assert (registers := re.search(r"REG:(\d+)", usage))
        assert int(registers[1]) <= 128  # four programs a multiprocessor
        sass = re.findall(r"\b(LDG\.E\.128|FFMA|LDL|STL)\b", _cuobjdump("-sass", code.asm["cubin"], tmp_path))
        assert not {"LDL", "STL"} & set(sass)
        # A tile is a load for each of four rows and one for what they are multiplied by; `down` loads two at first.
        assert sass.index("FFMA") >= (10 if kernel == "down" else 5)


@pytest.mark.usefixtures("own_cache")
def test_odd_shapes_compile_to_narrower_loads() -> None:
    for code, _ in _machine_code(37, 23):
        assert not re.search(r"ld\.global\S*\.v4\.b32", code.asm["ptx"])


class Launches:
    """In the place of compiled code: what was built, and what was launched with which arguments."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.made: list[tuple[str, tuple[int, ...], dict[str, Any]]] = []

    def build(self, kernel: Any, *_: object) -> "Launches.Built":
        self.built.append(kernel.__name__)
        return Launches.Built(self, kernel)

    @dataclasses.dataclass
    class Built:
        launches: "Launches"
        kernel: Any

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return partial(self.launch, grid)

        def launch(self, grid: tuple[int, ...], *arguments: object) -> None:
            named = dict(zip(self.kernel.arg_names, arguments, strict=True))
            self.launches.made.append((self.kernel.__name__, grid, named))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    recorder = Launches()
    monkeypatch.setattr(kernels, "_loaded", recorder.build)
    return recorder


def _experts(dtype: torch.dtype = BF16) -> tuple[kernels.FusedExperts, torch.Tensor, torch.Tensor]:
    """Experts of H 48 and I 30, an x and an out."""
    experts = kernels.FusedExperts(48, 30, 3, dtype, torch.device("cpu"))
    return experts, torch.ones(48, dtype=dtype), torch.ones(48)


def _ids(arguments: dict[str, Any], count: int) -> list[int]:
    """Slot ids as the kernels read them, from the words as the launcher sends them: signed, of 64 bits."""
    words = np.array([arguments[f"ids_{n}"] for n in range(4)], dtype=np.int64)
    return [int(words[n // 3] >> (21 * (n % 3)) & 0x1FFFFF) for n in range(count)]


def test_code_is_built_once_whatever_is_launched(launches: Launches) -> None:
    experts, x, out = _experts()
    assert launches.built == ["gate_up", "down"]
    for count in (1, 3, 1 << 17):
        pool = torch.empty(count, 8704, dtype=torch.uint8)
        for slots, weight in (([0], 1.0), ([count - 1] * 5, 1 / 3), (list(range(min(count, 12))), 2.0)):
            launches.made.clear()
            experts(x, pool, slots, weight, out)
            (first, first_grid, up), (second, second_grid, down) = launches.made
            assert (first, second) == ("gate_up", "down")
            assert first_grid == (15, len(slots), 1)
            assert second_grid == (12, 1, 1)
            assert _ids(up, len(slots)) == _ids(down, len(slots)) == slots
            assert (down["experts"], down["weight"], up["stride"]) == (len(slots), weight, 8704)
            assert up["x"] is x
            assert down["out"] is out
            assert up["inner"] is down["inner"]
    assert launches.built == ["gate_up", "down"]


def test_longer_lists_take_several_launches_and_none_takes_none(launches: Launches) -> None:
    experts, x, out = _experts()
    pool = torch.empty(30, 8704, dtype=torch.uint8)
    experts(x, pool, [], 1.0, out)
    assert not launches.made
    experts(x, pool, list(range(29, 0, -1)), 1.0, out)
    counts = [arguments["experts"] for name, _, arguments in launches.made if name == "down"]
    assert counts == [12, 12, 5]
    ids = [_ids(arguments, grid[1]) for name, grid, arguments in launches.made if name == "gate_up"]
    assert [each for part in ids for each in part] == list(range(29, 0, -1))


def test_the_greatest_ids_fit_in_signed_words() -> None:
    greatest = [kernels.SLOTS - 1] * kernels.EXPERTS_PER_LAUNCH
    words = kernels.packed(greatest)
    assert _ids({f"ids_{n}": word for n, word in enumerate(words)}, len(greatest)) == greatest
    assert max(words) < 1 << 63


@pytest.mark.parametrize(
    ("name", "small"), [("deepseek-v2-lite", True), ("gpt-oss-20b-bf16", True), ("mixtral-8x7b", False)]
)
def test_large_experts_are_left_to_matmuls(name: str, small: bool) -> None:
    profile = model(name)
    shape = profile.hidden_size, profile.expert_intermediate_size, profile.expert_matrices
    assert kernels.is_small(*shape, BF16) == small
    assert not kernels.is_small(*shape, torch.float16)
