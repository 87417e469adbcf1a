"""The shape of a model by its name, from the model profiles that ship with the simulator.

Profiles are read as data: the tracer does not import `sim`.
"""

from pathlib import Path
from typing import NamedTuple

from traces.errors import InputError, located, unknown
from traces.facts import text, whole
from traces.files import expanded, read_toml

PROFILES = Path(__file__).parents[1] / "sim" / "profiles" / "models"


class Shape(NamedTuple):
    """L MoE layers of E experts, of which a token chooses k."""

    layers: int
    experts: int
    top_k: int


def shape_of(model: str) -> tuple[str, Shape]:
    """Return the hub id, or else the name, and the shape of a model: of a shipped profile, or of a TOML file's path.

    Raises InputError for an unknown model, a file that is no model profile, and an encoder-decoder.
    """
    path = PROFILES / f"{model}.toml"
    if not path.is_file():
        path = expanded(model)
        if path.suffix != ".toml" or not path.is_file():
            raise unknown("model profile", model, [each.stem for each in PROFILES.glob("*.toml")])
    held = read_toml(path)
    with located(str(path)):
        shape = Shape(*(whole(key, held.get(key)) for key in ("moe_layers", "experts", "top_k")))
        if held.get("encoder_moe_layers"):
            raise InputError("is of an encoder-decoder, of which no synthetic trace can be made")
        hub_ids = held.get("hub_ids")
        return text("hub_ids", hub_ids[0]) if isinstance(hub_ids, list) and hub_ids else path.stem, shape
