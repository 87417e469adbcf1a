"""Arrays of other people: what numpy writes is read, and what is damaged or a pickle is one InputError."""

import io
from pathlib import Path

import numpy as np
import pytest

from traces import InputError, arrays


def npy(array: np.ndarray, **options: bool) -> bytes:
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


def test_what_numpy_writes_is_read(tmp_path: Path) -> None:
    one, text = np.arange(6, dtype=">i4").reshape(2, 3), np.array("é\U0001f171")
    np.savez_compressed(tmp_path / "x.npz", one=one, text=text)
    held = arrays.read_npz(tmp_path / "x.npz")
    assert np.array_equal(held["one"], one)
    assert str(held["text"]) == "é\U0001f171"
    assert np.array_equal(arrays.read_npy(io.BytesIO(npy(one))), one)


@pytest.mark.parametrize("content", [b"", npy(np.arange(3))[:-1], npy(np.array([{}], object), allow_pickle=True)])
def test_a_damaged_array_or_a_pickle_is_one_error(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        arrays.read_npy(io.BytesIO(content))
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(InputError):
        arrays.read_npz(tmp_path / "x.npz")
