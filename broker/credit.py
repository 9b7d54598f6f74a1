"""How far the client lets its session go: absolute grants in chunks and in bytes, of which the larger always holds."""

from __future__ import annotations

from reelwire.messages import Credit


class Window:
    """What may be sent to the client, and what was.

    A grant that is lost, repeated or overtaken does no harm: it stands in the index space of what it limits.

    Args:
        first: what is granted from the start.

    Attributes:
        chunks: chunks below it may be sent.
        nbytes: bytes of tensors that may be sent, all chunks together; one chunk may go over it.
        sent_nbytes: bytes of tensors that were sent.
    """

    __slots__ = ("chunks", "nbytes", "sent_nbytes")

    def __init__(self, first: Credit) -> None:
        """Nothing was sent."""
        self.chunks = first.chunks
        self.nbytes = first.nbytes
        self.sent_nbytes = 0

    def grant(self, credit: Credit) -> bool:
        """Take a grant in; whether it lets anything more be sent than those before it."""
        grows = credit.chunks > self.chunks or credit.nbytes > self.nbytes
        if grows:
            self.chunks = max(self.chunks, credit.chunks)
            self.nbytes = max(self.nbytes, credit.nbytes)
        return grows

    def allows(self, index: int) -> bool:
        """Whether chunk `index` may be sent next."""
        return index < self.chunks and self.sent_nbytes < self.nbytes

    def send(self, nbytes: int) -> None:
        """A chunk of so many bytes is sent."""
        self.sent_nbytes += nbytes
