"""What the ranks of a group do in the tests of the world model's denoise stage; alone, a `Member` does the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from reelwire.pipeline.world.config import ControlKind, WorldConfig, tiny
from reelwire.pipeline.world.denoise_stage import DenoiseStage
from reelwire.pipeline.world.dit_config import WorldDiTConfig
from reelwire.pipeline.world.pipeline import WorldPipeline
from reelwire.spec import RequestError

if TYPE_CHECKING:
    from .rank_program import Member

HEADS = 4
CACHE_BYTES = 1 << 24


def config_of(control: ControlKind, chunk_size: int) -> WorldConfig:
    """A model whose heads can be shared by 2 and 4 ranks."""
    dit = WorldDiTConfig(
        dim=48, layers=2, heads=HEADS, ffn=64, text_dim=10, text_tokens=6, freq_dim=16, control=control
    )
    text = replace(tiny().text, dim=10, text_len=6)
    return replace(tiny(chunk_size, control), dit=dit, text=text, area=40 * 60, window=-1, sink=0)


def built(member: Member, *, control: ControlKind = "cam", chunk_size: int = 3, latents: int = 0) -> DenoiseStage:
    """The stage, as a worker builds it."""
    pipeline = replace(WorldPipeline.of(config_of(control, chunk_size)), latent_cache_bytes=latents)
    parallel = member.parallel
    alone = parallel.world == 1
    stage = pipeline.build("denoise", "cpu") if alone else pipeline.build_parallel("denoise", "cpu", parallel)
    return cast(DenoiseStage, stage)


def handed() -> dict[str, Any]:
    """What encode would have handed on."""
    prompt = torch.randn(1, 6, 10, generator=torch.Generator().manual_seed(1))
    return {"prompt_embeds": prompt, "image_height": 30, "image_width": 50, "source_digest": b"picture"}


def opened(stage: DenoiseStage, session: str, chunks: int, **given: Any) -> dict[str, int]:
    """Open a session; what it takes, as foretold and as it is."""
    request = {"prompt": "a bridge", "seed": 3, **given}
    needed = stage.needed_bytes(chunks, request, handed(), 1 << 30)
    held = stage.initialize(session, chunks, request, handed()).cache_bytes
    return {"needed": needed, "held": held}


def chunk(stage: DenoiseStage, session: str, index: int, control: dict[str, Any]) -> dict[str, Any]:
    """Latent, as rows of numbers, and facts of a chunk whose condition depends on the index alone."""
    shape = (1, 20, *stage._sessions[session].shape[2:])
    condition = torch.randn(shape, generator=torch.Generator().manual_seed(index))
    given = {name: torch.tensor(value) if name in ("poses", "action") else value for name, value in control.items()}
    inputs = {"condition": {"condition": condition}, "control": given}
    made = stage.run(session, index, inputs, is_first=index == 0, is_last=False)
    latent: Tensor = made.outputs["latent"]["latent"]
    assert latent.dtype == torch.float32
    assert latent.is_contiguous()
    return {"latent": latent.tolist(), **made.facts}


def rollout(
    member: Member,
    controls: Sequence[dict[str, Any]],
    *,
    model: dict[str, Any] | None = None,
    anew: Sequence[int] = (),
    **request: Any,
) -> dict[str, Any]:
    """A session; before the chunks in `anew` the group is formed again."""
    generator = torch.get_rng_state()
    stage = built(member, **(model or {}))
    taken = opened(stage, "a", len(controls), **request)
    made = []
    for index, control in enumerate(controls):
        if index in anew:
            member.meet()
        made.append(chunk(stage, "a", index, control))
    rolling = stage._sessions["a"].caches.rolling
    assert torch.equal(torch.get_rng_state(), generator), "somebody drew from the global generator"
    return {
        **taken,
        "default": stage.session_bytes,
        "rolling": rolling.cache_bytes,
        "heads": rolling.heads,
        "made": made,
    }


def known(member: Member, controls: Sequence[dict[str, Any]], fails: Sequence[str] = ()) -> dict[str, Any]:
    """Two sessions with the same beginning, of which the second may find latents; on rank 0 calls of the cache fail."""
    stage = built(member, latents=CACHE_BYTES)
    opened(stage, "a", len(controls), window=9, sink=2)
    opened(stage, "b", len(controls), window=9, sink=2)
    first = [chunk(stage, "a", index, control) for index, control in enumerate(controls)]

    def failing(*_: Any) -> None:
        raise OSError("disk full")

    for name in fails:
        if stage.latents is not None:
            setattr(stage.latents, name, failing)
    second = []
    for index, control in enumerate(controls):
        second.append(chunk(stage, "b", index, control))
        if index == 2 and stage.latents is not None and not fails:
            stage.latents.clear()  # as if all had to leave: the rest is made anew
    return {"keeps": stage.latents is not None, "first": first, "second": second}


def refused(member: Member, controls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each chunk is first asked for with a control that is no good, and in the end there is one chunk too many."""
    stage = built(member, latents=CACHE_BYTES)
    opened(stage, "a", len(controls))
    fields, made = [], []
    for index, control in enumerate(controls):
        try:
            chunk(stage, "a", index, {"poses": [[1.0]]})
        except RequestError as error:
            fields.append(error.field)
        made.append(chunk(stage, "a", index, control))
    beyond = ""
    try:
        chunk(stage, "a", len(controls), controls[0])
    except RuntimeError as error:
        beyond = str(error)
    request = {"prompt": "a bridge", "area": 1}
    try:
        stage.initialize("b", 2, request, handed())
    except RequestError as error:
        fields.append(error.field)
    return {"fields": fields, "made": made, "beyond": beyond}
