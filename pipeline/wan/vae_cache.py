"""What one stream through a half of the video VAE remembers, and whether a step changed any of it."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor, nn

Slot = Tensor | str | None
"""What one causal convolution remembers; the library also keeps a word there, for a first frame that is doubled."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FeatureCache:
    """What one stream's causal convolutions remember: for each the last two frames of its input.

    Attributes:
        started: the first piece went through.
        ended: the last piece went through; nothing may follow.
        still: the newest step that was watched changed no bit of what is remembered. Then the same input, repeated,
            gives the same output for ever: a step is a function of its input and of the cache alone.
    """

    def __init__(self, slots: int) -> None:
        """Start with nothing remembered, for `slots` convolutions."""
        self._slots = _Slots([None] * slots)
        self.started = False
        self.ended = False
        self.still = False

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        return sum(slot.nbytes for slot in self._slots if isinstance(slot, Tensor))

    def enter(self, *, is_first: bool) -> None:
        """Check that a piece may come now.

        Raises:
            RuntimeError: a first piece comes again, a later one comes before the first, or one after the last.
        """
        if self.ended:
            raise RuntimeError("the last piece of this stream is through; nothing can follow it")
        if is_first and self.started:
            raise RuntimeError("this stream has had its first piece; a new clip needs a new cache")
        if not is_first and not self.started:
            raise RuntimeError("a later piece comes before the first one of its stream")

    def step(self, network: nn.Module, x: Tensor, *, watch: bool = False, **flags: bool) -> Tensor:
        """Send one latent frame's worth through a half of the VAE, and remember what its convolutions need next.

        Args:
            network: the half.
            x: its input.
            watch: find out whether what is remembered stays as it is, for `still`.
            flags: passed on to the network.
        """
        self._slots.same = watch
        result: Tensor = network(x, feat_cache=self._slots, feat_idx=[0], **flags)
        if watch:
            self.still = self._slots.same
        return result


class _Slots(list[Slot]):
    """Slots that are compared one by one as they are replaced, so that no two copies of all of them are ever held.

    After the first difference nothing is compared any more. The slots of the first convolutions settle first, so most
    steps that aren't still are found out early.

    Attributes:
        same: no slot was given other bits since this was set; as long as it is False, nothing is compared.
    """

    same = False

    def __setitem__(self, index: SupportsIndex, slot: Slot) -> None:  # type: ignore[override]  # no slices here
        self.same = self.same and _same_slot(self[index], slot)
        super().__setitem__(index, slot)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree bit for bit: 0.0 is not -0.0 here, and a NaN is itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_integers = _INTEGERS[a.dtype.itemsize]
    return bool(torch.equal(a.view(as_integers), b.view(as_integers)))


def _same_slot(a: Slot, b: Slot) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and same_bits(a, b)
    return a == b
