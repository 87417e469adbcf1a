"""Arrays of other people: what is damaged, a bomb, a pickle, or no text is one InputError."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from traces import arrays
from traces.errors import InputError


def npy(array: np.ndarray, **how: bool) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **how)
    return out.getvalue()


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as held:
        for name, content in members.items():
            held.writestr(f"{name}.npy", content)
    return path


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    one, text = np.arange(6, dtype=">i4").reshape(2, 3), np.array("é\U0001f171")
    np.savez_compressed(tmp_path / "x.npz", one=one, text=text)
    held = arrays.read_npz(tmp_path / "x.npz")
    assert np.array_equal(held["one"], one)
    assert arrays.text(held["text"]) == "é\U0001f171"
    assert np.array_equal(arrays.read_npy(npy(one)), one)


def test_what_is_no_array_is_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as held:
        held.writestr("notes.txt", "x")
    assert arrays.read_npz(tmp_path / "x.npz") == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (3,\0".ljust(128),
        npy(np.arange(3))[:-1],
        npy(np.array([{}], dtype=object), allow_pickle=True),
        npy(np.arange(3)).replace(b"(3,)", b"(" + b"9" * 17 + b",)"),
    ],
)
def test_a_damaged_array_or_a_pickle_is_one_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no \.npy, or damaged"):
        arrays.read_npy(content)
    with pytest.raises(InputError, match=r"is no \.npz, or damaged"):
        arrays.read_npz(archive(tmp_path / "x.npz", x=content))


def test_an_array_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", x=npy(np.arange(3)))
    with zipfile.ZipFile(path, "a") as held, pytest.warns(UserWarning, match="Duplicate name"):
        held.writestr("x.npy", npy(np.arange(4)))
    with pytest.raises(InputError, match="the array 'x' is there twice"):
        arrays.read_npz(path)


def test_a_bomb_is_refused_by_what_it_says_that_it_unpacks_to(tmp_path: Path) -> None:
    path = archive(tmp_path / "x.npz", x=npy(np.zeros(1000)))
    size = len(npy(np.zeros(1000)))
    content = path.read_bytes()
    assert content.count(size.to_bytes(4, "little")) == 2
    path.write_bytes(content.replace(size.to_bytes(4, "little"), (3 << 30).to_bytes(4, "little")))
    with pytest.raises(InputError, match="unpacks to 3221225472 bytes, far more than it has"):
        arrays.read_npz(path)


@pytest.mark.parametrize(
    "array", [np.arange(3), np.array(b"x"), np.array(["x"]), np.array([0x110000], np.uint32).view("<U1").reshape(())]
)
def test_what_is_no_text_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InputError, match=r"in place of a text|no character"):
        arrays.text(array)
