"""Pictures and clips, in and out."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from reelwire import media
from reelwire.errors import RequestError, UsageError
from reelwire.media import VideoWriter, contact_sheet, load_image, read_video, shrink

Pixels = NDArray[np.uint8]


def ramp(height: int, width: int) -> Pixels:
    """A smooth picture in which every corner has its own colour."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns * 255 // width, rows * 255 // height, np.full_like(rows, 40)], -1).astype(np.uint8)


def clip(frames: int, height: int = 48, width: int = 64) -> Pixels:
    """A smooth clip whose third channel counts the frames."""
    pictures = np.repeat(ramp(height, width)[None], frames, axis=0)
    pictures[..., 2] = (np.arange(frames) * 8)[:, None, None]
    return pictures


def refused(path: Path) -> str:
    with pytest.raises(RequestError) as caught:
        load_image(path)
    assert caught.value.field == "image"
    return caught.value.reason


# --- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.ppm", "a.tiff", "a.webp"])
def test_a_lossless_picture_is_read_as_it_is(tmp_path: Path, name: str) -> None:
    """RGB in, the same RGB out, as uint8 [height, width, 3]."""
    Image.fromarray(ramp(5, 7)).save(tmp_path / name, lossless=True)
    image = load_image(tmp_path / name)
    assert image.dtype == np.uint8
    np.testing.assert_array_equal(image, ramp(5, 7))


def test_a_jpeg_is_turned_as_its_camera_was(tmp_path: Path) -> None:
    """EXIF orientation 6 means that the top of the scene is at the right."""
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(ramp(64, 32)).save(tmp_path / "a.jpg", exif=exif, quality=95)
    image = load_image(tmp_path / "a.jpg")
    assert image.shape == (32, 64, 3)
    assert np.abs(image.astype(int) - np.rot90(ramp(64, 32), -1)).max() < 16


def test_transparency_shows_white(tmp_path: Path) -> None:
    """What lies hidden under full transparency doesn't show; a palette with a transparent entry is treated alike."""
    rgba = np.dstack([ramp(4, 6), np.full((4, 6), 255)]).astype(np.uint8)
    rgba[0, :, 3] = 0
    Image.fromarray(rgba).save(tmp_path / "a.png")
    image = load_image(tmp_path / "a.png")
    assert (image[0] == 255).all()
    np.testing.assert_array_equal(image[1:], ramp(4, 6)[1:])
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putdata([0, 1])
    palette.save(tmp_path / "p.png", transparency=0)
    np.testing.assert_array_equal(load_image(tmp_path / "p.png"), [[[255, 255, 255], [40, 50, 60]]])


def test_other_kinds_of_pixels_become_rgb(tmp_path: Path) -> None:
    """Grey, grey with 16 bits, black and white, palette and CMYK: all become 8-bit RGB of the same look."""
    grey = np.array([[0, 128, 255]], np.uint8)
    wanted = np.repeat(grey[..., None], 3, axis=2)
    Image.fromarray(grey).save(tmp_path / "l.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "l16.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "l16.tiff")
    Image.fromarray(wanted).quantize(4).save(tmp_path / "p.png")
    Image.fromarray(wanted).convert("CMYK").save(tmp_path / "c.tiff")
    for name in ("l.png", "l16.png", "l16.tiff", "p.png", "c.tiff"):
        assert np.abs(load_image(tmp_path / name).astype(int) - wanted).max() <= 1, name
    Image.fromarray(grey > 100).save(tmp_path / "b.png")
    np.testing.assert_array_equal(load_image(tmp_path / "b.png")[0, :, 0], [0, 255, 255])


def test_of_an_animation_the_first_picture_is_taken(tmp_path: Path) -> None:
    """A GIF of two pictures gives its first."""
    first, second = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert load_image(tmp_path / "a.gif")[0, 0].tolist() == [255, 0, 0]


def test_what_is_no_picture_is_refused_with_the_field(tmp_path: Path) -> None:
    """No file, a folder, other bytes, a cut file, floating-point pixels, a format that runs programs."""
    assert "is not a file" in refused(tmp_path / "none.png")
    assert "is not a file" in refused(tmp_path)
    (tmp_path / "text.png").write_text("hello")
    assert "can't be read" in refused(tmp_path / "text.png")
    (tmp_path / "page.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    assert "can't be read" in refused(tmp_path / "page.png")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:6000])
    assert "can't be read" in refused(tmp_path / "cut.png")
    Image.fromarray(np.ones((2, 2), np.float32)).save(tmp_path / "f.tiff")
    assert "floating-point pixels" in refused(tmp_path / "f.tiff")


@pytest.mark.parametrize("side", [9500, 14000])
def test_a_picture_that_unpacks_to_too_much_is_refused_unread(
    tmp_path: Path, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decompression bomb is refused by the size that its header claims; its pixels are never unpacked."""
    Image.new("1", (side, side)).save(tmp_path / "bomb.png")

    def unpacked(*_: object) -> None:
        pytest.fail("its pixels were unpacked")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", unpacked)
    assert f"accepted: {media.IMAGE_PIXELS_MAX}" in refused(tmp_path / "bomb.png")


def test_a_large_picture_is_reduced_by_the_least_whole_factor(tmp_path: Path) -> None:
    """A picture over the limit becomes the mean of its squares, with the border rounded up; one within stays."""
    Image.fromarray(ramp(50, 61)).save(tmp_path / "a.png")
    image = load_image(tmp_path / "a.png", bytes_max=3 * 17 * 21)
    assert image.shape == (17, 21, 3)
    expected = ramp(50, 61)[:48, :60].reshape(16, 3, 20, 3, 3).mean(axis=(1, 3))
    assert np.abs(image[:16, :20] - expected).max() <= 1
    assert shrink(ramp(4, 4), 48).shape == (4, 4, 3)
    assert shrink(ramp(4, 4), 47).shape == (2, 2, 3)
    assert shrink(ramp(4, 4), 0).shape == (1, 1, 3)


@pytest.mark.parametrize("array", [np.zeros((2, 2, 3), np.float32), np.zeros((2, 2, 4), np.uint8),
                                   np.zeros((2, 2), np.uint8), np.zeros((0, 2, 3), np.uint8)])  # fmt: skip
def test_an_array_that_is_no_picture_is_refused(array: Pixels) -> None:
    """The sentence says dtype and shape, and what is accepted."""
    with pytest.raises(RequestError, match=r"image: is .*; accepted: uint8\[height, width, 3\]"):
        shrink(array)


# --- clips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("height", "width"), [(48, 64), (47, 63)])
def test_a_clip_comes_back_nearly_as_it_was(tmp_path: Path, height: int, width: int) -> None:
    """Frames, their number, their rate and nearly their colours survive; odd sides are repeated to even ones."""
    frames = clip(20, height, width)
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.write(frames[:9])
        writer.write(frames[9])
        writer.write(frames[10:])
    back, fps = read_video(tmp_path / "a.mp4")
    assert back.dtype == np.uint8
    assert (fps, writer.frames) == (16.0, 20)
    assert back.shape == (20, height + height % 2, width + width % 2, 3)
    assert np.abs(back[:, :height, :width].astype(int) - frames).mean() < 4
    np.testing.assert_allclose(back[:, -1], back[:, height - 1], atol=24)


def test_equal_frames_give_equal_bytes(tmp_path: Path) -> None:
    """Two clips of the same frames are the same file, however the frames were handed in."""
    for name, step in (("a.mp4", 1), ("b.mp4", 8)):
        with VideoWriter(tmp_path / name, Fraction(30000, 1001)) as writer:
            for start in range(0, 16, step):
                writer.write(clip(16)[start : start + step])
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    assert read_video(tmp_path / "a.mp4")[1] == pytest.approx(29.97, abs=1e-3)


def test_a_clip_that_is_closed_early_is_whole(tmp_path: Path) -> None:
    """After a single frame the file plays, its index stands at the front, and nothing else is left."""
    writer = VideoWriter(tmp_path / "a:b.mp4", 16)
    writer.write(clip(1))
    assert not (tmp_path / "a:b.mp4").exists()
    writer.close()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a:b.mp4"]
    assert len(read_video(tmp_path / "a:b.mp4")[0]) == 1
    data = (tmp_path / "a:b.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")
    with pytest.raises(UsageError, match="closed already"):
        writer.write(clip(1))


def test_without_a_frame_there_is_no_file(tmp_path: Path) -> None:
    """Closing a clip that got nothing leaves the folder as it was."""
    with VideoWriter(tmp_path / "a.mp4", 16):
        pass
    assert not list(tmp_path.iterdir())


def test_an_aborted_clip_leaves_what_was_there(tmp_path: Path) -> None:
    """A block that raises, and `abort`, drop the new file and keep the old one."""
    (tmp_path / "a.mp4").write_text("old")

    def failing() -> None:
        with VideoWriter(tmp_path / "a.mp4", 16) as writer:
            writer.write(clip(3))
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    writer = VideoWriter(tmp_path / "a.mp4", 16)
    writer.write(clip(3))
    writer.abort()
    writer.close()
    assert (tmp_path / "a.mp4").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_frames_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Another dtype, shape or size than before: refused by name, and the clip goes on."""
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.write(clip(2))
        for wrong in (clip(2, 48, 66), clip(2).astype(np.float32), clip(2)[..., :2], clip(2)[0, 0], None, [1]):
            with pytest.raises(RequestError) as caught:
                writer.write(wrong)  # type: ignore[arg-type]
            assert caught.value.field == "frames"
        writer.write(clip(1))
    assert len(read_video(tmp_path / "a.mp4")[0]) == 3


def test_where_a_clip_can_not_be_is_said_at_once(tmp_path: Path) -> None:
    """A missing folder, a folder as the file, a rate that is none."""
    for path in (tmp_path / "none" / "a.mp4", tmp_path):
        with pytest.raises(RequestError, match="is not a file in a folder that exists"):
            VideoWriter(path, 16)
    for name in ("a\0b.mp4", "\ud800.mp4", "x" * 252 + ".mp4", "é" * 200 + ".mp4"):
        with pytest.raises(RequestError, match=r"path: .* can't be a file"):
            VideoWriter(tmp_path / name, 16)
    with pytest.raises(RequestError, match="path: "):
        VideoWriter(None, 16)  # type: ignore[arg-type]
    for fps in (0, -1, 1000, float("nan"), 1e-9, "x", None, True, 10**400):
        with pytest.raises(RequestError, match=r"fps: .*accepted: "):
            VideoWriter(tmp_path / "a.mp4", fps)  # type: ignore[arg-type]
    for crf in (-1, 52, "18", None, 1.5, True):
        with pytest.raises(RequestError, match=r"crf: .*accepted: an integer from 0 to 51"):
            VideoWriter(tmp_path / "a.mp4", 16, crf=crf)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("fps", "crf"), [(0.01, 18), (Fraction(30000, 1001), 0), (np.float32(16), 51), (999.9, 18)])
def test_the_edges_of_rate_and_quality_are_written(tmp_path: Path, fps: float, crf: int) -> None:
    """What is accepted at the edges makes a file with its frames."""
    with VideoWriter(tmp_path / "a.mp4", fps, crf=crf) as writer:
        writer.write(clip(3))
    frames, rate = read_video(tmp_path / "a.mp4")
    assert len(frames) == 3
    assert rate == pytest.approx(float(fps), rel=1e-3)


@pytest.mark.parametrize("name", ["x" * 251 + ".mp4", "é" * 125 + ".mp4"])
def test_the_longest_name_is_written(tmp_path: Path, name: str) -> None:
    """A name of as many bytes as a file's may have, however many letters that are."""
    with VideoWriter(tmp_path / name, 16) as writer:
        writer.write(clip(1))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_picture_that_no_encoder_takes_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """Too long a side is refused by name; what the encoder itself refuses is too, and smaller frames still go in."""
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        with pytest.raises(RequestError, match=r"frames: .*accepted: sides of 1 to 16384"):
            writer.write(np.zeros((2, 16386, 3), np.uint8))
        # a view without memory of its own: refused before a pixel is read
        huge = np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (16384, 16384, 3))
        with pytest.raises(RequestError, match=r"frames: are 16384 x 16384, which the encoder .* refuses"):
            writer.write(huge)
        assert not list(tmp_path.iterdir())
        writer.write(clip(1))
    assert len(read_video(tmp_path / "a.mp4")[0]) == 1


def test_what_is_no_path_or_no_array_is_refused(tmp_path: Path) -> None:
    """Nothing, a number, bytes, a NUL, half a letter, too long a name: the field is named, as for any other mistake."""
    for wrong in (None, 7, b"a.png", "a\0b", "\ud800", "x" * 5000, tmp_path):
        with pytest.raises(RequestError, match=r"image: .*accepted: the path of a file"):
            load_image(wrong)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"video: .*accepted: the path of a file"):
            read_video(wrong)  # type: ignore[arg-type]
    for value in (None, [1], "a.png"):
        with pytest.raises(RequestError, match=r"image: .*accepted: an array"):
            shrink(value)  # type: ignore[arg-type]


def test_what_is_no_clip_is_refused_with_the_field(tmp_path: Path) -> None:
    """No file, other bytes, a cut file, and frames that take more than is accepted."""
    (tmp_path / "text.mp4").write_text("hello")
    with VideoWriter(tmp_path / "a.mp4", 16) as writer:
        writer.write(clip(3))
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "a.mp4").read_bytes()[:200])
    for name in ("none.mp4", "text.mp4", "cut.mp4"):
        with pytest.raises(RequestError) as caught:
            read_video(tmp_path / name)
        assert caught.value.field == "video"
    with pytest.raises(RequestError, match="takes more than 20000 bytes"):
        read_video(tmp_path / "a.mp4", bytes_max=20_000)


@pytest.mark.data
def test_real_media_are_read() -> None:
    """A photograph is read whole; a clip in full HD is read until it takes more than was accepted."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data" / "editing"
    if not folder.is_dir():
        pytest.skip("the clips don't lie beside the repository")
    with pytest.raises(RequestError, match="takes more than 10000000 bytes of frames"):
        read_video(folder / "rv2v_case1_source.mp4", bytes_max=10_000_000)
    assert load_image(folder / "rv2v_case1_reference.jpg").shape == (2173, 1280, 3)


# --- contact sheet ---------------------------------------------------------------------------------------------------


def test_a_contact_sheet_shows_source_and_frames(tmp_path: Path) -> None:
    """The source stands on the left, the frames in rows beside it, each over its time."""
    frames = [np.full((30, 40, 3), value, np.uint8) for value in (10, 60, 110, 160, 210)]
    source = np.full((60, 80, 3), (255, 0, 0), np.uint8)
    contact_sheet(source, frames, tmp_path / "s.png", times_s=[0, 0.5, 1, 1.5, 2], labels=list("wasdw"), columns=3,
                  cell_width=40)  # fmt: skip
    sheet = load_image(tmp_path / "s.png")
    assert sheet[10, 10].tolist() == [255, 0, 0]
    found = {int(value) for value in np.unique(sheet[..., 0])}
    assert found.issuperset({10, 60, 110, 160, 210})
    rows = [np.argwhere((sheet == value).all(axis=2)).min(axis=0) for value in (10, 60, 110, 160, 210)]
    assert rows[0][0] == rows[1][0] == rows[2][0] < rows[3][0] == rows[4][0]
    assert [path.name for path in tmp_path.iterdir()] == ["s.png"]


def test_a_contact_sheet_needs_no_source_and_no_labels(tmp_path: Path) -> None:
    """One frame and its time are enough."""
    contact_sheet(None, [ramp(30, 40)], tmp_path / "s.png", times_s=[0])
    assert load_image(tmp_path / "s.png").shape[1] > 320


def test_a_contact_sheet_of_nothing_is_refused(tmp_path: Path) -> None:
    """No frames, frames of two sizes, too few times or labels: refused by name."""
    two = [ramp(4, 4), ramp(4, 4)]
    for frames, times, labels, field in (([], [], [], "frames"), ([ramp(4, 4), ramp(5, 4)], [0, 1], [], "frames"),
                                         (two, [0], [], "times_s"), (two, [0, 1], ["w"], "labels")):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            contact_sheet(None, frames, tmp_path / "s.png", times_s=times, labels=labels)
        assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_pillow_and_pyav_are_loaded_only_when_they_are_needed() -> None:
    """Importing the module loads neither."""
    program = "import sys, reelwire.media; print(sorted({'av', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_clip_that_does_not_say_its_length_is_read_to_its_end(tmp_path: Path) -> None:
    """Matroska holds no count of frames; all of them come back, in order."""
    import av

    with av.open(str(tmp_path / "a.mkv"), "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=10)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "yuv420p"
        for level in range(0, 250, 25):
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    frames, fps = read_video(tmp_path / "a.mkv")
    assert (frames.shape, fps) == ((10, 16, 32, 3), 10.0)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), np.arange(0, 250, 25), atol=12)
