"""Values on the border between messages and pipelines: as they were, and sharing nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from reelwire import tensors
from reelwire.messages import Artifact
from reelwire.segment_files import folder_of_user
from reelwire.segments import MemoryLostError, Piece, Pool, Reader
from reelwire.tensors import Inline, Shared, TensorRef, inline_buffer
from reelwire.workers.values import from_artifact, to_artifact, to_plain

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


# --- through shared memory -------------------------------------------------------------------------------------------


class Memory:
    """A pool and a reader in one process, and what was taken."""

    def __init__(self, nbytes_max: int = 4 << 20) -> None:
        self.pool = Pool(nbytes_max)
        self.reader = Reader()
        self.pieces: list[Piece] = []

    def take(self, nbytes: int) -> Piece | None:
        """Room, as a stage's thread asks for it."""
        piece = self.pool.take(nbytes)
        self.pieces += [piece] if piece is not None else []
        return piece

    def close(self) -> None:
        """Everything comes back, and nothing is left."""
        for piece in self.pieces:
            self.pool.give_back(piece.use)
        assert self.pool.outstanding == 0
        self.reader.close()
        self.pool.close()
        assert not (folder_of_user() / self.pool.owner).exists()


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Shared memory of which nothing is left in the end."""
    made = Memory()
    yield made
    made.close()


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_large_numpy_arrays_are_written_once_and_come_back_as_they_were(memory: Memory, dtype: str) -> None:
    """The reader's array is its own, aligned and read-only; the bytes are those that travel inside of messages."""
    value = (np.arange(70_000) % 2).reshape(100, 700).astype(dtype)
    sent = to_artifact({"a": value, "n": 3}, memory.take)
    assert isinstance(sent.tensors["a"].place, Shared)
    assert [piece.view.nbytes for piece in memory.pieces] == [value.nbytes]
    back = from_artifact(sent, "numpy", memory.reader.view)
    assert back["n"] == 3
    assert back["a"].dtype == value.dtype
    assert np.array_equal(back["a"], value)
    assert not back["a"].flags.writeable
    assert back["a"].flags.aligned
    memory.pieces[0].view[:] = bytes(value.nbytes)
    assert np.array_equal(back["a"], value), "the producer may write again when the task is over"
    inline = to_artifact({"a": value}).tensors["a"]
    assert inline_buffer(inline) == value.tobytes()


def test_numpy_views_are_written_as_what_they_show(memory: Memory) -> None:
    """Strided, reversed, transposed and repeated arrays, and those of the other byte order."""
    base = np.arange(40_000, dtype=np.int32).reshape(200, 200)
    for view in (base[:, ::2], base[::-1], base.T, np.broadcast_to(base[0], (300, 200)), base.astype(">i4")):
        sent = to_artifact({"a": view}, memory.take)
        assert isinstance(sent.tensors["a"].place, Shared)
        assert np.array_equal(from_artifact(sent, "numpy", memory.reader.view)["a"], view)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", list(tensors.ITEM_BYTES))
def test_large_torch_tensors_are_written_once_and_come_back_as_they_were(memory: Memory, dtype: str) -> None:
    """bfloat16 and strided ones too; what arrives is aligned, can be written to, and shares nothing with the memory."""
    import torch

    value = (torch.arange(140_000) % 2).reshape(200, 700).to(getattr(torch, dtype))[:, ::2]
    sent = to_artifact({"a": value}, memory.take)
    assert isinstance(sent.tensors["a"].place, Shared)
    back = from_artifact(sent, "torch", memory.reader.view)["a"]
    assert back.dtype == value.dtype
    assert torch.equal(back, value)
    assert back.data_ptr() % 64 == 0
    back.zero_()
    assert torch.equal(from_artifact(sent, "torch", memory.reader.view)["a"], value)


@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a GPU")
def test_tensors_of_a_device_are_there_when_their_reference_is(memory: Memory) -> None:
    """The copy waits for what computes them, on the stream that is current."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        value = torch.ones(2048, 2048, device="cuda")
        for _ in range(20):
            value = value @ value / 2048
        sent = to_artifact({"a": value[:512, :512]}, memory.take)
        back = from_artifact(sent, "torch", memory.reader.view)["a"]
    assert torch.equal(back, torch.ones(512, 512))


def test_small_tensors_travel_with_their_message(memory: Memory) -> None:
    """From 64 KiB on shared memory is worth its while."""
    sent = to_artifact({"below": np.zeros(65_535, np.uint8), "from": np.zeros(65_536, np.uint8)}, memory.take)
    assert [type(sent.tensors[name].place) for name in ("below", "from")] == [Inline, Shared]


def test_what_has_no_room_travels_with_its_message() -> None:
    """The pool is full: same bytes, another way."""
    memory = Memory(nbytes_max=200_000)
    values = {name: np.full(100_000, number, np.uint8) for number, name in enumerate("abc")}
    sent = to_artifact(values, memory.take)
    places = [type(ref.place) for ref in sent.tensors.values()]
    assert places == [Shared, Inline, Inline]
    back = from_artifact(sent, "numpy", memory.reader.view)
    assert all(np.array_equal(back[name], value) for name, value in values.items())
    memory.close()


def test_a_value_that_can_not_be_sent_takes_no_memory(memory: Memory) -> None:
    """The dtype is looked at first."""
    import torch

    for value in (np.zeros(10_000, np.complex128), torch.zeros(10_000, dtype=torch.complex128)):
        with pytest.raises(ValueError, match="complex128"):
            to_artifact({"a": value}, memory.take)
    assert memory.pieces == []


def test_memory_that_is_gone_is_an_error_of_its_own(memory: Memory) -> None:
    """Its producer has died, and somebody cleaned up after it."""
    sent = to_artifact({"a": np.zeros(100_000, np.uint8)}, memory.take)
    memory.pool.abandon()
    for library in ("numpy", "torch"):
        with pytest.raises(MemoryLostError, match="s1"):
            from_artifact(sent, library, memory.reader.view)
