"""The state of a job in a file: what was written is read again, bit for bit, and nothing else is."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reelwire import tensors
from reelwire.messages import FileOffer
from reelwire.workers.checkpoints import read_values, snapshot_of, write_snapshot

NUMPY_DTYPES = [name for name in tensors.ITEM_BYTES if name != "bfloat16"]
PLAIN = {"step": 3, "name": "é", "nested": {"list": [1, 2.5, None, True, b"\0"]}, "empty": {}}


def write_values(folder: Path, values: dict[str, Any]) -> FileOffer:
    return write_snapshot(folder, snapshot_of(values))


def test_groups_12_numpy_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    """Of every dtype and shape, empty ones and those without dimensions too, beside plain values."""
    bits = np.random.default_rng(1).integers(0, 256, 64, np.uint8)
    arrays: dict[str, Any] = {
        name: (bits & 1 if name == "bool" else bits).view("uint8" if name == "bool" else name).astype(name)
        for name in NUMPY_DTYPES
    }
    arrays |= {"scalar": np.array(2.5, np.float32), "empty": np.empty((0, 4), np.int64), "turned": np.eye(3)[:, ::2]}
    offer = write_values(tmp_path, {**{f"array_{name}": array for name, array in arrays.items()}, **PLAIN})
    read = read_values(offer.path, "numpy")
    assert {name: read[name] for name in PLAIN} == PLAIN
    for name, array in arrays.items():
        found = read[f"array_{name}"]
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def test_groups_12_torch_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    """bfloat16 and its NaNs, no dimensions, none of a size, and one that isn't contiguous."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16)
    given = {
        "bf16": bits.view(torch.bfloat16).reshape(4, -1),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
    }
    read = read_values(write_values(tmp_path, given).path, "torch")
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype, name
        assert read[name].shape == tensor.shape, name
        as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (read[name], tensor)]
        assert torch.equal(*as_bytes), name


def test_a_checkpoint_is_named_by_its_hash(tmp_path: Path) -> None:
    """Equal values give one file, and nothing else is left in the folder."""
    first = write_values(tmp_path, {"x": np.arange(4), "n": 1})
    again = write_values(tmp_path, {"x": np.arange(4), "n": 1})
    data = Path(first.path).read_bytes()
    assert first == again
    assert first.file == hashlib.sha256(data).hexdigest() == Path(first.path).name
    assert first.nbytes == len(data)
    assert os.listdir(tmp_path) == [first.file]  # noqa: PTH208


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_groups_12_a_checkpoint_is_what_the_values_were_when_it_was_taken(tmp_path: Path, library: str) -> None:
    """Whatever the job does to its arrays before they are written; large ones and small ones."""
    for size in (3, 100_000):
        array: Any = np.arange(size, dtype=np.float32) if library == "numpy" else torch.arange(float(size))
        snapshot = snapshot_of({"x": array, "half": array[: size // 2]})
        array[:] = -1
        read = read_values(write_snapshot(tmp_path, snapshot).path, "numpy")
        assert np.array_equal(read["x"], np.arange(size))
        assert np.array_equal(read["half"], np.arange(size // 2))


def test_a_full_disk_leaves_no_part_of_a_checkpoint(tmp_path: Path, full_disk: None) -> None:
    """The folder is as it was before."""
    with pytest.raises(OSError, match="File too large"):
        write_values(tmp_path, {"x": np.zeros(1 << 16)})
    assert not list(tmp_path.iterdir())


def test_what_has_no_place_in_a_file_is_refused(tmp_path: Path) -> None:
    """With the types that have, and no file is begun."""
    with pytest.raises(ValueError, match="plain value"):
        write_values(tmp_path, {"what": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 7, 12, 20, 60, -1])
def test_a_file_that_was_cut_or_changed_is_no_checkpoint(tmp_path: Path, cut: int) -> None:
    """It is refused with a sentence, wherever it ends, whatever stands in it."""
    data = Path(write_values(tmp_path, {"x": np.arange(100), "n": 1}).path).read_bytes()
    broken = tmp_path / "broken"
    for content in (data[:cut], data[:cut] + b"\xc1" + data[cut:], b"PK" + data, os.urandom(len(data))):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match=r"values of ours|cut short|can't be read"):
            read_values(broken, "numpy")
