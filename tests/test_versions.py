"""Which versions may speak to each other."""

from __future__ import annotations

import pytest

from reelwire import __version__
from reelwire.versions import fit


@pytest.mark.parametrize(
    ("one", "other", "do"),
    [("0.1.0", "0.1.7", True), ("1.2", "1.2.3.dev1", True), ("0.1.0", "0.2.0", False), ("1.1.0", "2.1.0", False)],
)
def test_streaming_38_major_and_minor_number_decide(one: str, other: str, *, do: bool) -> None:
    """In both directions."""
    assert fit(one, other) is do
    assert fit(other, one) is do
    assert fit(one, one)
    assert fit(__version__, __version__)
