"""Tables of the back-test: general factors (data/factors.toml), reuse, errors."""

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@cache
def table(name: str) -> Mapping[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text("utf-8"))


class Factors(dict[str, Any]):
    """What is assumed where nothing is stated, by names that are attributes as well; the file says what each means."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


FACTORS: Factors = json.loads(json.dumps(table("factors")), object_hook=Factors)
