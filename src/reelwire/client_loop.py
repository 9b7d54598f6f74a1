"""The client's I/O: a socket, and one thread that waits for it.

A ZeroMQ socket may be used by several threads when a lock lies between them, so every use of it here is under the lock of
the `Door`. A thread of the application that has something small to say sends it itself, which spares it the way through
another thread; whatever can't be sent at once waits in the outbox for the I/O thread, and so does all that has arrived.

That thread blocks on descriptors alone, because to poll a socket is to use it: on the wake pair's and on the socket's own,
until the core's next deadline. The socket's own becomes readable only when something has changed since the last use, of
whatever sort. So whoever used the socket looks in the end what can be done with it now (`_left`), still under the lock:
the I/O thread doesn't wait while there is something to do, and others wake it.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import assert_never

import zmq

from . import client_events as e
from . import endpoints, messages, wire
from .client_core import ClientCore
from .client_door import Door
from .client_memory import ClientMemory
from .client_view import SessionView
from .errors import RequestError, VersionMismatch, WireError
from .wake import Wake

OUTBOX_BYTES_MAX = 64 << 20
ROOM_BYTES = 4 << 20
"""While more waits to be sent, no part of a file is added to it: what is small and urgent would wait behind them all."""
LINGER_S = 0.5
_SNDHWM = 64
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)

_links: weakref.WeakSet[Link] = weakref.WeakSet()


def check_endpoint(endpoint: str) -> None:
    """Check that a client can connect to something of that form.

    Raises:
        RequestError: of the field ``endpoint``.
    """
    try:
        endpoints.parse(endpoint)
    except ValueError as error:
        raise RequestError("endpoint", str(error)) from None


class Link(Door):
    """A core, its lock, and the thread that moves its messages.

    Args:
        core: the protocol.
        endpoint: where the broker listens, as `check_endpoint` accepts it.
        limits: what is accepted from the broker.
        memory: reads what workers on this machine wrote into shared memory.
    """

    def __init__(self, core: ClientCore, endpoint: str, limits: wire.Limits, memory: ClientMemory) -> None:
        """Start the thread."""
        super().__init__(core)
        self._endpoint = endpoint
        self._limits = limits
        self._memory = memory
        self._when_ended: list[Callable[[], None]] = []
        self._ended = False
        self._outbox: deque[wire.Batch] = deque()
        self._outbox_bytes = 0
        self._welcome: messages.Welcome | None = None
        self._accepted = wire.Limits()
        self._reconnect = False
        self._stopped = False
        self._leaving = False
        self._goodbye = False  # is the last thing that was sent, and worth waiting for
        self._later: deque[Callable[[], None]] = deque()
        self._crowded: set[str] = set()  # whom to tell when there is room
        self._dealer: zmq.Socket[bytes] | None = None  # while threads of the application may send over it
        self._posting = False
        self._wake = Wake()
        self._poller = zmq.Poller()
        self._thread = threading.Thread(target=self._run, name="reelwire-client", daemon=True)
        _links.add(self)
        self._thread.start()

    def when_ended(self, ended: Callable[[], None]) -> None:
        """Have `ended` called when the thread ends, as `ask` calls its `answered`; at once if it has."""
        with self.lock:
            if self._ended:
                ended()
            else:
                self._when_ended.append(ended)

    def abandon(self, session: SessionView) -> None:
        """Say that nobody holds the session any more; takes no lock, so that a finalizer may call it."""
        self.later(partial(self._forget, session))

    def later(self, work: Callable[[], None]) -> None:
        """Have something done under the lock, by the thread; takes no lock, so that a finalizer may call it."""
        self._later.append(work)
        self._wake.set()

    def has_room(self, news: str) -> bool:
        """Whether little enough waits to be sent; if not, `Changed` will name `news` when it is so. Under the lock."""
        if self._outbox_bytes <= ROOM_BYTES:
            return True
        self._crowded.add(news)
        return False

    def leave(self) -> None:
        """Ask the thread to say goodbye and end; takes no lock, so that a finalizer may call it."""
        self._leaving = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    # --- under the lock ------------------------------------------------------------------------------------------------

    def _act(self, action: e.Send | e.AnswerProbe | e.Reconnect | e.Stop) -> None:
        match action:
            case e.Send(attachment=attachment, message=message):
                kind = type(message)
                if kind is messages.Heartbeat:  # as good a moment as any, and it comes again
                    self._memory.sweep()
                self._goodbye = kind is messages.Goodbye
                self._put(attachment, wire.pack(message))
            case e.AnswerProbe(attachment=attachment, owner=owner):
                self._put(attachment, wire.pack(messages.MemoryProbed(owner, self._memory.probe(owner))))
            case e.Reconnect():
                self._reconnect = True
            case e.Stop():
                self._stopped = True
            case _:
                assert_never(action)

    def _acted(self) -> None:
        if threading.get_ident() == self._thread.ident:  # the thread itself looks before it waits again
            return
        settled = False
        try:
            settled = self._post()
        finally:  # also when a signal's handler has raised
            if not settled:
                self._wake.set()

    def _post(self) -> bool:
        """Send from a thread of the application; whether nothing is left to do for the I/O thread.

        Only what is a single frame: between two frames a signal's handler could raise, and half a message would be sent.
        """
        dealer = self._dealer
        if dealer is None or self._reconnect or self._stopped or self._posting or len(self._outbox) != 1:
            return False
        self._posting = True  # garbage may be collected meanwhile, and a finalizer ask for something in this thread
        try:
            return self._sent(dealer, frames_max=1) and not self._left(dealer)
        except zmq.ZMQError:  # the I/O thread will find out what it means
            return False
        finally:
            self._posting = False

    def _sent(self, dealer: zmq.Socket[bytes], frames_max: float = math.inf) -> bool:
        """Send what has waited longest; whether it could be sent."""
        batch = self._outbox.popleft()  # first of all: what is put meanwhile must not be added to it
        frames = batch.frames()
        if len(frames) > frames_max:
            self._outbox.appendleft(batch)
            return False
        self._outbox_bytes -= batch.nbytes
        try:
            if len(frames) == 1:
                dealer.send(frames[0], zmq.NOBLOCK)
            else:
                dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._outbox_bytes += batch.nbytes
            self._outbox.appendleft(batch)
            if isinstance(error, zmq.Again):
                return False
            raise
        if self._crowded and self._outbox_bytes <= ROOM_BYTES:
            crowded, self._crowded = self._crowded, set()
            for news in crowded:
                self._changed(news)
        return True

    def _left(self, dealer: zmq.Socket[bytes]) -> int:
        """What there is to do with the socket now; to be asked after any use of it, as its descriptor may not tell again."""
        return int(dealer.getsockopt(zmq.EVENTS)) & (_IN | _OUT if self._outbox else _IN)

    def _put(self, attachment: int, packed: wire.Packed) -> None:
        # One message over at most: a big one must not wait for ever for a room that it can't have.
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self.feed(e.OutboxFull)
            return
        if self.core.welcome is not self._welcome:
            self._welcome = self.core.welcome
            self._accepted = wire.Limits.of({} if self._welcome is None else self._welcome.limits)
        last = self._outbox[-1] if self._outbox else None
        before = 0 if last is None else last.nbytes
        if last is None or not last.add(attachment, packed):
            last, before = wire.Batch(attachment, packed, self._accepted), 0
            self._outbox.append(last)
        self._outbox_bytes += last.nbytes - before

    # --- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with zmq.Context() as context:
                self._serve(context)
        except BaseException as error:
            reason = f"the connection to {self._endpoint} broke: {error}"
            self.feed(lambda now: e.Broken(now, reason))
            if not isinstance(error, zmq.ZMQError | OSError):
                raise
        finally:
            self._wake.close()
            with self.lock:
                self._ended = True
                for ended in self._when_ended:
                    ended()

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        dealer = self._connected(context)
        try:
            with self.lock:
                self._flush(dealer)
            wire.prepare(wire.TO_CLIENT, messages.ClientMessage)  # while the hello travels, and no chunk waits
            while not self._stopped:
                if self._reconnect:
                    self._disconnect(dealer, linger_ms=0)
                    dealer = self._connected(context)
                self._turn(dealer)
            with self.lock:
                self._flush(dealer)
        finally:
            self._disconnect(dealer, int(LINGER_S * 1000) if self._goodbye else 0)

    def _disconnect(self, dealer: zmq.Socket[bytes], linger_ms: int) -> None:
        self._memory.close()
        with self.lock:
            self._dealer = None
            dealer.close(linger=linger_ms)

    def _connected(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, _SNDHWM)
        # Only for a literal address: a name would be looked up as IPv6 alone, and localhost is often 127.0.0.1.
        dealer.setsockopt(zmq.IPV6, int("[" in self._endpoint))
        # of each frame, and the header is one of them
        dealer.setsockopt(zmq.MAXMSGSIZE, max(self._limits.frame_bytes_max, self._limits.header_bytes_max))
        try:
            dealer.connect(self._endpoint)
        except zmq.ZMQError:
            dealer.close(linger=0)
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._wake.fileno(), _IN)
        self._poller.register(dealer.getsockopt(zmq.FD), _IN)
        with self.lock:
            self._reconnect = False
            self._outbox.clear()
            self._outbox_bytes = 0
            self._dealer = dealer
            self.feed(e.Connect)
        return dealer

    def _turn(self, dealer: zmq.Socket[bytes]) -> None:
        """Send what waits, wait for something to happen unless it has, and hand in one thing that has arrived."""
        with self.lock:
            self._flush(dealer)
            left, wake_at = self._left(dealer), self.core.wake_at
        arrived = bool(left & _IN)
        if not left:
            wait_ms = None if wake_at is None else max(0, math.ceil((wake_at - time.monotonic()) * 1000))
            ready = [descriptor for descriptor, _ in self._poller.poll(wait_ms)]
            if self._wake.fileno() in ready:
                self._wake.clear()
                ready.remove(self._wake.fileno())
            arrived = bool(ready)
        due = wake_at is not None and time.monotonic() >= wake_at
        received = (arrived or due) and self._receive(dealer)
        if not (self._later or self._leaving or due):  # whoever asks for either wakes this thread afterwards
            return
        with self.lock:
            while self._later:
                self._later.popleft()()
            if self._leaving:
                self.feed(e.Leave)
            elif due and not received:
                self.feed(e.Tick)

    def _forget(self, session: SessionView) -> None:
        if self.core.sessions.get(session.id) is session:  # and not another broker's of the same name
            self.feed(lambda now: e.Forget(now, session.id))

    def _flush(self, dealer: zmq.Socket[bytes]) -> None:
        while self._outbox and self._sent(dealer):
            pass

    def _receive(self, dealer: zmq.Socket[bytes]) -> bool:
        """Hand in what has arrived first; whether there was anything."""
        with self.lock:
            try:
                frames = _received(dealer)
            except zmq.Again:
                return False
        try:
            envelope = wire.decode(frames, wire.TO_CLIENT, self._limits)
        except VersionMismatch as error:
            self._malformed(str(error), version=True)
        except WireError as error:
            self._malformed(str(error), version=False)
        else:
            self._got(envelope)
        return True

    def _got(self, envelope: wire.Envelope[messages.ToClient]) -> None:
        """Hand in what came together, and only then wake whoever waits for it.

        A thread that is woken before this one has stopped to work for a while has to wait for the interpreter, and is put
        to sleep and woken once more. Bytes are copied out of shared memory before anybody has to wait for the lock.
        """
        attachment, memory = envelope.attachment, self._memory
        read = [memory.with_bytes(one) if isinstance(one, messages.Chunk) else one for one in envelope.messages]
        actions: list[e.Action] = []
        with self.lock:
            now = time.monotonic()
            for message, had in zip(envelope.messages, read, strict=True):
                if not isinstance(had, messages.Failure):
                    actions += self.core.handle(e.Received(now, attachment, had))
                elif isinstance(message, messages.Chunk):
                    actions += self.core.handle(e.Unreadable(now, attachment, message, had))
            self._perform(actions)

    def _malformed(self, reason: str, *, version: bool) -> None:
        self.feed(lambda now: e.Malformed(now, reason, version))


def _received(dealer: zmq.Socket[bytes]) -> list[wire.Buffer]:
    frame = dealer.recv(zmq.NOBLOCK, copy=False)
    frames: list[wire.Buffer] = [frame.bytes]
    while frame.more:
        frame = dealer.recv(zmq.NOBLOCK, copy=False)
        frames.append(frame.buffer)
    return frames


@atexit.register
def _leave_all() -> None:
    links = list(_links)
    for link in links:
        link.leave()
    for link in links:
        link.join(2 * LINGER_S)
