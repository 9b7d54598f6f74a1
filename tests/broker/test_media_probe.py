"""What is looked into before a request is taken: real clips and pictures pass, with their facts, and nothing else does."""

from __future__ import annotations

import io
import os
import signal
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from reelwire.broker import prober as prober_module
from reelwire.broker.media_probe import Question, Unfit, look
from reelwire.broker.media_roots import Refused
from reelwire.broker.prober import Prober, _parsed
from reelwire.job_spec import MediaInput, MediaKind
from reelwire.media import VideoWriter, read_video

FRAMES, HEIGHT, WIDTH = 40, 48, 64
DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "editing"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clip that can't be compressed well, so that every frame has bytes to cut."""
    path = tmp_path_factory.mktemp("clips") / "a.mp4"
    noise = np.random.default_rng(0)
    with VideoWriter(path, 25) as writer:
        for _ in range(FRAMES):
            writer.write(noise.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8))
    return path


@pytest.fixture
def prober() -> Iterator[Prober]:
    prober = Prober()
    yield prober
    prober.close()


def facts(path: Path, kind: MediaKind = "video", frames_max: int = 1000, pixels_max: int = 1 << 26) -> dict[str, Any]:
    return look(Question(str(path), kind, frames_max, pixels_max))


def refused(path: Path, kind: MediaKind = "video", **more: int) -> str:
    with pytest.raises(Unfit) as caught:
        facts(path, kind, **more)
    assert "\n" not in str(caught.value)
    assert str(path) not in str(caught.value), "it is the store's name for it, not the client's"
    return str(caught.value)


def remuxed(clip: Path, path: Path, form: str) -> Path:
    """The same packets in another container."""
    with av.open(str(clip)) as source, av.open(str(path), "w", format=form) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return path


def picture(path: Path, form: str = "PNG", size: tuple[int, int] = (WIDTH, HEIGHT), **more: Any) -> Path:
    Image.new("RGB", size, "red").save(path, form, **more)
    return path


# --- clips -----------------------------------------------------------------------------------------------------------


def test_groups_08_facts_of_a_clip(clip: Path) -> None:
    """Frames are counted; sides and rate are those of the frames."""
    assert facts(clip) == {"frames": FRAMES, "height": HEIGHT, "width": WIDTH, "fps": 25.0}
    assert facts(clip, frames_max=FRAMES)["frames"] == FRAMES


@pytest.mark.parametrize("form", ["matroska", "mpegts", "mov"])
def test_other_containers_are_clips_too(clip: Path, tmp_path: Path, form: str) -> None:
    """Those that say how many frames there are, and those that don't."""
    assert facts(remuxed(clip, tmp_path / "b", form)) == {
        "frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH,
        "fps": 25.0,
    }


@pytest.mark.parametrize(
    ("codec", "form", "options"),
    [("libvpx", "webm", {"auto-alt-ref": "1", "lag-in-frames": "16"}), ("mpeg4", "avi", {"bf": "2"}),
     ("mpeg2video", "mpeg", {"bf": "2"}), ("mjpeg", "mov", {}), ("libx265", "mp4", {})],
)  # fmt: skip
def test_frames_are_those_that_a_reader_gets(tmp_path: Path, codec: str, form: str, options: dict[str, str]) -> None:
    """Also where packets hold frames that aren't shown, or come in another order than they are shown in."""
    if codec not in av.codecs_available:
        pytest.skip(f"{codec} isn't here")
    path = tmp_path / "clip"
    with av.open(str(path), "w", format=form) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for number in range(30):
            picture = np.roll(np.tile(np.arange(96, dtype=np.uint8)[:, None], (64, 1, 3)), number, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24").reformat(format=stream.pix_fmt)))
        container.mux(stream.encode(None))
    clip, fps = read_video(path)
    assert facts(path) == {"frames": len(clip), "height": 64, "width": 96, "fps": fps}
    assert len(clip) == 30


def test_a_clip_is_as_it_is_shown(clip: Path, tmp_path: Path) -> None:
    """A phone that was held upright writes lying frames and says so: the sides are those of the upright ones."""
    data = bytearray(clip.read_bytes())
    at = data.index(b"tkhd") + 4 + 40
    data[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, HEIGHT << 16, 0, 1 << 30)
    turned = tmp_path / "turned.mp4"
    turned.write_bytes(data)
    assert (facts(turned)["height"], facts(turned)["width"]) == (WIDTH, HEIGHT)


def test_a_clip_of_one_frame_and_an_animation_are_clips(tmp_path: Path) -> None:
    """What has frames that follow at a rate."""
    with VideoWriter(tmp_path / "one.mp4", Fraction(30000, 1001)) as writer:
        writer.write(np.zeros((16, 16, 3), np.uint8))
    assert facts(tmp_path / "one.mp4") == {"frames": 1, "height": 16, "width": 16, "fps": 30000 / 1001}
    first, *others = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    first.save(tmp_path / "a.gif", save_all=True, append_images=others, duration=100)
    assert facts(tmp_path / "a.gif")["frames"] == 3


def test_limits_of_an_input_hold(clip: Path) -> None:
    """Too many frames, too many pixels: the sentence says how many are accepted."""
    assert f"it has more than {FRAMES - 1} frames; accepted: a clip of at most {FRAMES - 1} frames" in refused(
        clip, frames_max=FRAMES - 1
    )
    pixels = HEIGHT * WIDTH
    assert refused(clip, pixels_max=pixels - 1) == f"it is {HEIGHT} x {WIDTH} in size; accepted: {pixels - 1} pixels"
    assert facts(clip, pixels_max=pixels)


def test_a_clip_that_is_cut_off_is_refused(clip: Path, tmp_path: Path) -> None:
    """In the middle of a packet; one that ends early between two has the frames that are there."""
    data = clip.read_bytes()
    path = tmp_path / "cut"
    for share in (0.99, 0.6, 0.1):
        path.write_bytes(data[: int(len(data) * share)])
        assert "it is cut off or damaged after" in refused(path)
    path.write_bytes(data[:100])
    assert "it holds no moving picture" in (reason := refused(path)) or "is no clip that can be read" in reason
    streamed = remuxed(clip, tmp_path / "b", "matroska").read_bytes()
    path.write_bytes(streamed[: len(streamed) * 6 // 10])
    assert 0 < facts(path)["frames"] < FRAMES


def test_a_clip_whose_ends_cannot_be_decoded_is_refused(clip: Path, tmp_path: Path) -> None:
    """Bytes of the first or the last frames that are no picture."""
    data = clip.read_bytes()
    body = data.index(b"mdat") + 4
    for start, end in ((body + 1000, body + 9000), (len(data) - 9000, len(data))):
        broken = tmp_path / "broken"
        broken.write_bytes(data[:start] + b"\xff" * (end - start) + data[end:])
        assert "is no clip that can be read" in refused(broken)


def test_headers_are_not_believed(clip: Path, tmp_path: Path) -> None:
    """Neither a claim of a huge picture, nor of frames that aren't there."""
    data = bytearray(clip.read_bytes())
    at = data.index(b"avc1") + 4 + 24
    data[at : at + 4] = struct.pack(">2H", 65535, 65535)
    huge = tmp_path / "huge.mp4"
    huge.write_bytes(data)
    assert facts(huge)["width"] == WIDTH, "it is the stream that counts"
    empty = bytearray(clip.read_bytes())
    at = empty.index(b"stsz") + 4 + 8
    empty[at : at + 4] = struct.pack(">I", 0)  # no samples
    huge.write_bytes(empty)
    assert "it holds no frame" in (reason := refused(huge)) or "no clip" in reason


def test_a_clip_in_an_unknown_codec_is_refused(clip: Path, tmp_path: Path) -> None:
    """It has packets, but nobody here could decode them."""
    path = tmp_path / "a.mp4"
    path.write_bytes(clip.read_bytes().replace(b"avc1", b"zzzz").replace(b"avcC", b"zzzZ"))
    assert "in a codec that isn't known here" in refused(path)


def test_a_clip_without_frames_is_refused(tmp_path: Path) -> None:
    """A container with a stream and nothing in it, and one with sound alone."""
    path = tmp_path / "none.mkv"
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.start_encoding()
    assert "it holds no frame" in (reason := refused(path)) or "no clip" in reason
    with av.open(str(path), "w", format="matroska") as container:
        sound = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(sound.encode(frame))
    assert "it holds no moving picture" in refused(path)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "AVIF", "WEBP", "BMP"])
def test_a_picture_is_no_clip(tmp_path: Path, form: str) -> None:
    """Whatever it is called: FFmpeg would read it as a clip of one frame."""
    if form == "AVIF" and form not in Image.registered_extensions().values():
        pytest.skip("Pillow reads no AVIF here")
    path = picture(tmp_path / "a.mp4", form)
    assert "is no clip that can be read" in (reason := refused(path)) or "it is a picture" in reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, world\n" * 100,
        b"\0" * 5000,
        b"RIFF\xff\xff\xff\xffAVI LIST",
        b"\x00\x00\x00\x18ftypmp42" + b"\0" * 64,
    ],
)
def test_what_is_no_medium_is_refused(tmp_path: Path, content: bytes) -> None:
    """Text, nothing, zeros, the first bytes of a clip."""
    path = tmp_path / "a.mp4"
    path.write_bytes(content)
    assert "accepted: " in refused(path)
    assert "accepted: " in refused(path, "image")


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{clip}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nhttp://127.0.0.1:{port}/a.ts\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile '{clip}'\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 33\n",
        '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><Period><BaseURL>file://{clip}</BaseURL></Period></MPD>',
    ],
)
def test_groups_09_nothing_that_a_file_refers_to_is_opened(clip: Path, tmp_path: Path, playlist: str) -> None:
    """No playlist of another file or of an address is followed, whatever it is called, not even to look."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        text = playlist.format(clip=clip, port=server.getsockname()[1])
        for name in ("a.m3u8", "a.mp4", "a.ffconcat", "a.sdp", "a.mpd"):
            (tmp_path / name).write_text(text)
            assert "is no clip that can be read" in refused(tmp_path / name)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.data
def test_real_media_pass() -> None:
    """Clips and a photograph of a public benchmark."""
    if not DATA.is_dir():
        pytest.skip("the clips don't lie beside the repository")
    assert facts(DATA / "v2v_case2_source.mp4") == {
        "frames": 150, "height": 1080, "width": 1920, "fps": pytest.approx(29.97, abs=0.001),
    }  # fmt: skip
    assert facts(DATA / "rv2v_case1_source.mp4") == {"frames": 125, "height": 1920, "width": 1080, "fps": 25.0}
    assert facts(DATA / "rv2v_case1_reference.jpg", "image") == {"frames": 1, "height": 2173, "width": 1280}
    assert "is no clip" in refused(DATA / "rv2v_case1_reference.jpg")


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_groups_08_facts_of_a_picture(tmp_path: Path, form: str) -> None:
    """Its sides; whatever its name says."""
    assert facts(picture(tmp_path / "a.mp4", form), "image") == {"frames": 1, "height": HEIGHT, "width": WIDTH}


def test_a_picture_is_as_it_is_shown(tmp_path: Path) -> None:
    """Upright, as its EXIF orientation says."""
    exif = Image.Exif()
    exif[0x0112] = 6
    path = picture(tmp_path / "a.jpg", "JPEG", exif=exif)
    assert facts(path, "image") == {"frames": 1, "height": WIDTH, "width": HEIGHT}


def test_a_picture_is_a_single_one(tmp_path: Path, clip: Path) -> None:
    """An animation isn't, and a clip isn't; a photograph with a second view beside it is."""
    first, second = (Image.new("RGB", (16, 16), colour) for colour in ("red", "green"))
    for form in ("GIF", "PNG", "WEBP", "TIFF"):
        first.save(tmp_path / "a", form, save_all=True, append_images=[second])
        assert refused(tmp_path / "a", "image") == "it holds 2 pictures; accepted: a single one"
    first.save(tmp_path / "a", "MPO", save_all=True, append_images=[second])
    assert facts(tmp_path / "a", "image")["frames"] == 1
    assert refused(clip, "image").startswith("it can't be read")


def test_a_picture_that_is_cut_off_or_too_large_is_refused(tmp_path: Path) -> None:
    """Also one of which only the header is large."""
    path = picture(tmp_path / "a.png")
    assert f"it is {HEIGHT} x {WIDTH} in size; accepted: 100 pixels" in refused(path, "image", pixels_max=100)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    path.write_bytes(buffer.getvalue()[:5000])
    assert "it can't be read" in refused(path, "image")
    head = struct.pack(">4s2I5B", b"IHDR", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = ((13, head), (5, b"IDAT" + zlib.compress(b"")[:5]))
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + b"".join(struct.pack(">I", size) + data + struct.pack(">I", zlib.crc32(data)) for size, data in chunks)
    )
    assert "pixels; accepted: " in refused(path, "image")


# --- the process -----------------------------------------------------------------------------------------------------


def test_files_are_looked_into_by_another_process(prober: Prober, clip: Path, tmp_path: Path) -> None:
    """One for all of them; what it says is what it would say here."""
    video, image = MediaInput("video", "video", frames_max=1000), MediaInput("image", "image")
    assert prober.look(clip, video) == facts(clip)
    process = prober._process
    assert process is not None
    path = picture(tmp_path / "a.png")
    assert prober.look(path, image) == facts(path, "image")
    with pytest.raises(Refused) as caught:
        prober.look(path, video)
    assert str(caught.value) == refused(path)
    with pytest.raises(Refused, match="No such file"):
        prober.look(tmp_path / "none", video)
    assert prober._process is process
    prober.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(Refused, match="the broker stops"):
        prober.look(clip, video)


def test_the_process_may_do_little(prober: Prober, clip: Path) -> None:
    """It has bounds on memory, files and time, and a group of its own, so that Ctrl-C isn't for it."""
    prober.look(clip, MediaInput("video", "video"))
    assert prober._process is not None
    pid = prober._process.pid
    limits = Path(f"/proc/{pid}/limits")
    if not limits.exists():
        pytest.skip("no /proc here")
    words = {line[:25].strip(): line[25:].split()[0] for line in limits.read_text().splitlines()[1:]}
    assert words["Max file size"] == words["Max core file size"] == "0"
    assert words["Max address space"] == str(4 << 30)
    assert int(words["Max open files"]) == 64
    assert 0 < int(words["Max cpu time"]) < 60
    assert os.getpgid(pid) == pid


def test_a_file_that_breaks_the_process_is_refused(prober: Prober, clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is looked into by a new process; so is one after the process was killed while nobody needed it."""
    wanted = MediaInput("video", "video")
    prober.look(clip, wanted)
    real = prober._ask

    def killed(process: subprocess.Popen[bytes], line: bytes) -> bytes:
        process.send_signal(signal.SIGSTOP)
        killer = threading.Thread(target=process.kill)
        killer.start()
        try:
            return real(process, line)
        finally:
            killer.join()

    with monkeypatch.context() as patch:
        patch.setattr(prober, "_ask", killed)
        with pytest.raises(Refused, match="it broke what looks into files"):
            prober.look(clip, wanted)
    assert prober.look(clip, wanted)["frames"] == FRAMES
    assert prober._process is not None
    prober._process.kill()
    prober._process.wait()
    assert prober.look(clip, wanted)["frames"] == FRAMES


def test_a_file_that_takes_too_long_is_refused(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and a new one looks into the next file."""
    prober = Prober(limit_s=0.2)
    wanted = MediaInput("video", "video")
    real = prober_module._started
    monkeypatch.setattr(prober_module, "_started", lambda: stopped(real()))
    with pytest.raises(Refused, match=r"it takes more than 0\.2 seconds to look into"):
        prober.look(clip, wanted)
    monkeypatch.undo()
    prober._limit_s = 20.0
    assert prober.look(clip, wanted)["frames"] == FRAMES
    prober.close()


def stopped(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    process.send_signal(signal.SIGSTOP)
    return process


def test_whoever_waits_for_the_process_hears_of_its_end(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that stops doesn't wait for the file that is looked into."""
    prober = Prober()
    started = threading.Event()
    real = prober_module._started

    def start() -> subprocess.Popen[bytes]:
        process = stopped(real())
        started.set()
        return process

    monkeypatch.setattr(prober_module, "_started", start)
    refusals: list[str] = []

    def wait() -> None:
        with pytest.raises(Refused) as caught:
            prober.look(clip, MediaInput("video", "video"))
        refusals.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(20.0)
    prober.close()
    waiting.join(20.0)
    assert refusals == ["it broke what looks into files; accepted: a file that can be read"]


def test_the_process_ends_with_its_broker(clip: Path, wait_for: Callable[..., None]) -> None:
    """Also when that is killed and can say nothing."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom reelwire.broker.prober import Prober\n"
        "from reelwire.job_spec import MediaInput\n"
        "prober = Prober()\nprober.look(Path(sys.argv[1]), MediaInput('video', 'video'))\n"
        "print(prober._process.pid, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program, str(clip)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as broker:
        assert broker.stdout is not None
        pid = int(broker.stdout.readline())
        watched = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        broker.kill()
    if watched is None:
        pytest.skip("no process can be watched here")
    wait_for(watched)
    os.close(watched)


@pytest.fixture
def wait_for() -> Callable[[int], None]:
    """Waits until a descriptor can be read, as that of a process can when it has ended."""
    import select

    def wait(descriptor: int) -> None:
        assert select.select([descriptor], [], [], 20.0)[0]

    return wait


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"[]\n", b"{}\n", b'{"facts": 1}\n', b'{"facts": {}}\n', b'{"facts": {"frames": 1}}\n',
        b'{"facts": {"frames": 1, "height": 2, "width": 3, "more": 4}}\n',
        b'{"facts": {"frames": true, "height": 2, "width": 3}}\n',
        b'{"facts": {"frames": 0, "height": 2, "width": 3}}\n',
        b'{"facts": {"frames": 1, "height": 2, "width": 3, "fps": NaN}}\n',
        b'{"facts": {"frames": 1, "height": 2, "width": 3, "fps": "25"}}\n',
        b'{"refused": 7}\n', b"\xff\xfe\n",
    ],
)  # fmt: skip
def test_what_the_process_says_is_not_trusted(line: bytes) -> None:
    """It has read a stranger's file: only facts of the right types are taken."""
    assert _parsed(line) is None


def test_answers_of_the_process() -> None:
    """Facts and refusals; the latter cut, and as text that can be sent."""
    good = b'{"facts": {"frames": 1, "height": 2, "width": 3, "fps": 25.0}}\n'
    assert _parsed(good) == {"frames": 1, "height": 2, "width": 3, "fps": 25.0}
    said = _parsed(b'{"refused": "' + b"\\udc80" * 1000 + b'"}\n')
    assert isinstance(said, str)
    assert len(said.encode()) == 500
    assert _parsed(b'{"refused": "two\\n lines"}\n') == "two lines"
