"""What is in a file that a stranger has sent: looked into by a process of its own, not by the broker.

``python -P -m reelwire.broker.media_probe PARENT_PID`` reads a JSON object a line, `Question`, and answers each with
another: ``{"facts": {...}}`` or ``{"refused": "..."}``. FFmpeg gets an open file and no protocol, and only readers of single
files, so that a playlist leads nowhere. The process can put no bytes into a file, has bounds on memory, time and descriptors,
and dies with the broker. That bounds what a broken file costs. It is no sandbox: the process is the broker's user, and could
read what that may read.

What counts is what a reader would get. The packets of a clip are counted, whatever its headers claim; one that is cut in
the middle of a packet is refused, and so is one whose first frame, or whose last frames from the last key frame on,
can't be decoded. A clip that ends early but between two packets has the frames that are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import math
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from reelwire.errors import RequestError
from reelwire.job_spec import MediaKind
from reelwire.media import IMAGE_PIXELS_MAX, load_image

if TYPE_CHECKING:
    import av
    import av.container
    import av.video.stream

MEMORY_BYTES_MAX = 4 << 30
CPU_S_MAX = 30
"""Processor time for one file."""

_CONTAINERS = ("mov", "mp4", "matroska", "webm", "avi", "mpegts", "mpeg", "flv", "ogg", "asf", "gif")
_STILL_BRANDS = ("avif", "heic", "heix", "mif1")
"""ISO base media files that are pictures; sequences of them have other brands."""
_MANY_PICTURES = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
_ATTACHED_PICTURE = 0x400
_TAIL_PACKETS_MAX = 600
_TAIL_BYTES_MAX = 64 << 20
_BEFORE_FIRST_PACKETS_MAX = 100
_PR_SET_PDEATHSIG = 1
_DESCRIPTORS_MAX = 64


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a file; `frames_max` and `pixels_max` as of `job_spec.MediaInput`."""

    path: str
    kind: MediaKind
    frames_max: int
    pixels_max: int


class Unfit(Exception):
    """It isn't what is wanted; the sentence says what is."""


def look(question: Question) -> dict[str, Any]:
    """The facts of a file: ``frames``, ``height``, ``width``; of a clip also ``fps``, and its sides as they are shown.

    Raises:
        Unfit: it isn't what is wanted.
    """
    return _look_at_clip(question) if question.kind == "video" else _look_at_picture(question)


def main() -> None:
    """Answer until standard input ends."""
    _die_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import av.logging

    av.logging.set_level(av.logging.PANIC)
    for name, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _DESCRIPTORS_MAX),
    ):
        with contextlib.suppress(OSError, ValueError):  # not every system has every one
            hard = resource.getrlimit(name)[1]
            least = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(name, (least, least))
    for line in sys.stdin:
        _allow_time()
        try:
            answer: dict[str, Any] = {"facts": look(Question(**json.loads(line)))}
        except Unfit as error:
            answer = {"refused": str(error)}
        except MemoryError:
            answer = {"refused": "it takes more memory to read than is given to a file"}
        except Exception as error:  # noqa: BLE001  whatever a reader raises is about this file alone
            answer = {"refused": f"it can't be read ({type(error).__name__}: {error})"}
        print(json.dumps(answer), flush=True)


# --- clips -----------------------------------------------------------------------------------------------------------


def _look_at_clip(question: Question) -> dict[str, Any]:
    from av.error import FFmpegError

    accepted = (
        f"accepted: a clip of at most {question.frames_max} frames, in MP4, MOV, MKV, WebM, AVI, MPEG, OGG or GIF"
    )
    try:
        with Path(question.path).open("rb") as file, _container(file) as container:
            stream = _video_of(container, accepted)
            _check_pixels(question, stream.codec_context.height, stream.codec_context.width)
            rate = float(stream.average_rate or stream.guessed_rate or 0.0)
            frames, first = _walk(container, stream, question.frames_max, accepted)
    except (FFmpegError, OSError, ValueError) as error:
        raise Unfit(f"it is no clip that can be read ({_said(error)}); {accepted}") from error
    if not frames or first is None:
        raise Unfit(f"it holds no frame; {accepted}")
    if not math.isfinite(rate) or rate <= 0:
        raise Unfit(f"it doesn't say how fast its frames follow; {accepted}")
    _check_pixels(question, first.height, first.width)
    turned = bool(first.rotation // 90 % 2)
    height, width = (first.width, first.height) if turned else (first.height, first.width)
    return {"frames": frames, "height": height, "width": width, "fps": rate}


@contextlib.contextmanager
def _container(file: IO[bytes]) -> Iterator[av.container.InputContainer]:
    import av

    # No protocol has the name "none": what a file refers to can't be opened. Playlists aren't among the readers at all.
    options = {"protocol_whitelist": "none", "format_whitelist": ",".join(_CONTAINERS)}
    with av.open(file, "r", options=options, metadata_errors="replace") as container:
        yield container


def _video_of(container: av.container.InputContainer, accepted: str) -> av.video.stream.VideoStream:
    if container.metadata.get("major_brand", "").strip() in _STILL_BRANDS:
        raise Unfit(f"it is a picture; {accepted}")
    for stream in container.streams.video:
        if int(stream.disposition) & _ATTACHED_PICTURE:  # the cover of a piece of music
            continue
        # None where the codec isn't known, whatever its type says.
        if cast("av.VideoCodecContext | None", stream.codec_context) is None:
            raise Unfit(f"it is written in a codec that isn't known here; {accepted}")
        return stream
    raise Unfit(f"it holds no moving picture; {accepted}")


def _walk(
    container: av.container.InputContainer, stream: av.video.stream.VideoStream, frames_max: int, accepted: str
) -> tuple[int, av.VideoFrame | None]:
    """How many frames there are, and the first one; the packets since the last key frame are decoded, too."""
    context = stream.codec_context
    context.thread_count = 1
    frames, first = 0, None
    tail: list[av.Packet[Any]] | None = None
    tail_bytes = 0
    for number, packet in enumerate(container.demux(stream)):
        if not packet.size:
            continue
        if packet.is_corrupt:
            raise Unfit(f"it is cut off or damaged after {frames} frames; accepted: a whole clip")
        frames += not packet.is_discard
        if frames > frames_max:
            raise Unfit(f"it has more than {frames_max} frames; {accepted}")
        if first is None and number < _BEFORE_FIRST_PACKETS_MAX:
            first = next((frame for frame in context.decode(packet)), None)
        if packet.is_keyframe:
            tail, tail_bytes = [], 0
        if tail is not None:
            tail.append(packet)
            tail_bytes += packet.size
            if len(tail) > _TAIL_PACKETS_MAX or tail_bytes > _TAIL_BYTES_MAX:
                tail = None  # too far from the end of it to decode all the way
    if first is None and frames < _BEFORE_FIRST_PACKETS_MAX:
        first = next((frame for frame in context.decode(None)), None)
    if first is not None and tail:
        context.flush_buffers()
        for last in (*tail, None):
            context.decode(last)
    return frames, first


# --- pictures --------------------------------------------------------------------------------------------------------


def _look_at_picture(question: Question) -> dict[str, Any]:
    try:
        height, width, _ = load_image(question.path, bytes_max=3 * IMAGE_PIXELS_MAX).shape
    except RequestError as error:
        named = repr(question.path)  # the store's name for it says nothing to whoever sent it
        raise Unfit(error.reason.replace(f"{named} ", "it ").replace(f" {named}", "")) from error
    _check_pixels(question, height, width)
    pictures = _pictures(question.path)
    if pictures > 1:
        raise Unfit(f"it holds {pictures} pictures; accepted: a single one")
    return {"frames": 1, "height": height, "width": width}


def _pictures(path: str) -> int:
    """How many pictures there are; a photograph with a second view beside it is one, so JPEG isn't asked."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path, formats=[name for name in _MANY_PICTURES if name in Image.OPEN]) as opened:
            return int(getattr(opened, "n_frames", 1))
    except UnidentifiedImageError:
        return 1


def _check_pixels(question: Question, height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise Unfit("its pictures have no size")
    if height * width > question.pixels_max:
        raise Unfit(f"it is {height} x {width} in size; accepted: {question.pixels_max} pixels")


def _said(error: Exception) -> str:
    if getattr(error, "errno", 0) == errno.EINVAL:  # what FFmpeg says of a format that isn't among those that are read
        return "another format"
    return getattr(error, "strerror", None) or str(error)


# --- the process -----------------------------------------------------------------------------------------------------


def _die_with(parent_pid: int) -> None:
    """End when the thread that started this process does; where the kernel can't see to it, the end of input does."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def _allow_time() -> None:
    """Processor time for the next file; the kernel ends the process when it is used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = math.ceil(used.ru_utime + used.ru_stime) + CPU_S_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()
