"""Processes that form worker groups for tests, over gloo on this machine; started once, used for many cases."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import pytest
from torch._C._distributed_c10d import TCPStore

START_S = 60.0
CASE_S = 60.0
END_S = 10.0
LOST = "lost"
"""What a rank gives whose process has ended."""


class RankPool:
    """`count` processes, of which each case takes the first few, or those that it names, as its ranks.

    No wait is without a limit: a case that takes longer fails, and all processes are killed. On leaving they are asked to
    end, and none is left.
    """

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed on leaving
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks: list[tuple[subprocess.Popen[bytes], socket.socket, IO[str]]] = []
        self._fresh = True
        for _ in range(count):
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """The processes, in order."""
        return [process for process, _, _ in self._ranks]

    def run(
        self, ranks: int | Sequence[int], case: Callable[..., Any], *, limit_s: float = CASE_S, **given: Any
    ) -> list[Any]:
        """What a case gave on each rank; `LOST` of one whose process ended."""
        members = range(ranks) if isinstance(ranks, int) else ranks
        call = {"name": str(next(self._numbers)), "file": inspect.getfile(case), "function": case.__name__}
        for rank, member in enumerate(members):
            lines = self._ranks[member][2]
            lines.write(json.dumps({**call, "rank": rank, "world": len(members), "given": given}) + "\n")
            lines.flush()
        deadline = time.monotonic() + limit_s + (START_S if self._fresh else 0)
        self._fresh = False
        replies = [self._reply(member, deadline) for member in members]
        failures = [reply["failure"] for reply in replies if reply is not None and "failure" in reply]
        assert not failures, "\n".join(failures)
        return [LOST if reply is None else reply["value"] for reply in replies]

    def close(self) -> None:
        """Have all processes end, kill those that don't, and make sure that none is left."""
        for _, sock, lines in self._ranks:
            lines.close()
            sock.close()
        deadline = time.monotonic() + END_S
        stuck = []
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(process.pid)
                process.kill()
                process.wait(END_S)
        self._log.close()
        assert all(process.poll() is not None for process in self.processes)
        assert not stuck, f"processes {stuck} didn't end by themselves"

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        program = [sys.executable, str(Path(__file__).with_name("rank_program.py"))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with theirs:
            process = subprocess.Popen(
                [program[0], "-P", program[1], str(theirs.fileno()), str(self._store.port)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                pass_fds=[theirs.fileno()],
            )
        self._ranks.append((process, ours, ours.makefile("rw", encoding="utf-8")))

    def _reply(self, member: int, deadline: float) -> dict[str, Any] | None:
        process, sock, lines = self._ranks[member]
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            line = lines.readline()
        except TimeoutError:
            for each in self.processes:
                each.kill()
            self._log.seek(0)
            pytest.fail(f"process {process.pid} gave no answer in time; what all said: {self._log.read().decode()}")
        except ConnectionResetError:
            return None
        reply: dict[str, Any] | None = json.loads(line) if line else None
        return reply
