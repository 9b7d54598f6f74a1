"""The world model's dataflow, as the broker sees it. No torch.

::

    encode_request --(2)--> [encode] --condition(2)--> [denoise] --latent(2)--> [decode] --frames(2)--> client
                                        client --control(2)----^
"""

from __future__ import annotations

from reelwire.spec import Edge, Parameter, Prefetch, StageSpec, StreamSpec, TensorInput

from .config import WorldConfig
from .keyboard import KEY_ALIASES, KEY_NAMES

LATENTS_MAX = 1024
"""Latent frames of the longest session: the positions of the rotary table."""
PROMPT_CHARACTERS_MAX = 16384
"""Longest prompt; far more than the text encoder reads, and small beside the largest header of a message."""
EDGE_CAPACITY = 2
PREFETCH_DEPTH = 2


def world_spec(config: WorldConfig) -> StreamSpec:
    """The stream ``world`` of a model: stages, edges, prefetch, controls, parameters and their bounds."""
    stride = config.vae.temporal
    return StreamSpec(
        name="world",
        stages=(
            StageSpec(
                "encode", ("encode_request",), ("condition",), request_tensors=("image", "intrinsics"), settles=True
            ),
            StageSpec("denoise", ("condition", "control"), ("latent",), request_tensors=("intrinsics",)),
            StageSpec("decode", ("latent",), ("frames",)),
        ),
        edges=tuple(
            Edge(artifact, EDGE_CAPACITY) for artifact in ("encode_request", "condition", "control", "latent", "frames")
        ),
        external_inputs=("encode_request", "control"),
        outputs=("frames",),
        initialize_order=("encode", "decode", "denoise"),
        release_order=("decode", "denoise", "encode"),
        control="control",
        chunks_max=LATENTS_MAX // config.chunk_size,
        frames_first=1 + stride * (config.chunk_size - 1),
        frames_next=stride * config.chunk_size,
        fps=config.fps,
        prefetch=Prefetch("encode_request", depth=PREFETCH_DEPTH, follows="control", refill_after="denoise"),
        latency_anchor="control",
        frame_stride=stride,
        control_names=KEY_NAMES,
        control_aliases=dict(KEY_ALIASES),
        control_tensors=_control_tensors(config),
        parameters=_parameters(config),
        tensors=(
            TensorInput("image", "uint8", (-1, -1, 3), required=True),
            TensorInput("intrinsics", "float32", (4,)),
        ),
    )


def _control_tensors(config: WorldConfig) -> tuple[TensorInput, ...]:
    poses = TensorInput("poses", "float", (config.chunk_size, 4, 4), required=True)
    intrinsics = TensorInput("intrinsics", "float", (4,))
    if config.control == "cam":
        return poses, intrinsics
    return poses, intrinsics, TensorInput("action", "float", (-1, 4), required=True)


def _parameters(config: WorldConfig) -> tuple[Parameter, ...]:
    frames, side = "latent frames", 1 << 16
    return (
        Parameter(
            "prompt", "string", "what the world looks like", required=True, minimum=1, maximum=PROMPT_CHARACTERS_MAX
        ),
        Parameter("seed", "integer", "seed of the noise", default=0, minimum=0, maximum=2**63 - 1),
        Parameter(
            "area", "integer", "pixels of a frame, about", default=config.area, minimum=256, maximum=config.area_max
        ),
        Parameter(
            "window",
            "integer",
            f"{frames} that the cache holds; -1: the whole session",
            default=config.window,
            minimum=-1,
            maximum=LATENTS_MAX,
        ),
        Parameter(
            "sink",
            "integer",
            f"first {frames} that are never evicted from the cache",
            default=config.sink,
            minimum=0,
            maximum=LATENTS_MAX,
        ),
        Parameter(
            "attention",
            "integer",
            f"newest {frames} that are attended to; 0 or -1: all that the cache holds",
            default=config.attention,
            minimum=-1,
            maximum=LATENTS_MAX,
        ),
        Parameter(
            "shift", "number", "shift of the noise schedule", default=config.sample_shift, minimum=0.1, maximum=100
        ),
        Parameter(
            "dtype", "string", "what the model computes in", default=config.dtypes[0], choices=tuple(config.dtypes)
        ),
        Parameter(
            "calibration_width",
            "integer",
            "columns of the picture that the given intrinsics belong to; with calibration_height",
            minimum=1,
            maximum=side,
        ),
        Parameter(
            "calibration_height",
            "integer",
            "rows of the picture that the given intrinsics belong to; with calibration_width",
            minimum=1,
            maximum=side,
        ),
    )
