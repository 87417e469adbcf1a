"""Files of other people are read as they are."""

from pathlib import Path

import pytest

from tracer.commands.convert import load
from traces.files import expanded, read_toml


def test_toml_is_read_behind_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("[a]\nb = 1\n", "utf-8-sig")
    assert read_toml(tmp_path / "x.toml") == {"a": {"b": 1}}


def test_a_home_is_expanded() -> None:
    assert expanded("~/x") == Path.home() / "x"


def test_a_torch_file_becomes_lists_and_arrays(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    shared = [1, 2, 3]
    torch.save({"a": shared, "b": (shared, torch.arange(3))}, tmp_path / "x.pt")
    content = load(tmp_path / "x.pt")
    assert content["a"] == content["b"][0] == shared
    assert content["b"][1].tolist() == [0, 1, 2]
