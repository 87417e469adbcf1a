"""How compiled code calls what was not there when it was compiled: by an address.

Numba keeps no function on disk that takes functions as arguments, but one that takes an address is like any other. So
the compiled loop knows no policy: it calls what one declares as `compiled` (`policies.core.dispatch`) by the address of
its machine code, and asks one that is written in Python through a C function, half a microsecond a question. What
Python raises waits until the compiled code has ended (`Asked.check`), which until then is answered without it.

Arguments of one type for all policies are handed over as they are. The others, what a policy knows and an event, lie in
memory, as the structure of words that numba makes of a NamedTuple of arrays, at an address too (`Held`).
"""

from collections.abc import Callable
from ctypes import CFUNCTYPE, c_int64, c_void_p, cast
from typing import Any

import numba.extending
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

from policies.core.compiled import compiled

# Numba types hardly any of what it offers to those who extend it.
config: Any = numba.config
typeof: Any = numba.typeof
intrinsic: Any = numba.extending.intrinsic
if_unlikely: Any = cgutils.if_unlikely

QUESTION = CFUNCTYPE(c_int64, c_int64, c_int64)

OBSERVE, PROPOSE, START, HIT, INSERT, EVICT, VICTIM = range(7)
"""The questions, each with a number: of an event (step * L + layer), of a step that starts, or of an expert."""

INT, INTS, FLOATS, SCORES = types.int64, types.int64[::1], types.float64[::1], types.float64[:, ::1]

WORD = ir.IntType(64)

UNCOMPILED: dict[int, Any] = {}
"""What stands at an address where numba compiles nothing (NUMBA_DISABLE_JIT)."""


def _called(arguments: tuple[Any, ...], in_python: Callable[..., int]) -> Callable[..., int]:
    """Return how compiled code calls the function at an address: (address, *arguments) -> int."""

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        convention, kinds = context.call_conv, signature.args[1:]
        function = builder.inttoptr(given[0], convention.get_function_type(INT, kinds).as_pointer())
        status, answer = convention.call_function(builder, function, INT, kinds, given[1:])
        with if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return answer

    if config.DISABLE_JIT:
        return in_python
    signature = INT(INT, *arguments)
    made: Callable[..., int]
    if len(arguments) == 4:
        made = intrinsic(lambda context, address, a, b, c, d: (signature, code))
    else:
        made = intrinsic(lambda context, address, a, b, c: (signature, code))
    return made


call_hook = _called((SCORES, INT, INT, INT), lambda address, *given: UNCOMPILED[address](*given))
"""(address, keep, expert, serial, start): bookkeeping in the keep scores (rule 8)."""

call_observe = _called((INT, SCORES, INT), lambda address, *given: UNCOMPILED[address](*given))
"""(address, state, keep, event): rule 3; the last and `state` are addresses."""

call_propose = _called((INT, INT, INTS, FLOATS), lambda address, *given: UNCOMPILED[address](*given))
"""(address, state, event, ids, priorities): rule 4; fill ids and priorities, [L*E] each; how many."""

SIGNATURES = {"hook": (SCORES, INT, INT, INT), "observe": (INT, SCORES, INT), "propose": (INT, INT, INTS, FLOATS)}


def address_of(function: Callable[..., int], kind: str) -> int:
    """Return where the machine code of a compiled function stands, which takes what `call_...` hands over."""
    made: Any = function
    if not hasattr(made, "overloads"):  # under NUMBA_DISABLE_JIT
        UNCOMPILED[id(function)] = function
        return id(function)
    made.compile(SIGNATURES[kind])
    found = made.overloads[SIGNATURES[kind]]
    return int(found.library.get_pointer_to_function(found.fndesc.llvm_func_name))


# What lies in memory


def _stored(context: Any, value: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        builder.store(given[0], builder.inttoptr(given[1], given[0].type.as_pointer()))
        return ir.Constant(WORD, 0)

    return INT(value, INT), code


def _words(value: Any) -> int:
    """Return how much memory a NamedTuple takes."""
    if config.DISABLE_JIT:
        return 1
    context = cpu_target.target_context
    return int(context.get_abi_sizeof(context.get_value_type(typeof(value)))) // 8 + 1


_put: Any = (lambda value, address: UNCOMPILED.update({int(address): value}) or 0) if config.DISABLE_JIT else None
_put = _put or intrinsic(_stored)


@compiled
def put(value: Any, address: int) -> int:
    """Store a NamedTuple at an address that has room for it; the arrays remain their owner's."""
    done: int = _put(value, address)
    return done


def got(example: Any) -> Callable[[int], Any]:
    """Return how compiled code takes what lies at an address, of the type of `example`."""
    if config.DISABLE_JIT:
        return UNCOMPILED.__getitem__
    kind = typeof(example)

    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], context.get_value_type(kind).as_pointer()))

    made: Callable[[int], Any] = intrinsic(lambda context, address: (kind(INT), code))
    return made


@intrinsic
def _like(context: Any, address: Any, example: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.load(builder.inttoptr(given[0], given[1].type.as_pointer()))

    return example(INT, example), code


like: Callable[[int, Any], Any] = (lambda address, example: UNCOMPILED[address]) if config.DISABLE_JIT else _like
"""(address, example): what lies at an address, of the type of the example."""


class Held:
    """A NamedTuple in memory, at `address`, for compiled code to read; its arrays live as long as this."""

    def __init__(self, value: Any) -> None:
        self._memory = np.zeros(_words(value), np.int64)
        self.address = int(self._memory.ctypes.data)
        self.hold(value)

    def hold(self, value: Any) -> None:
        """Replace it by another of the same type."""
        self._value = value
        put(value, self.address)


# What Python is asked


@intrinsic
def _asked(context: Any, address: Any, question: Any, number: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        function = builder.inttoptr(given[0], ir.FunctionType(WORD, [WORD, WORD]).as_pointer())
        return builder.call(function, given[1:])

    return INT(INT, INT, INT), code


def _in_python(address: int, question: int, number: int) -> int:
    return int(QUESTION(int(address))(question, number))


ask: Callable[[int, int, int], int] = _in_python if config.DISABLE_JIT else _asked
"""(address, question, number): the answer of whoever is `Asked` there."""


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

        def answered(question: int, number: int) -> int:
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
