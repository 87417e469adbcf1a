"""The shape of a model by its name, from the model profiles that ship with the simulator.

Profiles are read as data: the tracer does not import `sim`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from traces.errors import InputError, unknown
from traces.files import expanded, read_toml
from traces.importers.source import Size, convert

PROFILES = Path(__file__).parents[1] / "sim" / "profiles" / "models"


class Shape(NamedTuple):
    """L MoE layers of E experts, of which a token chooses k."""

    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Profile:
    """What is read of a model profile."""

    moe_layers: Size
    experts: Size
    top_k: Size
    encoder_moe_layers: int = 0
    hub_ids: tuple[str, ...] = ()


def shape_of(model: str) -> tuple[str, Shape]:
    """Return hub id or name, and shape, of a shipped model profile or of a TOML file. Raise InputError."""
    path = PROFILES / f"{model}.toml"
    if not path.is_file():
        path = expanded(model)
        if path.suffix != ".toml" or not path.is_file():
            raise unknown("model profile", model, [each.stem for each in PROFILES.glob("*.toml")])
    held = convert(read_toml(path), Profile, str(path))
    if held.encoder_moe_layers:
        raise InputError(f"{path} is of an encoder-decoder, of which no synthetic trace can be made")
    return (*held.hub_ids, path.stem)[0], Shape(held.moe_layers, held.experts, held.top_k)
