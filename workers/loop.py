"""The worker's I/O: a socket, and one thread that waits for it and keeps the clock. It decides nothing.

A ZeroMQ socket may be used by several threads when a lock lies between them, so core, outbox and socket are used under one
lock here. A stage's thread that has a result tells the core and sends itself, which spares the result the way through
another thread; whatever else it has to say, and whatever comes while there is something to read, is left to the loop.

The loop blocks on descriptors alone, because to poll a socket is to use it. The socket's own becomes readable only when
something has changed since the last use, of whatever sort, so whoever used it looks in the end whether there is something
left to do (`_left`), still under the lock: the loop doesn't wait then, and others wake it.

A rank of a group, and a worker that does jobs, has a `group_loop.GroupRuntime` beside the threads of its stages.
"""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import sys
import threading
import time
from collections.abc import Callable

import structlog
import zmq

from reelwire import wire
from reelwire.errors import ConfigError, VersionMismatch, WireError
from reelwire.messages import FileGone, FilePart, Goodbye, Heartbeat, MemoryProbed, TaskDone, WorkerMessage
from reelwire.wake import Wake

from .actions import AbandonMemory, AnswerProbe, Connect, Log, Ready, Run, Send, SetLimits, Stop, TakeBack
from .config import WorkerConfig
from .core import WorkerCore
from .events import Finished, Malformed, OutboxFull, Received, ShutdownRequested, Started, Tick
from .group_events import AnyAction, AnyEvent, GroupEvent, OrderDone, OrderReport
from .group_loop import GroupRuntime, core_of
from .memory import SharedMemory
from .outbox import Frames, Outbox, Tracker
from .runner import StageThread, grouped_stages, load, load_jobs, threads_for
from .supervisor import die_with_parent

RECEIVES_PER_TURN_MAX = 256
JOIN_LIMIT_S = 2.0
LINGER_MS = 1000
SWITCH_S = 0.0005
"""How long a stage may keep the interpreter from the loop, whatever it computes in Python, and the loop from a stage."""
SEND_QUEUE_MESSAGES_MAX = 64
"""Messages that the socket itself keeps; what doesn't fit waits in our own outbox."""
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


def run(config: WorkerConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until asked to stop; on the main thread, SIGTERM and SIGINT ask, and a second one ends it now.

    Ends the process itself (`os._exit`) when a stage's thread hangs in a call: the interpreter can't be finalized
    under such a thread.

    Args:
        config: the settings.
        on_ready: called once with the worker's name, when the broker knows it and all weights are loaded.

    Returns:
        The exit code: 0 done, 1 a stage failed to load or hung, 2 a setting was refused, 3 no broker that fits.

    Raises:
        RequestError: the pipeline isn't known, or one of its options or stages is refused.
        ConfigError: the endpoint can't be used.
    """
    if config.parent_pid:
        die_with_parent(config.parent_pid)
    sys.setswitchinterval(SWITCH_S)
    main = threading.current_thread() is threading.main_thread()
    with contextlib.closing(SharedMemory(config.shared_memory_bytes_max)) as memory:
        loop = _Loop(config, on_ready, memory)
        try:
            with loop.wake.signals() if main else contextlib.nullcontext():
                code = loop.serve()
        finally:
            hung = loop.close()
    if hung:
        structlog.get_logger().warning("stages_hang", stages=", ".join(hung))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class _Loop:
    def __init__(self, config: WorkerConfig, on_ready: Callable[[str], None], memory: SharedMemory) -> None:
        pipeline = load(config.pipeline, config.options, config.stages)
        jobs = load_jobs(config.jobs, config.job_options) if config.jobs else None
        grouped = grouped_stages(config, pipeline, jobs)
        self.wake = Wake()
        self._config = config
        self._memory = memory
        self._on_ready = on_ready
        self._log = structlog.get_logger().bind(worker=config.name)
        self._core = core_of(config, pipeline, jobs, grouped, memory)
        self._lock = threading.Lock()
        self._reports: queue.SimpleQueue[Finished | GroupEvent] = queue.SimpleQueue()
        self._broken: BaseException | None = None  # what another thread ran into, with the lock or without
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._connection = 0  # counts them
        self._poller = zmq.Poller()
        self._poller.register(self.wake.fileno(), zmq.POLLIN)
        self._descriptor = -1  # the socket's
        self._outbox = Outbox(self._try_send)
        self._linger_ms = 0
        self._exit_code: int | None = None
        actors = self._core.actors if isinstance(self._core, WorkerCore) else {}
        own = [stage for stage in actors if stage not in grouped]
        threads = threads_for(config.threads, len(own) + bool(grouped or jobs))
        self._threads = {
            stage: StageThread(pipeline, stage, config.device, threads, self._post, config.cache_bytes_max, memory)
            for stage in own
        }
        self._runtime: GroupRuntime | None = None
        if config.group or jobs is not None:
            self._runtime = GroupRuntime(
                config, pipeline, grouped, jobs, threads, self._context, self._poller, memory, self
            )

    def serve(self) -> int:
        if self._memory.problem:
            self._log.warning("no_shared_memory", reason=self._memory.problem)
        if self._memory.reaped:
            self._log.info("shared_memory_reaped", owners=", ".join(self._memory.reaped))
        if self._runtime is not None and self._runtime.reaped:
            self._log.info("files_reaped", owners=", ".join(self._runtime.reaped))
        with self._lock:
            self._handle(Started(time.monotonic()))
            self._outbox.flush()
        wire.prepare(wire.TO_WORKER, WorkerMessage)  # while the hello travels, and no chunk waits
        while self._exit_code is None:
            woken, readable = self._wait()
            with self._lock:
                self._turn(woken=woken, readable=readable)
        with self._lock:
            self._outbox.flush()
        return self._exit_code

    def close(self) -> list[str]:
        """Close everything; the stages whose threads didn't end."""
        with self._lock:
            if self._exit_code is None:  # whatever went wrong: from here on no other thread touches the socket
                self._exit_code = 1
        for thread in self._threads.values():
            thread.stop()
        until = time.monotonic() + JOIN_LIMIT_S
        hung = [name for name, thread in self._threads.items() if not thread.join(max(0.0, until - time.monotonic()))]
        if self._runtime is not None:
            hung += self._runtime.close(max(0.0, until - time.monotonic()))
        if self._socket is not None:
            self._socket.close(linger=self._linger_ms)
        self._context.term()
        self.wake.close()
        return hung

    def post(self, event: GroupEvent) -> None:
        """Something has happened on another thread of the group's."""
        self._reports.put(event)
        self.wake.set()

    def broken(self, error: BaseException) -> None:
        """A fault of ours on another thread: the process ends with it."""
        self._broken = error
        self.wake.set()

    def say(self, connection: int, attachment: int, message: FilePart | FileGone) -> bool:
        """Tell the broker something from another thread, unless the connection is another one by now: False then."""
        with self._lock:
            if connection != self._connection or self._socket is None or self._exit_code is not None:
                return False
            self._outbox.put(attachment, wire.pack(message))
            self._outbox.flush()
            left = self._left()
        if left:
            self.wake.set()
        return True

    def report(self, report: OrderReport) -> None:
        """Take a report, on the group's thread."""
        self._take(OrderDone(time.monotonic(), report), is_small=True)

    def _post(self, report: Finished) -> None:
        """Take a report, on its stage's thread."""
        self._take(report, is_small=isinstance(report.reply, TaskDone) and self._socket is not None)

    def _take(self, report: Finished | OrderDone, *, is_small: bool) -> None:
        """Take a report on the thread that makes it; `is_small`: all that comes of it are messages and jobs."""
        with self._lock:
            if is_small and self._can_pass_on():
                try:
                    if self._runtime is not None:
                        self._hear(self._runtime)
                    self._pass_on(report)
                    if self._exit_code is None and not self._left() and not self._is_full():
                        return
                except BaseException as error:  # noqa: BLE001  raised again by the loop
                    self._broken = error
            else:
                self._reports.put(report)
        self.wake.set()

    def _can_pass_on(self) -> bool:
        """Whether a report needs nothing of the loop.

        Keys that are there are read first: a chunk that begins now takes the newest.
        """
        if self._exit_code is not None or self._broken is not None:  # the loop may be closing the socket
            return False
        return self._reports.empty() and not self._unread() & _IN

    def _pass_on(self, report: Finished | GroupEvent) -> None:
        if not isinstance(report, Finished):
            self._handle(report)
        else:
            assert isinstance(self._core, WorkerCore), "a rank has no stages of its own"
            for action in self._core.reported(report):
                if isinstance(action, Run):
                    self._outbox.flush()  # or another thread would take the interpreter before the result has left
                self._perform(action)
        self._outbox.flush()

    def _wait(self) -> tuple[bool, bool]:
        """Sleep until there is something to do: whether a thread or a signal wants it, and whether there may be something to read."""
        with self._lock:
            self._outbox.flush()
            left, wake_at = self._left(), self._core.wake_at
        # Up to the next millisecond: rounded down, it would spin until the deadline.
        timeout_ms = None if wake_at is None else int(max(0.0, wake_at - time.monotonic()) * 1000) + 1
        ready = [descriptor for descriptor, _ in self._poller.poll(0 if left else timeout_ms)]
        return self.wake.fileno() in ready, bool(left & _IN) or self._descriptor in ready

    def _left(self) -> int:
        """What there is to do with the sockets now; to be asked after any use of one, as its descriptor may not tell again."""
        return self._unread() | (_IN if self._runtime is not None and self._runtime.readable else 0)

    def _unread(self) -> int:
        """The same of the socket alone, without the link to other ranks."""
        if self._socket is None:
            return 0
        return int(self._socket.getsockopt(zmq.EVENTS)) & (_IN | _OUT if self._outbox.blocked else _IN)

    def _is_full(self) -> bool:
        return self._outbox.nbytes > self._config.outbox_bytes_max

    def _turn(self, *, woken: bool, readable: bool) -> None:
        if self._broken is not None:
            raise self._broken
        if self._is_full():
            self._handle(OutboxFull(time.monotonic()))
        if woken:
            for _ in range(self.wake.clear()):
                self._handle(ShutdownRequested(time.monotonic()))
        drained = self._receive() if readable else True
        if self._runtime is not None:
            self._hear(self._runtime)
            for event in self._runtime.ended():
                self._handle(event)
        if woken:
            while not self._reports.empty():
                self._pass_on(self._reports.get_nowait())
        self._outbox.flush()  # somebody waits for a result; the clock can wait for this
        self._handle(Tick(time.monotonic(), drained))

    def _receive(self) -> bool:
        """Take what has arrived, up to a bound; whether that was all."""
        for _ in range(RECEIVES_PER_TURN_MAX):
            if self._socket is None or self._exit_code is not None:
                return True
            try:
                frames: list[wire.Buffer] = [self._socket.recv(zmq.NOBLOCK)]
            except zmq.Again:
                return True
            while self._socket.getsockopt(zmq.RCVMORE):  # tensors stay where ZeroMQ has them
                frames.append(self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
            now = time.monotonic()
            try:
                envelope = wire.decode(frames, wire.TO_WORKER, self._core.limits)
            except VersionMismatch as error:
                self._handle(Malformed(now, "version", str(error)))
            except WireError as error:
                self._handle(Malformed(now, "malformed", str(error)))
            else:
                for message in envelope.messages:
                    self._handle(Received(now, envelope.attachment, message))
        return False

    def _hear(self, runtime: GroupRuntime) -> None:
        """Take what other ranks say: also before the group thread's own report, which may be the last that is waited for."""
        for event in runtime.receive():
            self._handle(event)

    def _handle(self, event: AnyEvent) -> None:
        for action in self._core.handle(event):
            self._perform(action)
        if self._runtime is not None:
            for inner in self._runtime.happened():
                self._handle(inner)

    def _perform(self, action: AnyAction) -> None:
        match action:
            case Run():  # the first: a stage waits
                self._threads[action.stage].submit(action.job)
            case Connect():
                self._connect()
            case Send():
                if isinstance(action.message, Heartbeat):  # as good a moment as any, and it comes again
                    self._memory.sweep()
                self._linger_ms = LINGER_MS if isinstance(action.message, Goodbye) else 0
                self._outbox.put(action.attachment, action.packed or wire.pack(action.message))
            case SetLimits():
                self._outbox.limits = action.limits
                for thread in self._threads.values():
                    thread.limits = action.limits
                if self._runtime is not None:
                    self._runtime.set_limits(action.limits)
            case AnswerProbe():
                self._perform(Send(action.attachment, MemoryProbed(action.owner, self._memory.probe(action.owner))))
            case TakeBack():
                self._memory.take_back(action.segments)
            case AbandonMemory():
                self._memory.abandon()
            case Ready():
                _settle_heap()
                self._on_ready(action.name)
            case Log():
                getattr(self._log, action.level)(action.event, **action.fields)
            case Stop():
                self._exit_code = action.exit_code
                if action.exit_code:  # whoever started the command reads a sentence, not the log
                    sys.stderr.write(f"reelwire: {action.reason}\n")
            case _:
                assert self._runtime is not None, "a group's action, and there is no group"
                self._runtime.perform(action, self._connection)

    def _connect(self) -> None:
        if self._socket is not None:
            self._poller.unregister(self._descriptor)
            self._socket.close(linger=0)
        self._outbox.clear()
        self._connection += 1
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.sndhwm = SEND_QUEUE_MESSAGES_MAX
        self._socket.maxmsgsize = self._config.frame_bytes_max
        self._socket.ipv6 = "[" in self._config.broker
        try:
            self._socket.connect(self._config.broker)
        except zmq.ZMQError as error:
            raise ConfigError("broker", f"{self._config.broker!r} can't be used ({error.strerror})") from error
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._poller.register(self._descriptor, _IN)

    def _try_send(self, frames: Frames, follow: bool) -> Tracker | bool:
        if self._socket is None:
            return False
        try:
            if not follow:
                *others, last = frames
                for frame in others:  # as `send_multipart` does it, in half of the time
                    self._socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
                self._socket.send(last, zmq.NOBLOCK)
                return True
            tracker = self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            return False
        assert tracker is not None, "a message without its tracker"
        return tracker


def _settle_heap() -> None:
    """Have the collector look no more at what is there now that all is imported and built.

    A pass over the oldest generation of a process with torch in it takes tens of milliseconds, in which no thread runs;
    when one comes depends on what the stages allocate, so it would come in the middle of somebody's chunk.
    """
    gc.collect()
    gc.freeze()
