"""One process of a `RankPool`: does the cases that it is told to, as a rank of a group that is formed for each.

Run as a program with a socket, one JSON text a line in both directions. Cases are functions of a file beside this one,
which take a `Member` and whatever values came with the call, and give a value that JSON can hold.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from reelwire.pipeline.parallel import Parallel

COLLECTIVE_S = 20
"""How long a rank waits for the others in a collective; none of them is away for so long unless it was lost."""


class Member:
    """A rank of a group, with what a case needs; `Member()` is alone."""

    def __init__(self, rank: int = 0, world: int = 1, store: Store | None = None) -> None:
        self.parallel = Parallel(rank, world)
        self._store = store
        self._met = 0

    def meet(self, *more: Parallel) -> None:
        """Form the group, after leaving the one before; `more` talk through it as well."""
        self.leave()
        if self._store is None:
            return
        self._met += 1
        dist.init_process_group(
            "gloo",
            store=PrefixStore(str(self._met), self._store),
            rank=self.parallel.rank,
            world_size=self.parallel.world,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
        for each in (self.parallel, *more):
            each.use(dist.group.WORLD)

    def leave(self) -> None:
        """Leave the group."""
        self.parallel.use(None)
        if dist.is_initialized():
            dist.destroy_process_group()


def cases(file: str) -> Any:
    """The module in a file, loaded once."""
    if file not in sys.modules:
        found = importlib.util.spec_from_file_location(file, file)
        assert found is not None
        assert found.loader is not None
        sys.modules[file] = module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    return sys.modules[file]


def done(call: dict[str, Any], store: Store) -> dict[str, Any]:
    """Do one case, and say what it gave or why it failed."""
    member = Member(call["rank"], call["world"], PrefixStore(call["name"], store))
    try:
        function: Callable[..., Any] = getattr(cases(call["file"]), call["function"])
        member.meet()
        return {"value": function(member, **call["given"])}
    except Exception:  # noqa: BLE001  whatever it is, the test shall see it
        return {"failure": traceback.format_exc()}
    finally:
        member.leave()


def main() -> None:
    """Serve calls until the socket is closed."""
    descriptor, port = map(int, sys.argv[1:])
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S))
    with socket.socket(fileno=descriptor) as calls, calls.makefile("rw", encoding="utf-8") as lines:
        for line in lines:
            lines.write(json.dumps(done(json.loads(line), store)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
