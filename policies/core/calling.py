"""How compiled code calls what was not there when it was compiled: by an address.

The compiled loop knows no policy: it calls C functions of what one declares as `compiled` (`policies.core.dispatch`),
and one that is written in Python through a callback. All take four whole numbers and return one. NamedTuples of arrays
lie in memory as numba's structures, at an address (`Held`). What a policy in Python raises waits until the
compiled code has ended (`Asked.check`); a C function raises nothing: it answers RAISED, and its caller raises.
"""

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from types import FunctionType
from typing import Any, NamedTuple

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.registry import cpu_target

from policies.core.compiled import WHOLE, compiled, inlined, keep_as

# Numba types hardly any of what it offers to those who extend it.
typeof: Any = numba.typeof
cfunc: Any = numba.cfunc
intrinsic: Any = numba.extending.intrinsic
pointer_to: Any = types.CPointer

QUESTION = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64, c_int64)

OBSERVE, PROPOSE, START, HIT, INSERT, EVICT, VICTIM, ADMIT = range(8)
"""The questions, each with a number: of an event (step * L + layer), of a step that starts, or of an expert."""

LOOKUP, LOOKED_UP, PROPOSED, NEXT, INTERRUPT = range(8, 13)
"""What `policies.core.script.OrderedResidency` is asked."""

RAISED, NO_EXPERTS = -1, -2
"""Answers of a C function that failed: it raised an error, or proposes what no expert has."""

INT = types.int64


class Scores(NamedTuple):
    """The keep scores of an eviction policy, for its C functions."""

    keep: np.ndarray[tuple[int, int], np.dtype[np.float64]]


class Proposal(NamedTuple):
    """Room for a proposal, [L*E] each."""

    ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    priorities: np.ndarray[tuple[int], np.dtype[np.float64]]


@intrinsic
def _call(context: Any, address: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        function = ir.FunctionType(given[0].type, [each.type for each in given[1:]])
        return builder.call(builder.inttoptr(given[0], function.as_pointer()), given[1:])

    return INT(INT, a, b, c, d), code


call: Callable[..., int] = _call
"""(address, and four whole numbers or pointers): what the C function at that address answers."""


@intrinsic
def value(context: Any, pointer: Any) -> Any:
    """Return what lies at a pointer."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        # as numba hands a value over, which is not how it lies in an array
        kind = context.get_value_type(signature.return_type)
        return builder.load(builder.bitcast(given[0], kind.as_pointer()))

    return pointer.dtype(pointer), code


@intrinsic
def like(context: Any, address: Any, example: Any) -> Any:
    """Return what lies at an address, of the type of the example."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], given[1].type.as_pointer()))

    return example(INT, example), code


@intrinsic
def _put(context: Any, value: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[0], builder.inttoptr(given[1], given[0].type.as_pointer()))
        return given[1]

    return INT(value, INT), code


@inlined
def ask(address: int, question: int, number: int) -> int:
    """Return the answer of whoever is `Asked` there."""
    return call(address, question, number, 0, 0)


@inlined
def checked(answer: int) -> int:
    """Return the answer of a policy's C function. Raise RuntimeError or ValueError if it failed."""
    if answer == RAISED:
        raise RuntimeError("a compiled policy raised an error: call the `py_func` of its functions to see which")
    if answer == NO_EXPERTS:
        raise ValueError("a compiled policy proposes ids that no expert has, or more than there are")
    return answer


@compiled
def put(value: Any, address: int) -> None:
    """Store a NamedTuple at an address that has room for it; the arrays remain their owner's, and are not counted."""
    _put(value, address)


def with_names(template: Any, qualname: str, **names: Any) -> Any:
    """Return a function of the code of another, in which these global names stand for something else.

    It is no closure: numba would not find one again on disk that holds a compiled function.
    """
    made = FunctionType(template.__code__, template.__globals__ | names, template.__name__)
    made.__qualname__ = qualname
    return made


function: Any = None
"""What `_guarded` calls."""


def _guarded(a: Any, b: Any, c: Any, d: Any) -> Any:
    try:
        return function(a, b, c, d)
    except Exception:
        return RAISED


class CFunction:
    """A function as compiled code calls it, at `address`; where an argument is a pointer, `examples` has its value."""

    def __init__(self, function: Any, *examples: Any) -> None:
        name, module = function.__qualname__, function.__module__
        guarded = with_names(_guarded, name, function=compiled(function), __name__=module)
        takes = [INT if example is None else pointer_to(typeof(example)) for example in examples]
        self._made = cfunc(INT(*takes), cache=keep_as(guarded), _nrt=False, **WHOLE)(guarded)
        self.address, self.kept = int(self._made.address), self._made.cache_hits > 0


def _words(value: Any) -> int:
    """Return how much memory a NamedTuple takes."""
    context = cpu_target.target_context
    return int(context.get_abi_sizeof(context.get_value_type(typeof(value)))) // 8 + 1


def _plain(value: Any) -> Any:
    """Return a NamedTuple as a tuple, which lies in memory alike: what is kept on disk names no class of a user's."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


class Held:
    """A NamedTuple in memory, at `address`, for compiled code to read; its arrays live as long as this."""

    def __init__(self, value: Any) -> None:
        self._memory = np.zeros(_words(value), np.int64)
        self.address = int(self._memory.ctypes.data)
        self.hold(value)

    def hold(self, value: Any) -> None:
        """Replace it by another of the same type."""
        self._value = value
        put(_plain(value), self.address)


class Asked:
    """Who answers, at `address`. After an error, which sets `failed`, `instead` does: compiled code comes to an end."""

    def __init__(
        self,
        answer: Callable[[int, int], int | None],
        failed: Callable[[bool], None],
        instead: Callable[[int, int], int] = lambda question, number: 0,
    ) -> None:
        self.error: BaseException | None = None
        self._failed = failed

        def answered(question: int, number: int, *_: int) -> int:
            if self.error is None:
                try:
                    return answer(question, number) or 0
                except BaseException as error:
                    self.error = error
                    failed(True)
            return instead(question, number)

        self._function = QUESTION(answered)
        self.address = cast(self._function, c_void_p).value or 0

    def check(self) -> None:
        """Raise what an answer has raised."""
        if self.error is not None:
            error, self.error = self.error, None
            self._failed(False)
            raise error
