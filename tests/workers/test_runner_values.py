"""Values on the border between messages and pipelines: as they were, and sharing nothing."""

from __future__ import annotations

import numpy as np
import pytest

from reelwire import tensors
from reelwire.messages import Artifact
from reelwire.tensors import Inline, TensorRef, inline_buffer
from reelwire.workers.runner import from_artifact, to_artifact, to_plain

NUMPY_DTYPES = [name for name in tensors.ITEM_BYTES if name != "bfloat16"]


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (1, 2, 3, 4)])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_numpy_values_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    """Through an artifact, the wire and back; what arrives can't be written to."""
    value = (np.arange(int(np.prod(shape))) % 2).reshape(shape).astype(dtype)
    sent = to_artifact({"a": value, "n": 3, "t": "text", "none": None, "b": b"\0", "l": [1, {"x": 2.5}]})
    back = from_artifact(sent, "numpy")
    assert back["a"].dtype == value.dtype
    assert np.array_equal(back["a"], value)
    assert back["a"].shape == shape
    assert not back["a"].flags.writeable
    assert {name: back[name] for name in ("n", "t", "none", "b", "l")} == {
        "n": 3,
        "t": "text",
        "none": None,
        "b": b"\0",
        "l": [1, {"x": 2.5}],
    }


def test_numpy_views_are_sent_as_what_they_show() -> None:
    """Strided, reversed and transposed arrays, without a reference to the original."""
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for view in (base[:, ::2], base[::-1], base.T, base[1]):
        expected = view.copy()
        sent = to_artifact({"a": view})
        base += 1
        assert np.array_equal(from_artifact(sent, "numpy")["a"], expected)
        base -= 1


def test_an_unaligned_buffer_is_taken() -> None:
    """A frame of the wire begins wherever it likes."""
    raw = np.arange(33, dtype=np.uint8).tobytes()
    ref = TensorRef("float64", (4,), Inline(memoryview(raw)[1:]))
    value = from_artifact(Artifact({}, {"a": ref}), "numpy")["a"]
    assert value.flags.aligned
    assert value.tobytes() == raw[1:]
    assert from_artifact(Artifact({}, {"a": ref}), "torch")["a"].numpy().tobytes() == raw[1:]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
@pytest.mark.parametrize("dtype", list(tensors.ITEM_BYTES))
def test_torch_values_come_back_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    """bfloat16 too; what arrives is aligned, can be written to, and shares nothing with the message."""
    import torch

    value = (torch.arange(int(np.prod(shape))) % 2).reshape(shape).to(getattr(torch, dtype))
    sent = to_artifact({"a": value})
    assert sent.tensors["a"].dtype == dtype
    kept = bytes(inline_buffer(sent.tensors["a"]))
    read_only = Artifact({}, {"a": TensorRef(dtype, shape, Inline(kept))})
    back = from_artifact(read_only, "torch")["a"]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)
    assert back.data_ptr() % 64 == 0
    back.zero_()
    assert bytes(inline_buffer(read_only.tensors["a"])) == kept


def test_torch_tensors_of_every_kind_are_sent() -> None:
    """Strided views, parameters and tensors of inference mode; a reused buffer changes nothing that was sent."""
    import torch

    base = torch.arange(24).reshape(4, 6)
    sent = to_artifact({"a": base[:, ::2], "b": base.T})
    expected = base[:, ::2].tolist(), base.T.tolist()
    base.zero_()
    back = from_artifact(sent, "torch")
    assert (back["a"].tolist(), back["b"].tolist()) == expected
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with torch.inference_mode():
        inner = torch.ones(3) * 2
    back = from_artifact(to_artifact({"p": parameter, "i": inner}), "torch")
    assert (back["p"].tolist(), back["i"].tolist()) == ([1.0, 1.0], [2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="complex64"):
        to_artifact({"c": torch.zeros(2, dtype=torch.complex64)})


def test_scalars_and_small_arrays_become_plain() -> None:
    """Facts may hold what the libraries compute."""
    import torch

    assert to_plain(np.float32(0.5)) == 0.5
    assert to_plain(np.bool_(True)) is True
    assert to_plain(torch.tensor(3)) == 3
    assert to_plain({"m": np.eye(2), "t": (1, torch.ones(2))}) == {"m": [[1, 0], [0, 1]], "t": [1, [1, 1]]}
    with pytest.raises(ValueError, match="set is no plain value"):
        to_plain({1, 2})
