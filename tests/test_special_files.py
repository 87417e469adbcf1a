"""No reader of files of other people opens a FIFO, which waits for its writer, or a device, which may never end."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from policies.eamc.file import SavedEamc
from policies.prefetch.stride import Predictor
from replay.comparison.record import Record
from sim.backtest import file as backtest
from sim.profiles.expert_sizes import expert_bytes_by_layer
from sim.profiles.hardware_profile import hardware
from sim.profiles.model_profile import model
from sim.sweeps import config, winner
from sim.sweeps.grid import _digest
from tracer.models import Loading, load_model
from tracer.torch_dumps import load
from traces.errors import InputError
from traces.files import expanded, plain, read_toml
from traces.importers import Options, import_dump

READERS: dict[str, Callable[[Path], Any]] = {
    "plain": plain,
    "any.toml": read_toml,
    "hardware.toml": lambda path: hardware(str(path)),
    "model.toml": lambda path: model(str(path)),
    "sweep.toml": config.read,
    "winner.toml": lambda path: winner.read(path.parent),
    "rows.toml": backtest.read,
    "eamc.npz": SavedEamc.read,
    "stride.npz": Predictor.load,
    "compare.json": lambda path: Record.open(path, resume=True),
    "dump.npz": lambda path: import_dump(path, options=Options(experts=4)),
    "dump.npy": lambda path: import_dump(path, options=Options(experts=4)),
    "dump.json": lambda path: import_dump(path),
    "dump.jsonl": lambda path: import_dump(path),
    "dump.csv": lambda path: import_dump(path, options=Options(top_k=2)),
    "dump.pt": lambda path: import_dump(path, load_pt=load),
    "of-torch.pt": load,
}


@pytest.mark.parametrize("name", READERS)
def test_a_special_file_is_refused_before_it_is_opened(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    for kind in ("FIFO", "device"):
        if kind == "device":
            path.unlink()
            path.symlink_to("/dev/zero")
        with pytest.raises(InputError, match=f"{name} is a {kind}, not a file that can be read"):
            READERS[name](path)


def test_a_fifo_in_the_folder_of_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match=r"tokenizer\.json is a FIFO"):
        load_model(str(tmp_path), Loading())


def test_what_a_cell_depends_on_is_read_of_files_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert _digest(str(tmp_path / "fifo")) is None


def test_lists_that_hold_one_another_are_refused_before_they_are_written_out(tmp_path: Path) -> None:
    laughs: list[Any] = ["ha"]
    for _ in range(30):
        laughs = [laughs, laughs]
    torch.save({"records": laughs}, tmp_path / "laughs.pt")
    with pytest.raises(InputError, match="its lists and tensors repeat what they hold so often"):
        load(tmp_path / "laughs.pt")


@pytest.mark.parametrize("number", [1, 10**12])
def test_a_tensor_larger_than_its_file_is_refused(tmp_path: Path, number: int) -> None:
    """A stride of 0 lets one stored value stand for any number of them; many records may name one tensor."""
    held = torch.ones(1, 1000, dtype=torch.int32).expand(number, 1000)
    torch.save({"records": [{"topk_ids_of_layer": held}] * (10**6 // number + 1)}, tmp_path / "d.pt")
    with pytest.raises(InputError, match="its lists and tensors repeat what they hold so often"):
        load(tmp_path / "d.pt")


def test_a_list_that_stands_in_two_places_is_read(tmp_path: Path) -> None:
    shared = [1, 2, 3]
    torch.save({"a": shared, "b": (shared, torch.arange(3))}, tmp_path / "x.pt")
    content = load(tmp_path / "x.pt")
    assert content["a"] == content["b"][0] == shared
    assert content["b"][1].tolist() == [0, 1, 2]


def test_toml_is_read_behind_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[a]\nb = 1\n", "utf-8-sig")
    assert read_toml(tmp_path / "x.toml") == {"a": {"b": 1}}


def test_a_home_that_nobody_has_is_a_path_where_nothing_is() -> None:
    assert expanded("~nobody-of-that-name/x.toml") == Path("~nobody-of-that-name/x.toml")
    assert expanded("~/x") == Path.home() / "x"
    for read in (hardware, expert_bytes_by_layer):
        with pytest.raises(InputError, match="~nobody-of-that-name"):
            read("~nobody-of-that-name/x.toml")


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 5000, "a\0b"])
def test_a_name_that_no_file_can_have_is_one_line(name: str) -> None:
    for read in (hardware, model):
        with pytest.raises(InputError, match=r"unknown (hardware|model) profile"):
            read(name)
