"""Experts of one decoded token, fused: two Triton kernels over the slot pool, for experts too small to go one by one.

The first computes silu(gate x) * (up x), or relu(up x), of all experts; the second adds weight * sum of (down inner).
Both are bound by bytes in flight, some 26 KiB for each of an H200's 132 multiprocessors (Little's law: 4.3 TB/s, 0.8
us), in tiles of 8 KiB asked for ahead. A program owns its rows of the output: results repeat to the bit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
from triton import language as tl

FUSED_BYTES = 64 << 20
"""Up to this size of an expert the fused kernels are meant to be used; one that is larger fills the GPU by itself."""
EXPERTS_PER_LAUNCH = 12
SLOTS = 1 << 21  # ids are below this: three of 21 bits travel in each of four 64-bit arguments
TILE_ROWS = 4
WARPS = 4
LOAD_BYTES = 16  # the widest of a thread

_POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}


@triton.jit
def _weights(
    expert: tl.tensor,
    pool: tl.tensor,
    stride: tl.tensor,
    ids_0: tl.tensor,
    ids_1: tl.tensor,
    ids_2: tl.tensor,
    ids_3: tl.tensor,
    like: tl.tensor,
) -> tl.tensor:
    """Return where the weights of the launch's expert of that number begin, as a pointer of the type of `like`."""
    word = tl.where(expert < 3, ids_0, tl.where(expert < 6, ids_1, tl.where(expert < 9, ids_2, ids_3))).to(tl.int64)
    slot = (word >> (21 * (expert % 3))) & 0x1FFFFF
    return (pool + slot * stride).to(tl.pointer_type(like.dtype.element_ty))


@triton.jit
def gate_up(
    x: tl.tensor,
    inner: tl.tensor,
    pool: tl.tensor,
    stride: tl.tensor,
    ids_0: tl.tensor,
    ids_1: tl.tensor,
    ids_2: tl.tensor,
    ids_3: tl.tensor,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741  the field's name
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """inner[expert, i] for ROWS values of i, of one expert: x[H], inner[EXPERTS_PER_LAUNCH, I], pool[slots, stride].

    A tile is asked for one iteration ahead; left to itself the compiler waits for one load before it issues another.
    """
    expert = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mine = (rows < I)[:, None]
    first = _weights(expert, pool, stride, ids_0, ids_1, ids_2, ids_3, x) + (rows.to(tl.int64) * H)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + columns, mask=columns < H, other=0)
    weights = tl.load(first + columns, mask=mine & (columns < H), other=0)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    if GATED:
        up_weights = tl.load(first + I * H + columns, mask=mine & (columns < H), other=0)
        up_sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(1, (H + COLUMNS - 1) // COLUMNS + 1):
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        next_values = tl.load(x + columns, mask=columns < H, other=0)
        next_weights = tl.load(first + columns, mask=mine & (columns < H), other=0)
        sums += weights.to(tl.float32) * values.to(tl.float32)
        weights = next_weights
        if GATED:
            next_up = tl.load(first + I * H + columns, mask=mine & (columns < H), other=0)
            up_sums += up_weights.to(tl.float32) * values.to(tl.float32)
            up_weights = next_up
        values = next_values
    linear = tl.sum(sums, axis=1)
    result = tl.maximum(linear, 0)
    if GATED:
        result = linear / (1 + tl.exp(-linear)) * tl.sum(up_sums, axis=1)
    tl.store(inner + expert * I + rows, result, mask=rows < I)


@triton.jit
def _down_tile(
    tile: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    inner: tl.tensor,
    pool: tl.tensor,
    stride: tl.tensor,
    ids_0: tl.tensor,
    ids_1: tl.tensor,
    ids_2: tl.tensor,
    ids_3: tl.tensor,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741  the field's name
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return a tile's inner activations and weights; zeros beyond the last expert."""
    TILES: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    expert = tile // TILES
    columns = tile % TILES * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    held = (columns < I) & (expert < experts)
    first = _weights(expert, pool, stride, ids_0, ids_1, ids_2, ids_3, inner) + (1 + GATED) * I * H
    weights = tl.load(first + (rows.to(tl.int64) * I)[:, None] + columns, mask=(rows < H)[:, None] & held, other=0)
    return tl.load(inner + expert * I + columns, mask=held, other=0), weights


@triton.jit
def down(
    out: tl.tensor,
    weight: tl.tensor,
    experts: tl.tensor,
    inner: tl.tensor,
    pool: tl.tensor,
    stride: tl.tensor,
    ids_0: tl.tensor,
    ids_1: tl.tensor,
    ids_2: tl.tensor,
    ids_3: tl.tensor,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741  the field's name
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """out[h] += weight * sum over the experts of down[h] inner, for ROWS values of h: out[H], inner as above.

    One loop over the tiles of all experts. There are only H / ROWS programs, so two tiles are asked for ahead.
    """
    TILES: tl.constexpr = (I + COLUMNS - 1) // COLUMNS
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    before = tl.load(out + rows, mask=rows < H, other=0)
    values, weights = _down_tile(
        0, rows, experts, inner, pool, stride, ids_0, ids_1, ids_2, ids_3, H, I, GATED, COLUMNS
    )
    next_values, next_weights = _down_tile(
        1, rows, experts, inner, pool, stride, ids_0, ids_1, ids_2, ids_3, H, I, GATED, COLUMNS
    )
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for tile in range(2, experts * TILES + 2):
        third_values, third_weights = _down_tile(
            tile, rows, experts, inner, pool, stride, ids_0, ids_1, ids_2, ids_3, H, I, GATED, COLUMNS
        )
        sums += weights.to(tl.float32) * values.to(tl.float32)
        values = next_values
        weights = next_weights
        next_values = third_values
        next_weights = third_weights
    tl.store(out + rows, before + weight * tl.sum(sums, axis=1), mask=rows < H)


class FusedExperts:
    """out += weight * sum of experts(x), for experts of one shape, on the CUDA stream that is torch's current one.

    A call launches two kernels for every EXPERTS_PER_LAUNCH slots, without synchronising; calls belong on one stream,
    whose scratch they share. dtype: of weights, x and inner activations, bfloat16 or float32; sums are float32.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, matrices: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inner = torch.empty(EXPERTS_PER_LAUNCH, intermediate_size, dtype=dtype, device=device)
        self._up_constants, self._down_constants = constants(hidden_size, intermediate_size, matrices, dtype)
        self._up_programs = triton.cdiv(intermediate_size, self._up_constants[3])
        self._down_programs = triton.cdiv(hidden_size, self._down_constants[3])
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self._gate_up = _loaded(gate_up, dtype, self._up_constants)
            self._down = _loaded(down, dtype, self._down_constants)

    def __call__(
        self, x: torch.Tensor, pool: torch.Tensor, slots: Sequence[int], weight: float, out: torch.Tensor
    ) -> None:
        """Add the experts in `slots` to `out`.

        x: [H], of the kernel's type; pool: uint8[slots, stride]; out: float32[H]; all contiguous, each slot, x and out
        at multiples of LOAD_BYTES, and ids below SLOTS.
        """
        for start in range(0, len(slots), EXPERTS_PER_LAUNCH):
            part = slots[start : start + EXPERTS_PER_LAUNCH]
            where = (self._inner, pool, pool.shape[1], *packed(part))
            self._gate_up[self._up_programs, len(part), 1](x, *where, *self._up_constants)
            self._down[self._down_programs, 1, 1](out, weight, len(part), *where, *self._down_constants)


def is_small(hidden_size: int, intermediate_size: int, matrices: int, dtype: torch.dtype) -> bool:
    """Return whether the fused kernels are meant for experts of this shape; matmuls suffice for larger ones."""
    return dtype in _POINTERS and matrices * hidden_size * intermediate_size * dtype.itemsize <= FUSED_BYTES


def packed(slots: Sequence[int]) -> tuple[int, int, int, int]:
    """Return at most EXPERTS_PER_LAUNCH ids as four arguments; none is negative as a signed 64-bit number."""
    words = [0, 0, 0, 0]
    for place, slot in enumerate(slots):
        words[place // 3] |= slot << 21 * (place % 3)
    return words[0], words[1], words[2], words[3]


Constants = tuple[int, int, bool, int, int]


def constants(
    hidden_size: int, intermediate_size: int, matrices: int, dtype: torch.dtype
) -> tuple[Constants, Constants]:
    """Return what `gate_up` and `down` are compiled for, in the order of their last arguments."""
    gated = matrices == 3
    columns = WARPS * 32 * LOAD_BYTES // dtype.itemsize  # one load of each thread, 32 to a warp
    shape = (hidden_size, intermediate_size, gated)
    return (*shape, TILE_ROWS // 2 if gated else TILE_ROWS, columns), (*shape, TILE_ROWS, columns)


def compiled(kernel: Any, dtype: torch.dtype, constants: Constants, target: Any) -> Any:
    """Return the kernel as machine code for a `triton.backends.compiler.GPUTarget`; needs no GPU.

    Types and alignments are stated, so nothing that a call passes can make another variant.
    """
    types = {"x": _POINTERS[dtype], "inner": _POINTERS[dtype], "pool": "*u8", "out": "*fp32", "stride": "i64"}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", LOAD_BYTES]] for name in types if name in kernel.arg_names
    }
    types |= {"weight": "fp32", "experts": "i32"} | dict.fromkeys(("ids_0", "ids_1", "ids_2", "ids_3"), "i64")
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    named = dict(zip(kernel.arg_names[-len(constants) :], constants, strict=True))
    source = triton.compiler.ASTSource(kernel, signature, named, aligned)
    return triton.compile(source, target=target, options={"num_warps": WARPS})


def _loaded(kernel: Any, dtype: torch.dtype, constants: Constants) -> Any:
    """Return what `[grid](*arguments)` launches, on the current device."""
    if not isinstance(kernel, triton.JITFunction):
        return kernel  # Triton interprets
    ready = compiled(kernel, dtype, constants, triton.runtime.driver.active.get_current_target())
    ready[1, 1, 1]  # loads it
    return ready
