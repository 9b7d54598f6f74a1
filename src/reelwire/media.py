"""Pictures and clips, in and out: numpy arrays of uint8 RGB on one side, files on the other. Needs no torch.

A picture is ``[height, width, 3]``, a clip ``[frames, height, width, 3]``. Pillow and PyAV are imported when they are
first needed. Files are written under a temporary name beside their own and renamed when they are whole.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from .errors import RequestError, UsageError

if TYPE_CHECKING:
    import av.container
    import av.video.stream
    from PIL.Image import Image as Picture

Pixels = NDArray[np.uint8]
PathLike = str | os.PathLike[str]

IMAGE_BYTES_MAX = 32 << 20
IMAGE_PIXELS_MAX = 89_478_485
"""Most pixels of a picture file; more is taken for a decompression bomb. 256 MiB of RGB, Pillow's own limit."""
CLIP_BYTES_MAX = 4 << 30

_IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_FPS_MIN = 0.01
_CRF_MAX = 51
_SIDE_MAX = 16384  # of libx264
_BT709 = 1  # ITU-T H.273: the number of BT.709 as matrix, as primaries and as transfer


def load_image(path: PathLike, bytes_max: int = IMAGE_BYTES_MAX) -> Pixels:
    """Read a picture as ``[height, width, 3]`` uint8 RGB, upright as its EXIF orientation says.

    What is transparent shows white; 16 bits per channel are scaled to 8; of an animation the first picture is taken.
    A picture of more than `bytes_max` bytes of RGB is reduced as `shrink` does.

    Args:
        path: AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, TIFF or WebP.
        bytes_max: most bytes of the result.

    Raises:
        RequestError: of the field ``image``: there is no such file, it can't be read as a picture, or it has more than
            `IMAGE_PIXELS_MAX` pixels.
    """
    from PIL import Image, ImageOps

    file = _file("image", path)
    Image.init()
    formats = [name for name in _IMAGE_FORMATS if name in Image.OPEN]
    try:
        with Image.open(file, formats=formats) as opened:
            _check_pixels(file, *opened.size)
            picture = _to_rgb(ImageOps.exif_transpose(opened))
    except RequestError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(file, "too many") from None
    except Exception as error:  # Pillow's readers raise whatever their format's parser raised
        accepted = ", ".join(formats)
        raise RequestError("image", f"{str(file)!r} can't be read ({error}); accepted: {accepted}") from error
    return shrink(np.asarray(picture), bytes_max)


def shrink(image: Pixels, bytes_max: int = IMAGE_BYTES_MAX) -> Pixels:
    """Reduce a picture by the smallest whole factor that fits it into `bytes_max`, each pixel the mean of its square.

    A picture that fits already is returned as it is. Sizes are rounded up, so that no border is lost.

    Raises:
        RequestError: of the field ``image``: it isn't uint8 of shape ``[height, width, 3]``.
    """
    if not isinstance(image, np.ndarray):
        raise RequestError("image", f"is a {type(image).__name__}; accepted: an array, uint8[height, width, 3]")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise RequestError("image", f"is {image.dtype}{list(image.shape)}; accepted: uint8[height, width, 3]")
    height, width, _ = image.shape
    factor = 1
    while 3 * -(-height // factor) * -(-width // factor) > max(bytes_max, 3):
        factor += 1
    if factor == 1:
        return image
    from PIL import Image

    return np.asarray(Image.fromarray(np.ascontiguousarray(image)).reduce(factor))


class VideoWriter:
    """Writes frames to an MP4 of H.264 (yuv420p, BT.709) that every player opens; MPEG-4 where libx264 is missing.

    H.264 in this form has even sides: an odd one is made even by repeating the last row or column. The file appears
    under its name when `close` ran, whole; before, a hidden file with a random name stands beside it. Equal frames give
    equal bytes, with equal versions of PyAV: one encoding thread, no times, no tool names in the file.

    As a context manager it closes, and drops everything if the block raised.

    Args:
        path: where the file will be; one that is there already is replaced.
        fps: frames per second, from 0.01 to below 1000.
        crf: quality of libx264, from 0 to 51; 0 is best, 18 looks lossless, 51 is worst.

    Attributes:
        path: where the file will be.
        frames: frames written so far.

    Raises:
        RequestError: the folder isn't there or the name can't be a file's, or `fps` or `crf` is out of its bounds.
    """

    def __init__(self, path: PathLike, fps: float | Fraction, *, crf: int = 18) -> None:
        """Check what can be checked; the encoder starts with the first frame, which says the size."""
        self.path = _place(path)
        self.frames = 0
        if not isinstance(fps, Real) or isinstance(fps, bool) or not _FPS_MIN <= fps < 1000:
            raise RequestError("fps", f"{fps!r} is not accepted; accepted: a number from {_FPS_MIN} to below 1000")
        if not isinstance(crf, int) or isinstance(crf, bool) or not 0 <= crf <= _CRF_MAX:
            raise RequestError("crf", f"{crf!r} is not accepted; accepted: an integer from 0 to {_CRF_MAX}")
        self._fps = (fps if isinstance(fps, Fraction) else Fraction(float(fps))).limit_denominator(1001)
        self._crf = crf
        self._part = _part_name(self.path)
        self._shape: tuple[int, ...] = ()
        self._container: av.container.OutputContainer | None = None
        self._stream: av.video.stream.VideoStream | None = None
        self._ended = False

    def write(self, frames: Pixels) -> None:
        """Append frames, ``[frames, height, width, 3]`` uint8 RGB, or one of them.

        Raises:
            RequestError: of the field ``frames``: another type or shape, or another size than the frames before.
            UsageError: the writer was closed.
        """
        if self._ended:
            raise UsageError("the video was closed already")
        if not isinstance(frames, np.ndarray):
            raise RequestError("frames", f"are a {type(frames).__name__}; accepted: an array, uint8[frames, H, W, 3]")
        clip = frames[None] if frames.ndim == 3 else frames
        if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[3] != 3 or 0 in clip.shape[1:]:
            raise RequestError("frames", f"is {frames.dtype}{list(frames.shape)}; accepted: uint8[frames, H, W, 3]")
        if self._shape and clip.shape[1:3] != self._shape:
            raise RequestError("frames", f"are {list(clip.shape[1:3])} in size; accepted: {list(self._shape)}")
        if max(clip.shape[1:3]) > _SIDE_MAX:
            raise RequestError("frames", f"are {list(clip.shape[1:3])} in size; accepted: sides of 1 to {_SIDE_MAX}")
        for frame in clip:
            self._encode(frame)

    def close(self) -> None:
        """Finish the file and give it its name; closing again does nothing.

        However early it comes, the file holds all frames that were written. Without a frame there is no file.
        """
        if self._ended:
            return
        self._ended = True
        if self._container is None or self._stream is None:
            return
        try:
            self._container.mux(self._stream.encode(None))
            self._container.close()
            self._part.replace(self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Drop everything; a file that was there before stays as it was."""
        self._ended = True
        if self._container is not None:
            from av.error import FFmpegError

            with suppress(FFmpegError):  # what is dropped can't be finished where the disk is full
                self._container.close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif not self._ended:
            self.abort()

    def _encode(self, frame: Pixels) -> None:
        import av

        height, width = frame.shape[:2]
        if self._container is None or self._stream is None:
            self._start(height + height % 2, width + width % 2)
            self._shape = (height, width)
        assert self._container is not None
        assert self._stream is not None
        if height % 2 or width % 2:
            frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        picture = picture.reformat(format="yuv420p", dst_colorspace="ITU709")
        picture.pts = self.frames
        picture.time_base = 1 / self._fps
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def _start(self, height: int, width: int) -> None:
        import av
        from av.error import FFmpegError

        codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        # "file:" keeps a colon in the name from being read as a protocol
        container = av.open(
            f"file:{self._part}", "w", format="mp4", options={"movflags": "+faststart", "fflags": "+bitexact"}
        )
        stream = container.add_stream(codec, rate=self._fps, options=self._codec_options(codec))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.time_base = 1 / self._fps
        context = stream.codec_context
        context.thread_count = 1
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        try:
            context.open()
        except FFmpegError as error:
            container.close()
            self._part.unlink(missing_ok=True)
            raise RequestError(
                "frames", f"are {height} x {width}, which the encoder {codec} refuses ({error}); accepted: smaller ones"
            ) from error
        self._container, self._stream = container, stream

    def _codec_options(self, codec: str) -> dict[str, str]:
        if codec == "libx264":
            return {"crf": str(self._crf), "preset": "medium", "flags": "+bitexact"}
        return {"qscale": "2", "flags": "+bitexact+qscale"}


def read_video(path: PathLike, bytes_max: int = CLIP_BYTES_MAX) -> tuple[Pixels, float]:
    """Read a clip: its frames, ``[frames, height, width, 3]`` uint8 RGB and upright, and its frames per second.

    Raises:
        RequestError: of the field ``video``: there is no such file, it holds no clip that can be read, or the frames
            take more than `bytes_max` bytes.
    """
    import av
    from av.error import FFmpegError

    file = _file("video", path)
    clip: Pixels | None = None
    count = 0
    try:
        with av.open(f"file:{file}", metadata_errors="replace") as container:
            if not container.streams.video:
                raise RequestError("video", f"{str(path)!r} holds no moving picture")
            stream = container.streams.video[0]
            rate = stream.average_rate or stream.guessed_rate
            for decoded in container.decode(stream):
                frame = _upright(decoded.to_ndarray(format="rgb24"), decoded.rotation)
                if (count + 1) * frame.nbytes > bytes_max:
                    raise RequestError("video", f"{str(path)!r} takes more than {bytes_max} bytes of frames")
                if clip is None:
                    # one array from the start: a list of frames and their stack would be the clip twice
                    clip = np.empty((max(1, min(stream.frames, bytes_max // frame.nbytes)), *frame.shape), np.uint8)
                elif count == len(clip):  # the file said fewer, or nothing
                    clip = np.concatenate([clip, np.empty_like(clip)])
                if frame.shape != clip.shape[1:]:
                    raise RequestError("video", f"{str(path)!r} changes the size of its frames")
                clip[count] = frame
                count += 1
    except (FFmpegError, ValueError, UnicodeDecodeError) as error:
        raise RequestError("video", f"{str(path)!r} can't be read ({error})") from error
    if clip is None or not rate:
        raise RequestError("video", f"{str(path)!r} holds no frame, or doesn't say how fast they follow")
    return clip[:count], float(rate)


def contact_sheet(
    source: Pixels | None,
    frames: Sequence[Pixels],
    path: PathLike,
    *,
    times_s: Sequence[float],
    labels: Sequence[str] = (),
    columns: int = 4,
    cell_width: int = 320,
) -> None:
    """Write a PNG: the source picture, and beside it a grid of frames with their times.

    Args:
        source: the picture on the left, ``[height, width, 3]`` uint8, or None.
        frames: the frames, row by row, all of one size, each ``[height, width, 3]`` uint8.
        path: the file; one that is there already is replaced.
        times_s: the time of each frame in seconds, written below it.
        labels: a word for each frame, written behind its time (such as the keys that were held).
        columns: frames per row.
        cell_width: width of a frame on the sheet, in pixels; the heights follow.

    Raises:
        RequestError: there is no frame, the frames differ in size, or the number of times or labels isn't theirs.
    """
    from PIL import Image, ImageDraw, ImageFont

    sizes = {frame.shape for frame in frames}
    if len(sizes) != 1:
        raise RequestError("frames", f"have {len(sizes)} sizes; accepted: at least one frame, all of one size")
    for name, given in (("times_s", times_s), ("labels", labels)):
        if len(given) != len(frames) and (given or name == "times_s"):
            raise RequestError(name, f"has {len(given)} entries for {len(frames)} frames")
    columns = max(1, min(columns, len(frames)))
    rows = -(-len(frames) // columns)
    height, width = frames[0].shape[:2]
    cell = (cell_width, max(1, round(cell_width * height / width)))
    gap, line = 8, 18
    grid_width, grid_height = columns * (cell[0] + gap) + gap, rows * (cell[1] + line + gap) + gap
    left: Picture | None = None
    if source is not None:
        left = Image.fromarray(np.ascontiguousarray(source))
        left.thumbnail((2 * cell[0], grid_height - 2 * gap - line), Image.Resampling.LANCZOS)
    offset = 0 if left is None else left.width + gap
    sheet = Image.new("RGB", (offset + grid_width, grid_height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    if left is not None:
        sheet.paste(left, (gap, gap))
        draw.text((gap, gap + left.height + 2), "source", fill="black", font=font)
    for number, frame in enumerate(frames):
        x = offset + gap + number % columns * (cell[0] + gap)
        y = gap + number // columns * (cell[1] + line + gap)
        sheet.paste(Image.fromarray(np.ascontiguousarray(frame)).resize(cell, Image.Resampling.LANCZOS), (x, y))
        text = f"{times_s[number]:.2f} s" + (f"  {labels[number]}" if labels else "")
        draw.text((x, y + cell[1] + 2), text, fill="black", font=font)
    with replacing(Path(path)) as part:
        sheet.save(part, format="PNG")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden file beside `path` to write to; it takes the place of `path` when the block has ended without an error.

    So whoever looks finds the old file or the new one, whole.
    """
    part = _part_name(path)
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _to_rgb(picture: Picture) -> Picture:
    from PIL import Image

    mode = picture.mode
    if mode == "F":
        raise RequestError("image", "has floating-point pixels; accepted: 8 or 16 bits per channel")
    if mode == "I" or mode.startswith("I;16"):
        grey = np.clip(np.asarray(picture), 0, 65535).astype(np.uint32)
        return Image.fromarray(((grey * 255 + 32767) // 65535).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        layer = picture.convert("RGBA")
        ground = Image.new("RGBA", layer.size, "white")
        return Image.alpha_composite(ground, layer).convert("RGB")
    return picture.convert("RGB")


def _check_pixels(file: Path, width: int, height: int) -> None:
    if width * height > IMAGE_PIXELS_MAX:
        raise _too_many_pixels(file, f"{width} x {height}")


def _too_many_pixels(file: Path, have: str) -> RequestError:
    return RequestError("image", f"{str(file)!r} has {have} pixels; accepted: {IMAGE_PIXELS_MAX}")


def _upright(frame: Any, rotation: int) -> Pixels:
    turned: Pixels = np.rot90(frame, rotation // 90)
    return turned


def _file(field: str, path: PathLike) -> Path:
    # TypeError: no path at all; the others: one that no file can have
    with suppress(TypeError, ValueError, OSError):
        file = Path(path)
        if file.is_file():
            return file
    raise RequestError(field, f"{str(path)!r} is not a file; accepted: the path of a file")


def _place(path: PathLike) -> Path:
    """Where a file may be written."""
    try:
        place = Path(path)
        str(place).encode()  # PyAV takes names as UTF-8
        found = place.parent.is_dir() and not place.is_dir()
        with suppress(FileNotFoundError):
            place.lstat()  # says what a test for existence hides: a NUL, a name that is too long
    except (TypeError, ValueError, OSError) as error:
        raise RequestError("path", f"{path!r} can't be a file ({error}); accepted: the path of a file") from None
    if not found:
        raise RequestError("path", f"{str(path)!r} is not a file in a folder that exists")
    return place


def _part_name(path: Path) -> Path:
    start = os.fsencode(path.name)[:100].decode("utf-8", "ignore")  # file systems count bytes
    return path.parent / f".{start}.{secrets.token_hex(6)}.part"
