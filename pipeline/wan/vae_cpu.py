"""The VAE's two slow operations on a CPU, done faster while the channels are few.

For 3-D convolutions ATen leaves oneDNN aside when channels * frames * rows is small, and its own fallback is 5 to 10
times slower; the norm over the channel dimension of a contiguous tensor walks memory the long way round. At the
checkpoint's width neither matters; for small models they are most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

_onednn: Any = torch.backends.mkldnn  # its functions carry no types


class NarrowOnCpu(TorchFunctionMode):
    """Within this context, float32 CPU calls of `conv3d` and `normalize` take the fast way; all others are as ever."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace the two operations, pass everything else on."""
        kwargs = kwargs or {}
        if func is F.conv3d and _plain(args[0]) and not kwargs and len(args) == 7 and _onednn.is_available():
            x, weight, bias, stride, padding, dilation, groups = args
            return torch.ops.aten.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
        if func is F.normalize and _plain(args[0]) and len(args) == 1 and set(kwargs) == {"dim"}:
            x = args[0]
            return x / x.square().sum(kwargs["dim"], keepdim=True).sqrt().clamp_min(1e-12)
        return func(*args, **kwargs)


def _plain(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32
