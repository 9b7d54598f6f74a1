"""`reelwire stream`: a picture and keys (or camera poses) in, an MP4 and its record out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ReelwireError, RequestError
from .shared import Binding, ConfigFile, Endpoint, Json, Pace, Policy, assignments, load_settings, print_json, tell

if TYPE_CHECKING:
    from .. import Client
    from ..parts import ChunkTiming
    from ..spec import StreamSpec
    from .plan import FirstLook, StreamFlags
    from .recipe import Record
    from .recording import OnChunk


_Keys = Annotated[
    str | None, typer.Option(help='Key trace or a file of one: "0.0 +w; 1.5 -w +d; 2.0 tap l". (default: hold w)')
]
_WallClock = Annotated[
    bool, typer.Option("--wall-clock", help="Play the trace live instead of once per chunk of media time.")
]
_ControlBinding = Annotated[
    Binding | None,
    typer.Option(help="With --wall-clock: keys as they are when a chunk begins, or ahead of it. (default: late)"),
]
_Pace = Annotated[
    Pace, typer.Option(help="As fast as it goes, or no further ahead of the video's clock than two chunks.")
]
_Poses = Annotated[
    Path | None, typer.Option(help="Folder with poses.npy, intrinsics.npy and maybe action.npy, instead of keys.")
]
_Timeline = Annotated[
    Path | None, typer.Option(help="A PNG to draw of when each chunk passed what; a trace file goes beside it.")
]
_WorkerWait = Annotated[
    float, typer.Option("--worker-wait", min=0, help="Seconds to wait for a first worker, which may still load.")
]


def stream(
    image: Annotated[Path | None, typer.Argument(help="The picture that the world starts from.")] = None,
    prompt: Annotated[str | None, typer.Option(help="What the world looks like; `world` needs it.")] = None,
    keys: _Keys = None,
    wall_clock: _WallClock = False,
    control_binding: _ControlBinding = None,
    pace: _Pace = "asap",
    poses: _Poses = None,
    chunks: Annotated[int | None, typer.Option(min=1, help="Length in chunks. (default: 8, or all poses)")] = None,
    frames: Annotated[int | None, typer.Option(help="Length in frames, instead of chunks.")] = None,
    frames_policy: Annotated[
        Policy, typer.Option(help="Frames that don't fill chunks: refuse, or cut to whole ones.")
    ] = "strict",
    seed: Annotated[int | None, typer.Option(help="Seed of the noise.")] = None,
    area: Annotated[int | None, typer.Option(help="Pixels of a frame, about.")] = None,
    window: Annotated[int | None, typer.Option(help="Latent frames that the cache holds; -1: all.")] = None,
    sink: Annotated[int | None, typer.Option(help="First latent frames that stay in the cache.")] = None,
    attention: Annotated[int | None, typer.Option(help="Latent frames that are attended to; -1: all held.")] = None,
    dtype: Annotated[str | None, typer.Option(help="What the model computes in.")] = None,
    parameters: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other parameter of the pipeline.")
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which pipeline. (default: world)")] = None,
    replay: Annotated[
        Path | None, typer.Option("--from", help="Make it again from the JSON that stands beside an MP4.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The MP4 to write; the record goes beside it.")] = Path("world.mp4"),
    timeline: _Timeline = None,
    worker_wait: _WorkerWait = 30.0,
    endpoint: Endpoint = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> None:
    """Stream a world into an MP4. Ctrl-C keeps what there is so far.

    A trace's seconds are media time, so the same trace gives the same MP4 everywhere; with --wall-clock its events are
    sent when their time has come. The record beside the MP4 holds what was applied; --from makes the same frames again.
    The prompt holds for the whole stream: another prompt is another stream.
    """
    from .plan import StreamFlags, first_look

    named = {
        "prompt": prompt,
        "seed": seed,
        "area": area,
        "window": window,
        "sink": sink,
        "attention": attention,
        "dtype": dtype,
    }
    flags = StreamFlags(
        image=image,
        parameters={name: value for name, value in named.items() if value is not None},
        texts=assignments(parameters or (), "set"),
        keys=keys,
        poses=poses,
        wall_clock=wall_clock,
        chunks=chunks,
        frames=frames,
        policy=frames_policy,
        pipeline=pipeline,
        replay=replay,
        out=out,
        control_binding=control_binding,
        pace=pace,
        timeline=timeline,
    )
    look = first_look(flags)
    record = _streamed(flags, look, endpoint, config, worker_wait, quiet=as_json)
    _report(flags, look, record, as_json)


def _streamed(
    flags: StreamFlags, look: FirstLook, endpoint: str | None, config: Path | None, wait_s: float, *, quiet: bool
) -> Record:
    from ..media import load_image
    from ..settings import ClientSettings
    from .local import stopped_by_signals
    from .plan import check_controls, recipe_of
    from .progress import stream_bar
    from .recording import both, record_stream

    name = look.pipeline
    picture = None if look.image is None else load_image(look.image)
    settings = load_settings(config).resolve("client", ClientSettings, {"endpoint": endpoint}).value
    from .. import Client

    with stopped_by_signals(), Client(**asdict(settings)) as client:
        spec = served(client, name, wait_s)
        recipe = look.replayed or recipe_of(flags, spec)
        check_controls(recipe, spec, "from" if look.replayed else None)
        with stream_bar(name, recipe.chunks, quiet=quiet) as moved, _timed(flags, spec) as timed:
            return record_stream(client, spec, recipe, picture, flags.out, both(moved, timed), pace=flags.pace)


def served(client: Client, name: str, wait_s: float) -> StreamSpec:
    """The spec of a pipeline, which is waited for while no worker has come.

    Args:
        client: connected.
        name: of the pipeline.
        wait_s: how long to wait for the first worker, in seconds.

    Raises:
        RequestError: workers are there, and none of them knows it.
        ReelwireError: no worker came in time.
        BrokerUnreachable: the connection is lost.
    """
    from ..client import first_pipelines

    pipelines = client.pipelines
    if not pipelines and wait_s > 0:
        tell(f"waits up to {wait_s:g} s for a worker to come to the broker at {client.endpoint}")
    try:
        pipelines = pipelines or first_pipelines(client, wait_s)
    except TimeoutError:
        reason = f"no worker has come yet to the broker at {client.endpoint}; try again when one is there"
        raise ReelwireError(reason) from None
    if name not in pipelines:
        raise RequestError("pipeline", f"{name!r} is unknown; accepted: {', '.join(sorted(pipelines))}")
    return pipelines[name]


@contextmanager
def _timed(flags: StreamFlags, spec: StreamSpec) -> Iterator[OnChunk]:
    """Note when the chunks passed what, and draw it at the end, whatever that is."""
    from ..timeline import save_timeline

    noted: list[tuple[int, ChunkTiming]] = []
    try:
        yield lambda chunk, _record: noted.append((chunk.index, chunk.timing))
    finally:
        if flags.timeline is not None and noted:
            try:
                save_timeline(flags.timeline, spec, noted, flags.out.stem)
            except OSError as error:
                raise RequestError("timeline", f"{flags.timeline} can't be written ({error.strerror})") from None


def _report(flags: StreamFlags, look: FirstLook, record: Record, as_json: bool) -> None:
    from .progress import print_summary

    # only of a replay that came to its end can it be said
    same = None if look.replayed is None or record.state != "completed" else look.frames_sha256 == record.frames_sha256
    if as_json:
        print_json({**record.to_json(flags.out.parent), "same_frames": same})
    elif record.chunks:
        rows = [("video", str(flags.out)), ("record", str(flags.out.with_suffix(".json")))]
        if flags.timeline is not None:
            rows.append(("timeline", str(flags.timeline)))
        if same is not None:
            rows.append(("same frames as the record", "yes" if same else "no"))
        print_summary(record, rows)
    if record.state == "stopped":
        kept = f"; {flags.out} holds the {record.frames} frames so far" if record.frames else ""
        tell(f"{record.reason}{kept}")
        raise typer.Exit(1)
    if same is False:
        tell(
            f"the frames of {flags.out} are not those of {flags.replay}; versions and devices of both are in their JSON"
        )
        raise typer.Exit(1)
