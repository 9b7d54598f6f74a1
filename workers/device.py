"""What a thread computes on: a stream of its own on a GPU, or the CPU. Torch is imported by those that compute with it."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

from reelwire.errors import RequestError

if TYPE_CHECKING:
    import torch


class Device:
    """The device of one stage, or of the jobs of a process.

    Args:
        name: ``cpu`` or ``cuda:N``.
        threads: torch threads inside one operation.

    Attributes:
        name: of the device.
    """

    def __init__(self, name: str, threads: int) -> None:
        """Nothing is imported yet."""
        self.name = name
        self._threads = threads
        self._stream: torch.cuda.Stream | None = None

    def open(self) -> None:
        """Make ready for torch; called on the thread that computes, before anything is built.

        Raises:
            RequestError: there is no such device.
        """
        import torch

        torch.set_num_threads(self._threads)
        if self.name != "cpu":
            _check_gpu(self.name, torch.cuda.device_count() if torch.cuda.is_available() else 0)
            torch.cuda.set_device(self.name)
            self._stream = torch.cuda.Stream(self.name)  # type: ignore[no-untyped-call]

    def current(self) -> contextlib.AbstractContextManager[object]:
        """Inside of it the stream is the current one."""
        if self._stream is None:
            return contextlib.nullcontext()
        import torch

        return torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        """Wait for what was computed on the stream."""
        if self._stream is not None:
            self._stream.synchronize()

    def give_memory_back(self) -> None:
        """Let others have what the allocator kept; objects that only hold each other are dropped first.

        Called when the device is full, or when something large was let go of.
        """
        gc.collect()
        if "torch" in sys.modules:
            import torch

            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there is no memory left, on a device or on the host."""
    # By the name of its type, as for tensors: a pipeline without torch doesn't pay for an import.
    return isinstance(error, MemoryError) or any(
        f"{kind.__module__}.{kind.__qualname__}" == "torch.OutOfMemoryError" for kind in type(error).__mro__
    )


def _check_gpu(device: str, count: int) -> None:
    if int(device.removeprefix("cuda:")) >= count:
        there = {0: "", 1: " or cuda:0"}.get(count, f" or cuda:0 to cuda:{count - 1}")
        raise RequestError("device", f"{device!r} isn't there; accepted: cpu{there}")
