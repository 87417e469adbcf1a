"""Values of foreign tables become typed in one place, which names the key, the value and the limit."""

from dataclasses import dataclass
from typing import Annotated

import pytest
from msgspec import Meta

from traces import InputError
from traces.typed import typed


@dataclass(frozen=True)
class _Machine:
    name: str
    link_gb_per_s: Annotated[float, Meta(gt=0)]
    lanes: Annotated[int, Meta(ge=1)] | None = None
    rates: tuple[Annotated[float, Meta(gt=0)], ...] = ()


def test_a_table_becomes_an_instance_with_lists_as_tuples() -> None:
    made = typed(_Machine, {"name": "a", "link_gb_per_s": 25, "rates": [1, 2.5]})
    assert made == _Machine("a", 25.0, None, (1.0, 2.5))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "a", "link_gb_per_s": 0}, r"x.toml: link_gb_per_s = 0: expected float > 0.0"),
        ({"name": "a", "link_gb_per_s": 1, "lane": 2}, r"x.toml: unknown key 'lane'; did you mean lanes"),
        ({"name": "a"}, r"x.toml: object missing required field link_gb_per_s"),
        ({"name": "a", "link_gb_per_s": 1, "rates": [1, -1]}, r"x.toml: rates\[1\] = -1: expected float > 0.0"),
    ],
)
def test_an_error_names_the_key_the_value_and_the_limit(values: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        typed(_Machine, values, "x.toml")
