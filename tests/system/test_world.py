"""The world model's small configuration through real processes: from a picture and keys to frames."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from reelwire import Client, Control, RequestError

LIMIT_S = 100.0
KEYS: tuple[list[str], ...] = (["w"], ["w", "l"], [], ["s"])


def picture() -> Any:
    """A picture with an edge and a slope, 90 x 160."""
    rows, columns = np.mgrid[0:90, 0:160]
    return np.stack([rows * 2, columns, 255 * (columns > 80)], axis=-1).astype(np.uint8)


def play(client: Client, seed: int, prompt: str = "a hill") -> list[bytes]:
    """The frames of a whole session of three chunks, steered by index."""
    with client.open_session("world", image=picture(), prompt=prompt, seed=seed, chunks=3, area=64 * 96) as session:
        frames = []
        for index in range(3):
            session.submit(index, Control(keys=KEYS[index]), timeout=LIMIT_S)
        for chunk in session:
            assert chunk.frames.shape == (9 if chunk.index == 0 else 12, *chunk.frames.shape[1:])
            assert np.asarray(chunk.facts["pose"]).shape == (4, 4)
            frames.append(chunk.frames.tobytes())
        assert len(frames) == 3
        return frames


@pytest.mark.timeout(300)
def test_a_world_has_the_same_bytes_alone_beside_others_and_in_another_worker(stack: Any) -> None:
    """Frames depend on picture, prompt, seed and controls, and on nothing that runs beside them."""
    stack.broker()
    first = stack.worker("one", pipeline="world", threads=1, options="latent_cache_bytes=0")
    client = stack.client()
    alone = {seed: play(client, seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    assert play(client, 1, prompt="a lake") != alone[1]
    together: dict[int, list[bytes]] = {}

    def run(place: int) -> None:
        together[place] = play(stack.client(), 1 + place % 2)

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert {place: together[place] == alone[1 + place % 2] for place in range(4)} == dict.fromkeys(range(4), True)
    assert first.stop() == 0
    stack.worker("again", pipeline="world", threads=1)
    assert play(client, 2) == alone[2]


@pytest.mark.timeout(300)
def test_streaming_08_28_shortcuts_change_no_byte(stack: Any) -> None:
    """With neither a constant condition nor known latents, with both, and with latents of a session before: one film."""
    stack.broker()
    chunks = 10

    def film(client: Client) -> tuple[list[bytes], int, int]:
        given: dict[str, Any] = {"image": picture(), "prompt": "a hill", "chunks": chunks, "area": 32 * 48}
        frames, known, encoded = [], 0, 0
        with client.open_session("world", **given) as session:
            for chunk in steered(session, chunks):
                frames.append(chunk.frames.tobytes())
                known += bool(chunk.facts.get("latent_cached"))
                encoded += "encode" in chunk.timing.stages
        return frames, known, encoded

    plain = stack.worker("one", pipeline="world", threads=1, options="condition_constant=off,latent_cache_bytes=0")
    client = stack.client()
    base, known, encoded = film(client)
    assert (len(base), known, encoded) == (chunks, 0, chunks)
    assert plain.stop() == 0
    stack.worker("two", pipeline="world", threads=1)
    for expected in (0, chunks):
        frames, known, encoded = film(client)
        assert frames == base
        assert known == expected
        assert 0 < encoded < chunks, "once constant, the condition isn't asked for again"


def steered(session: Any, chunks: int) -> Any:
    """The chunks of a session, each with a control of its own."""
    for index in range(chunks):
        session.submit(index, Control(keys=KEYS[index % len(KEYS)]), timeout=LIMIT_S)
        yield session.next_chunk(timeout=LIMIT_S)


def test_a_request_that_the_model_cannot_serve_is_refused_by_field(stack: Any) -> None:
    """A cache smaller than sink and chunk, one larger than the worker has, an attention limit that hides the sink, a picture that is too thin."""
    stack.broker()
    stack.worker("one", pipeline="world", threads=1, cache_bytes_max=32 << 20)
    client = stack.client()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("window", {"window": 4, "sink": 2}),
        ("window", {"window": -1, "sink": 0, "chunks": 341}),
        ("attention", {"window": 8, "sink": 1, "attention": 4}),
        ("prompt", {"prompt": "  "}),
        ("chunks", {"chunks": 342}),
        ("dtype", {"dtype": "int8"}),
        ("image", {"image": np.zeros((2, 4000, 3), np.uint8)}),
    ]
    for field, change in wrong:
        request: dict[str, Any] = {"image": picture(), "prompt": "a hill", "chunks": 3, "area": 64 * 96, **change}
        with pytest.raises(RequestError) as caught:
            client.open_session("world", **request)
        assert caught.value.field == field, caught.value
    assert len(play(client, 3)) == 3


@pytest.mark.timeout(300)
def test_groups_03_a_world_on_a_group_is_the_same_world_also_beside_a_job(stack: Any) -> None:
    """Two ranks denoise together: the frames are one worker's but for rounding, and bit by bit their own beside a job."""
    stack.broker()
    single = stack.worker("one", pipeline="world", threads=1, options="latent_cache_bytes=0")
    client = stack.client()
    alone = play(client, 1)
    assert single.stop() == 0
    jobs = ("--jobs", "emulated", "--job-option", "step_s=0.05")
    stack.group("two", 2, "--pipeline", "world", "--option", "latent_cache_bytes=0", *jobs, threads=1)
    grouped = play(client, 1)
    for one, two in zip(alone, grouped, strict=True):
        apart = np.abs(np.frombuffer(one, np.uint8).astype(int) - np.frombuffer(two, np.uint8))
        assert apart.max() <= 1
    job = client.submit_edit("emulated", seed=4, steps=400)
    for event in job.progress():
        if event.state == "running" and event.step > 0:
            break
    assert play(client, 1) == grouped
    assert job.status().state == "running"
    job.cancel()
