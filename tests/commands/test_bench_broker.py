"""`reelwire bench broker`: its peers speak as the protocol says, and it measures what it says."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest
import zmq

from reelwire import Client, wire
from reelwire import messages as m
from reelwire.commands import bench_broker
from reelwire.commands.bench_broker import Plan, counts, run
from reelwire.commands.bench_forwarder import ForwarderPeers
from reelwire.commands.bench_lean import LeanClient, LeanPeers, LeanWorker, Peer
from reelwire.commands.bench_stack import helper, stack
from reelwire.controls import KeyState
from reelwire.errors import ReelwireError, RequestError
from reelwire.workers.emulated import Emulation, emulated_spec

from .conftest import Reelwire

SPEC = emulated_spec(Emulation(name="no-op"))


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """For sockets that are never heard."""
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def told(peer: Peer, message: Any) -> list[Any]:
    """What the broker hears when it has said something, read as the broker reads it."""
    peer.out = []
    packed = wire.pack(message)
    peer.hear(packed.name, wire._unpacked(packed.body, ""))
    if not peer.out:
        return []
    frames: list[wire.Buffer] = [cast(bytes, msgpack.packb([wire.MAGIC, wire.PROTOCOL, 1, peer.out]))]
    return list(wire.decode(frames, wire.TO_BROKER, wire.Limits()).messages)


def test_a_lean_worker_answers_as_a_worker_does(context: Any) -> None:
    """What it says is decoded strictly; a reservation is bound to the newest keys, and a fixed control to nothing."""
    worker = LeanWorker(context, "ipc://@nobody", SPEC, "denoise")
    first = m.InitializeStage("s", "no-op", "denoise", 1, 2, 9, {}, {}, m.Artifact())
    assert told(worker, first) == [m.StageInitialized("s", "denoise", 1, 2, m.Artifact(), 0)]
    assert worker.held == {"s"}
    inputs = {"condition": m.Artifact()}
    latent = {"latent": m.Artifact()}
    fixed = m.RunTask("s", "no-op", "denoise", 1, 2, 0, {**inputs, "control": m.Artifact()}, True, False)
    assert told(worker, fixed) == [m.TaskDone("s", "denoise", 1, 2, 0, latent, {}, 0.0)]
    keys = KeyState(3, ("w",))
    bound = m.RunTask("s", "no-op", "denoise", 1, 2, 1, inputs, False, False, m.Reservation("control", keys, 4, 5))
    applied = m.Applied("held", m.Artifact({"keys": ["w"], "reset_pose": False}), 3, 4, 5)
    assert told(worker, bound) == [m.TaskDone("s", "denoise", 1, 2, 1, latent, {}, 0.0, applied)]
    assert told(worker, m.SetStageKeys("s", "no-op", "denoise", 1, 2, KeyState(7, ()))) == []
    (done,) = told(worker, bound)
    assert (done.applied.source, done.applied.revision) == ("still", 7)
    assert told(worker, m.ReleaseStage("s", "no-op", "denoise", 1, 2)) == [m.StageReleased("s", "denoise", 1, 2)]
    assert worker.held == set()
    worker.socket.close()


def chunk(index: int) -> m.Chunk:
    return m.Chunk("s", index, {}, m.Applied("held", m.Artifact()), {}, m.ChunkTiming(0.0, 0.0, None, {}), False)


def test_a_lean_client_acknowledges_every_chunk_once_and_in_order(context: Any) -> None:
    """With its credit; its heartbeats repeat both; a chunk that is lost, or a session that fails, ends the benchmark."""
    client = LeanClient(context, "ipc://@nobody", "lean")
    client.open(SPEC, 1)
    told(client, m.SessionOpened("k", "s", "token"))
    told(client, m.SessionChanged("s", "ready", 2))
    assert client.ready == {"s"}
    assert told(client, chunk(0)) == [m.Ack("s", 1, m.Credit(3, 1 << 62))]
    assert told(client, chunk(1)) == [m.Ack("s", 2, m.Credit(4, 1 << 62))]
    assert client.sign_of_life() == m.Heartbeat(0.0, (m.Ack("s", 2, m.Credit(4, 1 << 62)),))
    assert client.chunks == 2
    with pytest.raises(ReelwireError, match="chunk 3 of s came in place of 2"):
        told(client, chunk(3))
    with pytest.raises(ReelwireError, match="has ended"):
        told(client, m.SessionEnded("s", "failed", m.Failure("stage", "broke")))
    told(client, m.SessionEnded("s", "cancelled"))
    assert (client.ended, client.sign_of_life()) == (1, m.Heartbeat())
    client.socket.close()


def test_a_short_run_measures_the_broker_and_the_forwarder(reelwire: Reelwire, tmp_path: Path) -> None:
    """Two numbers of sessions, both sides of each; nothing is left but the rows."""
    done = reelwire("bench", "broker", "--sessions", "1,3", "--rounds", "1", "--seconds", "0.1", "--json")
    assert done.code == 0, done.err
    said = json.loads(done.out)
    assert [row["sessions"] for row in said["rows"]] == [1, 3]
    for row in said["rows"]:
        assert row["chunks_per_s"] > 0
        assert row["forwarder_per_s"] > 0
    assert said["bounds"] == []
    assert (tmp_path / "benchmarks" / "broker.csv").read_text().count("\n") == 3


def test_lean_peers_that_are_closed_leave_nothing_to_wait_for(context: Any) -> None:
    """In the middle of their sessions, as an interrupted benchmark closes them: they have left, and weren't lost."""
    with stack({}) as running:
        peers = LeanPeers(context, running.endpoint, SPEC, 2)
        try:
            peers.open(4)
        finally:
            peers.close()
        until = time.monotonic() + 20
        with Client(running.endpoint) as client:
            while (status := client.status())["sessions"] or status["workers"]:
                assert time.monotonic() < until
        left = {name: count for name, count in status["counters"].items() if name.endswith(("s_left", "s_lost"))}
    assert left == {"clients_left": 2, "workers_left": 3}


def test_a_forwarder_ends_in_silence_when_its_peers_leave(
    context: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Messages that are on their way by then find nobody, which is the end of a turn and no fault."""
    endpoint = f"ipc://{tmp_path}/forwarder"
    with helper(bench_broker._FORWARDER, endpoint, "2") as process:
        peers = ForwarderPeers(context, endpoint, 2)
        peers.start(64)
        took_s, came = peers.run_for(0.05)
        leaving, *others = peers._workers
        leaving.close()
        until = time.monotonic() + 20
        while process.poll() is None and time.monotonic() < until:
            for socket in others:
                try:
                    socket.send_multipart(socket.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
            for socket in peers._clients:
                socket.send(b"c\0", zmq.NOBLOCK)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        peers.close()
    assert took_s > 0
    assert came > 0
    assert process.returncode == 0
    assert capfd.readouterr().err == ""


def test_bounds_are_held_against_64_sessions() -> None:
    """Rate and CPU of the forwarder's; 1024 against 64 when both were run."""
    report = run(Plan((64,), rounds=1, seconds=0.05))
    assert [bound.kind for bound in report.bounds] == ["least", "most"]
    assert len(report.rows[0]) == len(report.columns)
    (row,) = report.kept()
    assert row["bound"] == "rate_of_forwarder >= 0.2; cpu_of_forwarder <= 8"
    assert str(row["verdict"]).startswith(("holds", "MISSED"))


@pytest.mark.parametrize("text", ["", "x", "0", "64,", "4097", "1,-2"])
def test_other_numbers_of_sessions_are_refused(text: str) -> None:
    """With what is accepted."""
    with pytest.raises(RequestError, match="accepted: numbers from 1 to 4096, with commas between"):
        counts(text)
    assert counts("1,64") == (1, 64)
