"""Where a stage computes: its stream is waited for however a block ends, and a float32 is a float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from reelwire.pipeline import device
from reelwire.pipeline.device import Lane, exact_arithmetic


class Stream:
    """Counts how often it was waited for; may be broken."""

    def __init__(self) -> None:
        self.waits = 0
        self.broken = False

    def synchronize(self) -> None:
        """Wait."""
        self.waits += 1
        if self.broken:
            raise RuntimeError("the device is broken")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The current stream of a GPU that isn't there."""
    current = Stream()
    monkeypatch.setattr(device, "check_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    return current


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[None]:
    """The process's choices are as they were."""
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    choices = [(cuda, "allow_tf32"), (cudnn, "allow_tf32"), (cudnn, "benchmark"), (cudnn, "deterministic")]
    before = [getattr(place, name) for place, name in choices]
    yield
    for (place, name), value in zip(choices, before, strict=True):
        setattr(place, name, value)


def test_what_was_started_is_done_when_the_block_ends(stream: Stream) -> None:
    """On the stream of whoever calls the stage."""
    with Lane("cuda:0").work():
        assert torch.is_inference_mode_enabled()
        assert stream.waits == 0
    assert stream.waits == 1


@pytest.mark.parametrize("broken", [False, True])
def test_a_block_that_raises_is_waited_for_and_keeps_its_error(stream: Stream, *, broken: bool) -> None:
    """Even on a device that can't be waited for any more; nothing of the block's state stays behind."""
    stream.broken = broken
    with pytest.raises(ValueError, match="the block's own"), Lane("cuda:0").work():
        raise ValueError("the block's own")
    assert stream.waits == 1
    assert not torch.is_inference_mode_enabled()


def test_a_gpu_computes_float32_as_float32(stream: Stream) -> None:
    """TF32 and the choice of algorithms by measurement are off as soon as a stage has a GPU."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    Lane("cpu")
    assert torch.backends.cudnn.allow_tf32
    Lane("cuda:0")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.deterministic
    exact_arithmetic()
