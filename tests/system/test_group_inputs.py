"""What the ranks of a group compute from when not all of them share their memory, as on two machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

CONDITION_BYTES = 9 << 20
"""More than a broadcast takes at once."""
QUICK = f"encode_s=0,denoise_s=0,decode_s=0,condition_bytes={CONDITION_BYTES}"


def frames(stack: Any, take: Any) -> list[bytes]:
    """A short session's, each of which shows what all chunks up to it were made from."""
    with stack.client().open_session("emulated", seed=4, chunks=5) as session:
        session.press("w")
        return [chunk.frames.tobytes() for chunk in take(session, 5)]


@pytest.mark.parametrize("apart", [True, False])
def test_groups_01_ranks_that_share_no_memory_take_large_inputs_from_their_leader(
    stack: Any, take: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A chunk is the same as from one process alone, whose every input reached it whole, and as where all share one."""
    places = [tmp_path / "here", tmp_path / ("there" if apart else "here")]
    for place in places:
        place.mkdir(exist_ok=True)
    stack.broker()
    for rank in (1, 0):
        monkeypatch.setenv("REELWIRE_SHARED_MEMORY", str(places[rank]))
        stack.worker(f"rank-{rank}", "emulated", options=QUICK, group="pair", rank=rank, world=2)
    together = frames(stack, take)
    (group,) = stack.client().status()["groups"]
    assert (group["state"], group["sequence"]) == ("formed", 6)
    segments = list((tmp_path / "here").glob("*/*/s*"))
    assert any(path.stat().st_size >= CONDITION_BYTES for path in segments) is not apart
    stack.broker()
    stack.worker("alone", "emulated", options=QUICK)
    assert frames(stack, take) == together
