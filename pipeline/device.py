"""Where a stage computes: one device, and on a GPU one stream of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from reelwire.spec import RequestError


def check_device(name: str) -> torch.device:
    """The device of that name, ``"cpu"`` or ``"cuda:N"``.

    Raises:
        RequestError: it is another kind of name, or this machine has no such device; the message says which there are.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ", ".join(["cpu", *(f"cuda:{index}" for index in range(count))])
    match = re.fullmatch(r"cpu|cuda:(0|[1-9]\d{0,3})", name)
    if match is None or (match[1] is not None and int(match[1]) >= count):
        raise RequestError("device", f"there is no {name!r} here; devices of this machine: {there}")
    return torch.device(name)


class Lane:
    """The device of one stage, and the CUDA stream that all its work goes through, so that stages overlap.

    Args:
        device: see `check_device`.
    """

    def __init__(self, device: str) -> None:
        """Make the stream, if the device has such a thing."""
        self.device = check_device(device)
        cuda: Any = torch.cuda  # the constructor carries no types
        self._stream = cuda.Stream(self.device) if self.device.type == "cuda" else None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Compute here, without gradients. On leaving, everything that was started is done."""
        with torch.inference_mode():
            if self._stream is None:
                yield
                return
            with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                yield
                self._stream.synchronize()

    def take(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on this lane's device."""
        return tensor.to(self.device, dtype)

    def give(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU, contiguous and complete."""
        return tensor.to("cpu").contiguous()
