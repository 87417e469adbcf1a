"""What is compiled into its callers is what says so, whichever function calls it first."""

from typing import Any

from policies.core.compiled import compiled, inlined


def test_a_function_that_an_inlined_one_calls_is_not_inlined_for_that() -> None:
    @compiled
    def called(x: int) -> int:
        return x * x

    @inlined
    def calls(x: int) -> int:
        return called(x) + 1

    @compiled
    def whole(x: int) -> int:
        return calls(x)

    assert whole(3) == 10
    assert not _in_its_callers(called)
    assert _in_its_callers(calls)


def _in_its_callers(function: Any) -> bool:
    """Whether LLVM must make a function a piece of each that calls it."""
    (made,) = function.part.overloads.values()
    name = made.fndesc.llvm_func_name
    return any("alwaysinline" in str(each) for each in made.library.get_function(name).attributes)
