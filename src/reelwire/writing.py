"""What goes into a file goes into it whole, whichever process writes it."""

from __future__ import annotations

import os


def write_whole(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it; a write may take less than it is given.

    Args:
        descriptor: of the file; where it stands, or its end where it was opened to append.
        data: bytes; a view is contiguous.

    Raises:
        OSError: there is no room, or the disk fails; part of it may have been written.
    """
    left = memoryview(data).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]
