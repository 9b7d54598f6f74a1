"""Which versions of reelwire may speak to each other."""

from __future__ import annotations


def fit(one: str, other: str) -> bool:
    """Whether peers of these versions understand each other: major and minor number are the same."""
    return one.split(".")[:2] == other.split(".")[:2]
