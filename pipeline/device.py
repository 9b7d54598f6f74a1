"""Where a stage computes, and what a float32 is there.

The stream belongs to whoever calls the stage: a worker runs each stage with a CUDA stream of its own as the current one,
so that stages overlap; without a worker it is the default stream. Nothing here makes a second one.

On a GPU, PyTorch may round the inputs of float32 products to TF32 (10 bits of mantissa), by default in convolutions, and
may pick another algorithm when a shape comes back. Both would make a session's bytes depend on more than its request,
and a float32 VAE less exact than the same one on a CPU, so `exact_arithmetic` turns both off.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
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


def exact_arithmetic() -> None:
    """Have float32 computed as float32 on GPUs, and the same algorithm chosen each time. Holds for the whole process."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def arithmetic(device: torch.device, *packages: str) -> dict[str, Any]:
    """What decides, beside code and inputs, which bits a computation gives: kind of device, versions, torch's choices.

    Args:
        device: where it is computed.
        packages: distributions besides torch that take part; None stands for the version of one that doesn't say.
    """
    decides: dict[str, Any] = {name: _version(name) for name in packages}
    decides["torch"] = torch.__version__
    if device.type != "cuda":
        return {**decides, "machine": platform.machine(), "cpu": torch.backends.cpu.get_cpu_capability()}
    kind: Any = torch.cuda.get_device_properties(device)
    choices: Any = torch.backends.cuda  # some functions of both carry no types
    cudnn: Any = torch.backends.cudnn
    return {
        **decides,
        "device": [kind.name, kind.major, kind.minor, kind.multi_processor_count],
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "attention": [
            choices.flash_sdp_enabled(),
            choices.mem_efficient_sdp_enabled(),
            choices.math_sdp_enabled(),
            choices.cudnn_sdp_enabled(),
        ],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Lane:
    """The device of one stage; on a GPU its work goes through the stream that is current.

    Args:
        device: see `check_device`.
    """

    def __init__(self, device: str) -> None:
        """Check the device; on a GPU, `exact_arithmetic` holds from here on."""
        self.device = check_device(device)
        if self.device.type == "cuda":
            exact_arithmetic()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Compute here, without gradients. On leaving, however that happens, everything that was started is done."""
        with torch.inference_mode():
            if self.device.type != "cuda":
                yield
                return
            with torch.cuda.device(self.device):
                stream = torch.cuda.current_stream(self.device)
                try:
                    yield
                except BaseException:
                    with contextlib.suppress(RuntimeError):  # of a device that is broken; the first error says why
                        stream.synchronize()
                    raise
                stream.synchronize()

    def take(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on this lane's device."""
        return tensor.to(self.device, dtype)

    def give(self, tensor: Tensor) -> Tensor:
        """A tensor on the CPU, contiguous and complete: the copy has ended when this returns."""
        return tensor.to("cpu").contiguous()
