"""Results that a worker gives to its own next stage, between real threads: the same bytes as by way of the broker."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from reelwire import Client, Control
from reelwire.workers.emulated import KEYS

LIMIT_S = 60.0
SEEDS = (1, 2, 3)
QUICK = "encode_s=0.002,denoise_s=0.004,decode_s=0.002,jitter=0.9,condition_bytes=3000,latent_bytes=100000"


def play(client: Client, pipeline: str, chunks: int, **request: Any) -> list[bytes]:
    """The frames of a whole session; controls are given as early as they are taken."""
    with client.open_session(pipeline, chunks=chunks, **request) as session:
        steering = threading.Thread(target=steer, args=(session, chunks))
        steering.start()
        frames = [chunk.frames.tobytes() for chunk in session]
        steering.join(LIMIT_S)
    assert len(frames) == chunks
    return frames


def steer(session: Any, chunks: int) -> None:
    """A control for each chunk, no two in a row alike."""
    for index in range(chunks):
        session.submit(index, Control(keys=[KEYS[index % 4]]), timeout=LIMIT_S)


def side_by_side(stack: Any) -> dict[int, list[bytes]]:
    """The frames of sessions that share their stages, by seed."""
    films: dict[int, list[bytes]] = {}
    clients = {seed: stack.client() for seed in SEEDS}

    def run(seed: int) -> None:
        films[seed] = play(clients[seed], "emulated", 24, seed=seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in SEEDS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return films


def test_frames_are_the_same_whoever_carries_what_lies_between_the_stages(stack: Any) -> None:
    """One worker with all stages, with and without shared memory and with a longer mailbox, or two that share nothing."""
    stack.broker()
    whole: dict[str, Any] = {"pipeline": "emulated", "options": QUICK}
    one = stack.worker("one", **whole)
    films = side_by_side(stack)
    assert films.keys() == set(SEEDS)
    assert len({tuple(film) for film in films.values()}) == len(SEEDS)
    assert one.stop() == 0
    plain = stack.worker("plain", **whole, mailbox=3, shared_memory_bytes_max=0)
    assert side_by_side(stack) == films
    assert plain.stop() == 0
    without = stack.worker("without", **whole, mailbox=0)
    assert side_by_side(stack) == films
    assert without.stop() == 0
    stack.worker("ends", stages="encode,decode", **whole)
    stack.worker("middle", stages="denoise", **whole)
    assert side_by_side(stack) == films


@pytest.mark.timeout(300)
def test_a_world_is_the_same_from_one_worker_and_from_two(stack: Any) -> None:
    """The model's stages pass tensors on in one process as they do from one to another."""
    rows, columns = np.mgrid[0:90, 0:160]
    picture = np.stack([rows * 2, columns, 255 * (columns > 80)], axis=-1).astype(np.uint8)
    request: dict[str, Any] = {"image": picture, "prompt": "a hill", "seed": 1, "area": 32 * 48}
    whole: dict[str, Any] = {"pipeline": "world", "threads": 1, "options": "latent_cache_bytes=0"}
    stack.broker()
    one = stack.worker("one", **whole)
    film = play(stack.client(), "world", 4, **request)
    assert one.stop() == 0
    stack.worker("ends", stages="encode,decode", **whole)
    stack.worker("middle", stages="denoise", **whole)
    assert play(stack.client(), "world", 4, **request) == film
