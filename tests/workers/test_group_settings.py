"""What makes a process a rank: its place, what it computes with the others, and what must be the same on all of them."""

from __future__ import annotations

import os
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reelwire import tensors
from reelwire.errors import ConfigError, RequestError
from reelwire.messages import Artifact
from reelwire.tensors import Inline, Shared, TensorRef
from reelwire.workers import emulated, emulated_jobs
from reelwire.workers.config import WorkerConfig
from reelwire.workers.group_loop import core_of, place_of
from reelwire.workers.memory import SharedMemory
from reelwire.workers.rank import RankCore
from reelwire.workers.rank_processes import this_machine
from reelwire.workers.runner import fingerprint, grouped_stages, load
from reelwire.workers.supervisor import Backoff
from reelwire.workers.values import inlined

STREAM = emulated.pipeline()
NUMPY = f"{Path(__file__).parent / 'numpy_pipeline.py'}:build"


def config(**settings: Any) -> WorkerConfig:
    return WorkerConfig(name="w", **settings)


def test_only_what_is_shared_is_computed_by_the_group_thread() -> None:
    """With a group or jobs; a worker without either is as it was, and stages that it doesn't serve are nobody's."""
    jobs = emulated_jobs.pipeline()
    assert grouped_stages(config(), STREAM, None) == ()
    assert grouped_stages(config(), STREAM, jobs) == ("denoise",)
    assert grouped_stages(config(group="g"), STREAM, None) == ("denoise",)
    assert grouped_stages(config(group="g", world=2), STREAM, None) == ("denoise",)
    assert grouped_stages(config(group="g", stages=("encode",)), STREAM, jobs) == ()
    assert grouped_stages(config(group="g", world=2), load(NUMPY, {}), jobs) == ()


def test_groups_06_a_group_that_can_not_compute_anything_is_refused() -> None:
    """Before anything is loaded: by the pipeline, by the jobs, or because there is nothing to share."""

    def refuse(world: int) -> None:
        raise RequestError("world", f"12 heads can't be shared by {world} ranks")

    pair = config(group="g", world=5)
    wrong: Any = types.SimpleNamespace(check_group=refuse)
    with pytest.raises(RequestError, match="12 heads"):
        grouped_stages(pair, STREAM, wrong)
    shared: Any = types.SimpleNamespace(
        parallel_stages=("denoise",), check_group=refuse, build_parallel=STREAM.build_parallel, spec=STREAM.spec
    )
    with pytest.raises(RequestError, match="12 heads"):
        grouped_stages(pair, shared, None)
    with pytest.raises(ConfigError, match="nothing to compute together"):
        grouped_stages(pair, load(NUMPY, {}), None)


def test_a_place_says_which_process_on_which_machine() -> None:
    """A worker without a group has none."""
    assert place_of(config()) is None
    place = place_of(config(group="g", rank=1, world=3))
    assert place is not None
    assert (place.group, place.rank, place.world, place.epoch) == ("g", 1, 3, 0)
    assert (place.machine, place.pid) == (this_machine(), os.getpid())


def test_the_rank_chooses_the_core() -> None:
    """Rank 0 leads, and is a worker like any other to the broker; the others follow."""
    for rank in (0, 1):
        settings = config(group="g", rank=rank, world=2, pipeline="emulated")
        core = core_of(settings, STREAM, emulated_jobs.pipeline(), ("denoise",), SharedMemory(0))
        assert isinstance(core, RankCore) == (rank == 1)


def test_groups_06_a_fingerprint_tells_weights_and_options_from_others(tmp_path: Path) -> None:
    """By the content of what they name, wherever it lies; not by what one process of a group has for itself."""
    for folder in ("a", "b", "c"):
        (tmp_path / folder / "part").mkdir(parents=True)
        (tmp_path / folder / "part" / "weights").write_bytes(b"w" * (3 << 20))
        (tmp_path / folder / "config.json").write_text("{}" if folder != "c" else "[]")
    (tmp_path / "pipe.py").write_text("one")

    def of(folder: str, **more: Any) -> WorkerConfig:
        options = {"checkpoint": str(tmp_path / folder), "model": "x"}
        return config(**{"pipeline": f"{tmp_path / 'pipe.py'}:build", "options": options, **more})

    first = fingerprint(of("a"))
    assert first == fingerprint(of("b", device="cuda:1", rank=1, world=2, group="g"))
    assert first != fingerprint(of("c"))
    assert first != fingerprint(of("a", pipeline=f"{tmp_path / 'pipe.py'}:other"))
    assert first != fingerprint(replace(of("a"), options={"model": "x"}))
    assert first != fingerprint(of("a", jobs="emulated"))
    assert first != fingerprint(of("a", jobs="emulated", job_options={"step_s": "1"}))
    (tmp_path / "b" / "part" / "weights").write_bytes(b"w" * (3 << 20) + b"w")
    assert first != fingerprint(of("b"))
    (tmp_path / "pipe.py").write_text("two")
    assert first != fingerprint(of("a"))


def test_groups_01_what_stands_in_shared_memory_is_copied_out() -> None:
    """A body that waits doesn't hold its producer's memory; what travelled with its message isn't copied again."""
    array = np.arange(6, dtype=np.float32)
    inline = tensors.from_array(array)
    shared = TensorRef("float32", (6,), Shared("owner", "segment", 1))
    content = bytearray(array.tobytes())
    taken = inlined(Artifact({"x": 1}, {"a": inline, "b": shared}), lambda *_: memoryview(content))
    content[:] = bytes(len(content))
    assert taken.values == {"x": 1}
    assert taken.tensors["a"] is inline
    assert isinstance(taken.tensors["b"].place, Inline)
    assert np.array_equal(tensors.to_array(taken.tensors["b"]), array)
    here = Artifact({}, {"a": inline})
    assert inlined(here, lambda *_: memoryview(b"")) is here


def test_groups_04_ranks_that_leave_together_come_back_together() -> None:
    """The one that was killed and those that left because of it wait for as long, the first time only briefly."""
    killed, left = Backoff(), Backoff()
    for lived_s, pause_s in ((100.0, 1.0), (5.0, 2.0), (5.0, 4.0), (100.0, 1.0)):
        assert (killed.after(lived_s), left.after(lived_s + 0.05)) == (pause_s, pause_s)
