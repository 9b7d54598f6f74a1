"""The broker's end of `media_probe`: a process that looks into files, and is started anew when one was too much for it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reelwire.job_spec import MediaInput
from reelwire.spec import Plain

from .media_probe import Question
from .media_roots import Refused

LIMIT_S = 20.0
_ANSWER_BYTES_MAX = 64 << 10
_REASON_CHARS_MAX = 500
_FACTS: dict[str, type] = {"frames": int, "height": int, "width": int, "fps": float}


class Prober:
    """Looks into files, one after the other, in a process of its own, which is started with the first one.

    `look` is for one thread, which must live as long as the process is needed; `close` is for any.

    Args:
        limit_s: how long one file may take, in seconds.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        """Start nothing yet."""
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def look(self, path: Path, wanted: MediaInput) -> Mapping[str, Plain]:
        """What is in a file: ``frames``, ``height``, ``width``, and ``fps`` of a clip.

        Raises:
            Refused: it isn't what is wanted, took too long, or broke what reads it.
            OSError: no process can be started.
        """
        question = Question(str(path), wanted.kind, wanted.frames_max, wanted.pixels_max)
        with self._asking:
            process = self._running()
            answer = _parsed(self._ask(process, json.dumps(asdict(question)).encode() + b"\n"))
            if answer is None:
                _end(process)
                raise Refused("it broke what looks into files; accepted: a file that can be read")
        if isinstance(answer, str):
            raise Refused(answer)
        return answer

    def close(self) -> None:
        """End the process, whatever it does; a file that is looked into is refused."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            with self._asking:  # whoever waits for its answer hears of its end first
                _end(process)

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise Refused("the broker stops")
            if self._process is None or self._process.poll() is not None:
                if self._process is not None:
                    _end(self._process)
                self._process = _started()
            return self._process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """The line that comes back, or what came of it before the process was gone."""
        assert process.stdin is not None
        assert process.stdout is not None
        until = time.monotonic() + self._limit_s
        answer = b""
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            process.stdin.write(line)
            while not answer.endswith(b"\n") and len(answer) < _ANSWER_BYTES_MAX:
                if not selector.select(max(0.0, until - time.monotonic())):
                    _end(process)
                    raise Refused(
                        f"it takes more than {self._limit_s:g} seconds to look into; accepted: a smaller file"
                    )
                data = os.read(process.stdout.fileno(), _ANSWER_BYTES_MAX)
                if not data:
                    break
                answer += data
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _started() -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "reelwire.broker.media_probe", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,  # Ctrl-C is for the broker, which may drain for a while
        env={**os.environ, **threads},
    )


def _parsed(line: bytes) -> dict[str, Plain] | str | None:
    """Facts, or why there are none, in one line; None: it is no answer. What read a stranger's file isn't trusted either."""
    try:
        answer: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    refused, facts = answer.get("refused"), answer.get("facts")
    if isinstance(refused, str):
        return " ".join(refused.encode("utf-8", "replace").decode().split())[:_REASON_CHARS_MAX]
    if not isinstance(facts, dict):
        return None
    known = {name: facts[name] for name, kind in _FACTS.items() if name in facts and type(facts[name]) is kind}
    if len(known) != len(facts) or not {"frames", "height", "width"}.issubset(known):
        return None
    return known if all(math.isfinite(each) and each > 0 for each in known.values()) else None
