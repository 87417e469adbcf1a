"""Inputs that are a seed but for one thing: a number, word, line, array or member of an archive with a hostile value.

Mutated bytes are mostly refused. What is edited so is often accepted, and shows which values a reader should refuse.
"""

import io
import re
import struct
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.harness import members, packed

TOKEN = re.compile(rb'"[^"\n]*"|(?<![\w.])[-+]?\d[\d.eE+]*(?:-\d+)?|\b[A-Za-z_]+\b')
"""A text in quotes, a number or a word."""

WORDS = rb"""
0 -1 1 2 7 0.5 -0.0 1e-9 1e-320 1e6 1000000 1e308 1e400 NaN nan inf -Infinity 255 65536 2147483648 9223372036854775807
18446744073709551616 -9223372036854775809 null true "" "x" "\u0000" "0" "-1" "nan" "\n" '' [] [1] {} 00 1_0
""".split()

TEXTS = (*WORDS, b'" "', b'"%s"' % (b"x" * 5000), '"\u202e"'.encode())

NUMBERS = (0, -1, 1, 2, 3, 5, 6, 7, 8, 255, 256, 2**31, 2**32, 2**63 - 1, -(2**63), 0.5, -1e-9, 1e308, np.inf, np.nan)

TYPES = ("f2", "f4", "f8", "f16", "i1", "u1", "i4", "u4", "i8", "u8", "?", "c8", "M8[ns]", ">i4", ">f4")


def edited(seed: bytes) -> Iterator[bytes]:
    """Edits of a text, of an archive as `packed` makes it, or of the header of safetensors; of other bytes none."""
    with suppress(UnicodeDecodeError):
        seed.decode()
        yield from _texts(seed)
        return
    if packed(held := members(seed)) == seed:
        for name, content in held.items():
            yield packed({other: kept for other, kept in held.items() if other != name})
            yield from (packed({**held, name: changed}) for changed in (*held.values(), *_arrays(content)))
    elif seed[8:9] == b"{":
        end = 8 + struct.unpack("<Q", seed[:8])[0]
        yield from (struct.pack("<Q", len(header)) + header + seed[end:] for header in _texts(seed[8:end]))


def _texts(seed: bytes) -> Iterator[bytes]:
    """One token replaced; one line gone, there twice or empty, or all from it on gone."""
    for token in TOKEN.finditer(seed):
        near: set[bytes] = set()
        with suppress(ValueError):
            number = int(token[0])
            near = {b"%d" % other for other in (number - 1, number + 1, 2 * number, -number, 1000 * number)}
        for text in sorted({*TEXTS, *near}):
            yield seed[: token.start()] + text + seed[token.end() :]
    lines = seed.split(b"\n")
    for i, line in enumerate(lines):
        for other in ([], [line, line], [b""]):
            yield b"\n".join([*lines[:i], *other, *lines[i + 1 :]])
        yield b"\n".join(lines[:i])


def _arrays(content: bytes) -> Iterator[bytes]:
    """The array in a .npy with values, its type or its shape changed; a text in it as any text."""
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError, SyntaxError):
        return
    for changed in _changed(array) if isinstance(array, np.ndarray) else ():
        file = io.BytesIO()
        np.save(file, changed)
        yield file.getvalue()


def _changed(array: NDArray[np.generic]) -> Iterator[NDArray[np.generic]]:
    """Some values, all values, the type, each axis or the order of the axes."""
    if array.dtype.kind == "U":
        if array.ndim == 0:
            for text in _texts(str(array).encode()):
                with suppress(UnicodeDecodeError):
                    yield np.array(text.decode())
        return
    size = array.size
    some = sorted({0, 1, size // 2, size - 1} & set(range(size)))
    for places in (*([place] for place in some), range(size)):
        for number in NUMBERS:
            with suppress(OverflowError, ValueError), np.errstate(all="ignore"):
                other = array.copy()
                other.reshape(-1)[list(places)] = np.array(number).astype(array.dtype)
                yield other
    for kind in TYPES:
        with suppress(TypeError), np.errstate(all="ignore"):
            yield array.astype(kind)
    for axis in range(array.ndim):
        yield from (array.take(range(array.shape[axis] - 1), axis), array.take(range(0), axis))
        yield from (np.concatenate([array, array], axis), np.flip(array, axis))
    yield from (array[None], array[..., None], array.reshape(-1), array.T)
