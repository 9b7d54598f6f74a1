"""What `reelwire doctor` looks at. Each look gives findings; none of them changes anything but a probe of shared memory.

A finding is ``ok``, a ``note`` (something is missing that not everybody needs, or is tight), or ``bad``: then something
doesn't work that everybody needs or that was asked for.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "bad"]

FILES_MIN, FILES_WISH = 256, 4096
"""A broker holds a handful of descriptors and one more for each peer."""
SHARED_WISH = 1 << 30
"""What one worker may take of shared memory, by default."""
LOCKED_WISH = 64 << 20
POOL_BYTES = 1 << 20
EXTRAS = {
    "": "brokers, clients and commands",
    "worker": "workers with the built-in models",
    "flash": "faster attention on CUDA",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        area: what it belongs to.
        what: its name.
        found: what is there.
        state: whether that is as it should be.
        hint: what could be done about it.
    """

    area: str
    what: str
    found: str
    state: State = "ok"
    hint: str = ""


def machine() -> Iterator[Finding]:
    """Versions, cores, memory."""
    yield Finding("machine", "reelwire", importlib.metadata.version("reelwire"))
    yield Finding("machine", "python", f"{platform.python_version()} ({platform.python_implementation()})")
    yield Finding("machine", "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    there = os.cpu_count() or 1
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else there
    yield Finding("machine", "cores", f"{mine}" if mine == there else f"{mine} of {there} for this process")
    with suppress(OSError, ValueError, IndexError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
        yield Finding("machine", "memory", f"{_size(total)}, {_size(free)} free")


def limits() -> Iterator[Finding]:
    """What the system lets one process have, as far as it matters here."""
    from ..endpoints import IPC_PATH_BYTES_MAX

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_count(soft)}, at most {_count(hard)}"
    hint = "a broker needs one for each peer: raise it with `ulimit -n`"
    short = soft != resource.RLIM_INFINITY and soft < FILES_WISH
    state: State = "ok" if not short else "bad" if soft < FILES_MIN else "note"
    yield Finding("limits", "open files", found, state, hint if short else "")
    if hasattr(resource, "RLIMIT_MEMLOCK"):
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        tight = soft != resource.RLIM_INFINITY and soft < LOCKED_WISH
        hint = "pinned buffers of a GPU count into it: raise it with `ulimit -l`" if tight else ""
        found = "no limit" if soft == resource.RLIM_INFINITY else _size(soft)
        yield Finding("limits", "locked memory", found, "note" if tight else "ok", hint)
    yield Finding("limits", "ipc path", f"{IPC_PATH_BYTES_MAX} bytes at most")


def shared_memory(*, reap: bool) -> Iterator[Finding]:
    """Whether large tensors can go through shared memory, and what the dead have left there.

    Args:
        reap: remove what they left.
    """
    from .. import segment_files, segments

    root = segment_files.folder_of_user()
    if root.parent.is_dir():
        usage = shutil.disk_usage(root.parent)
        tight = usage.free < SHARED_WISH
        hint = f"a worker may take {_size(SHARED_WISH)}; what doesn't fit goes inside of messages" if tight else ""
        found = f"{root.parent}: {_size(usage.total)}, {_size(usage.free)} free"
        yield Finding("shared memory", "size", found, "note" if tight else "ok", hint)
    try:
        pool = segments.Pool(POOL_BYTES)
        try:
            works = segments.Reader().probe(pool.owner) == pool.probe and pool.take(POOL_BYTES // 2) is not None
        finally:
            pool.close()
        found = "can be written and mapped" if works else "can't be mapped"
    except OSError as error:
        works, found = False, str(error.strerror or error)
    hint = "" if works else "tensors go inside of messages instead"
    yield Finding("shared memory", "use", found, "ok" if works else "note", hint)
    if reap:
        gone = segment_files.reap()
        yield Finding("shared memory", "left by the dead", f"{len(gone)} folders removed" if gone else "nothing")
    else:
        left = segment_files.abandoned()
        hint = "`reelwire doctor --reap` removes them, as every worker does when it starts" if left else ""
        found = f"{len(left)} folders" if left else "nothing"
        yield Finding("shared memory", "left by the dead", found, "note" if left else "ok", hint)


def packages() -> Iterator[Finding]:
    """What is installed of the base and of each extra, against the versions that are asked for."""
    asked = [_Requirement.of(text) for text in importlib.metadata.requires("reelwire") or ()]
    for extra, use in EXTRAS.items():
        area = f"extra {extra}" if extra else "base"
        missing = []
        for each in asked:
            if each is None or each.extra != extra or not each.here:
                continue
            version = _version(each.name)
            if version is None:
                missing.append(each.name)
                yield Finding(area, each.name, "missing", "note" if extra else "bad")
            elif _numbers(version) < _numbers(each.least):
                yield Finding(area, each.name, version, "bad", f"needed: {each.least} or later")
            else:
                yield Finding(area, each.name, version)
        if missing and extra:
            yield Finding(area, "is for", use, "note", f"pip install 'reelwire[{extra}]'")
    yield video()


def video() -> Finding:
    """Which codec MP4s are written with."""
    import av

    if "libx264" in av.codecs_available:
        return Finding("base", "video", "H.264")
    return Finding("base", "video", "MPEG-4", "note", "PyAV has no libx264 here; browsers don't play what is written")


def devices() -> Iterator[Finding]:
    """Where stages can run, and what computes attention there; torch is imported for it, if there is one."""
    if importlib.util.find_spec("torch") is None:
        yield Finding("devices", "torch", "missing", "note", "workers with the built-in models need reelwire[worker]")
        return
    try:
        import torch

        from ..kernels import attention
    except (ImportError, OSError) as error:  # a build for another system fails when its libraries are loaded
        yield Finding("devices", "torch", f"can't be imported: {error}", "bad", "install it anew")
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Finding("devices", "torch", f"{torch.__version__}, {build}")
    yield Finding("devices", "cpu", f"{torch.get_num_threads()} threads")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if torch.version.cuda and not count:
        yield Finding("devices", "cuda", "none that can be used", "note", "is there a driver, and is it new enough?")
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        size = f"{_size(total)}, {_size(free)} free, compute capability {properties.major}.{properties.minor}"
        yield Finding("devices", f"cuda:{index}", f"{properties.name}, {size}")
    for backend, obstacle in attention.backends().items():
        yield Finding("attention", backend, obstacle or "can be used", "note" if obstacle else "ok")


def broker(endpoint: str, timeout_s: float, *, asked_for: bool) -> Iterator[Finding]:
    """Whether a broker answers, and who serves there.

    Args:
        endpoint: where it should be.
        timeout_s: how long to wait for it.
        asked_for: somebody named the endpoint, so that nobody there is wrong.
    """
    from .. import Client
    from ..errors import ReelwireError

    try:
        with Client(endpoint, connect_timeout_s=timeout_s) as client:
            status = client.status()
    except (ReelwireError, TimeoutError) as error:
        hint = "`reelwire up` starts one"
        yield Finding("broker", endpoint, str(error), "bad" if asked_for else "note", hint)
        return
    yield Finding("broker", endpoint, f"answers, version {status['version']}")
    for worker in status["workers"]:
        yield Finding("broker", f"worker {worker['name']}", f"on {worker['device']}")
    if not status["workers"]:
        yield Finding("broker", "workers", "none", "note", "`reelwire worker` starts one")


@dataclass(frozen=True, slots=True)
class _Requirement:
    """A line of the package's own metadata: ``torch>=2.11; extra == 'worker'``."""

    name: str
    least: str
    extra: str
    here: bool

    @classmethod
    def of(cls, text: str) -> _Requirement | None:
        wanted, _, marker = text.partition(";")
        matched = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[.*?\])?\s*(?:>=\s*([0-9][0-9a-z.]*))?", wanted)
        if matched is None:
            return None
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", marker)
        system = re.search(r"platform_system\s*==\s*['\"]([^'\"]+)['\"]", marker)
        here = system is None or system[1] == platform.system()
        return cls(matched[1], matched[2] or "0", extra[1] if extra else "", here)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, by which two are compared: ``2.13.0+cpu`` is (2, 13)."""
    release = re.match(r"[0-9.]*", version.strip())
    numbers = [int(part) for part in (release[0] if release else "").split(".") if part]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"


def _count(limit: int) -> str:
    return "no limit" if limit == resource.RLIM_INFINITY else str(limit)
