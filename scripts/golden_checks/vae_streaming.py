"""Golden set ``vae_streaming``: whole clips, chunks, uneven pieces, the condition of a session, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from reelwire.pipeline.sessions import Sessions
from reelwire.pipeline.wan.vae import (
    VaeConfig,
    VaeDecoder,
    VaeEncoder,
    decoder_of,
    encoder_of,
    load_state,
    vae_network,
)
from reelwire.pipeline.world.condition import ConditionStream, Constants
from reelwire.pipeline.world.geometry import frames_to_bytes

from .line import Comparison, Entry, Line, document, over_files, read_index, tensors

ATOL = 2e-5


def check(folder: Path) -> Iterator[Line]:
    """Compare every file of the set."""
    return over_files(folder, _compare)


def network(folder: Path, name: str) -> tuple[Any, VaeConfig]:
    """The VAE of a weights file (relative to `folder`), loaded, with the sizes that the file's index gives."""
    path = (folder / name).resolve()
    entry = read_index(path.parent)["files"][path.name]
    sizes = entry["model"]
    config = VaeConfig(
        dim=sizes["dim"],
        z_dim=sizes["z_dim"],
        dim_mult=tuple(sizes["dim_mult"]),
        num_res_blocks=sizes["num_res_blocks"],
        temporal_downsample=tuple(sizes["temporal_downsample"]),
        latents_mean=tuple(entry["latent_mean"]),
        latents_std=tuple(entry["latent_std"]),
    )
    vae = vae_network(config)
    load_state(vae, config, tensors(folder, name))
    return vae, config


def _compare(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    kind = name.partition("_")[0].partition(".")[0]
    compare = {
        "weights": _weights,
        "decode": _decode,
        "encode": _encode,
        "condition": _condition,
        "rejected": _rejected,
    }[kind]
    compare(folder, name, entry, found)


def _weights(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    vae, _ = network(folder, name)
    found.equal("parameters", sum(parameter.numel() for parameter in vae.parameters()), entry["params"])


def _decoder(folder: Path, seed: int) -> VaeDecoder:
    return decoder_of(*network(folder, f"weights_seed{seed}.safetensors"))


def _encoder(folder: Path, seed: int) -> VaeEncoder:
    return encoder_of(*network(folder, f"weights_seed{seed}.safetensors"))


def _pieces(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def _decode(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    data = tensors(folder, name)
    decoder, latents = _decoder(folder, entry["seed"]), data["latents"]
    whole = decoder(latents, decoder.new_cache(), is_first=True, is_last=True)
    found.close("frames_whole", whole[0], data["frames_whole"], ATOL)
    splits = {
        "frames_per_chunk": [entry["chunk_size"]] * entry["chunk_count"],
        "uneven_frames": entry["uneven_split"],
    }
    for field, sizes in splits.items():
        cache = decoder.new_cache()
        parts = [
            decoder(part, cache, is_first=at == 0, is_last=at == len(sizes) - 1)
            for at, part in enumerate(torch.split(latents, sizes, dim=2))
        ]
        found.equal(field, [part.shape[2] for part in parts], entry[field])
        streamed = torch.cat(parts, dim=2)
        found.equal(f"{field}: pieces equal the whole clip", streamed, whole)
        found.close(field, streamed[0], data.get("frames_streamed", data["frames_whole"]), ATOL)
    expected = data["frames_uint8"].int()
    found.close("frames_uint8", frames_to_bytes(whole[0, :, : len(expected)]).int(), expected, 1.0)


def _encode(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    data = tensors(folder, name)
    encoder, video = _encoder(folder, entry["seed"]), data["video"][None]
    whole = encoder(video, encoder.new_cache(), is_first=True, is_last=True)
    found.close("latents_whole", whole[0], data["latents_whole"], ATOL)
    size = entry["chunk_size"]
    first = 1 + 4 * (size - 1)
    sizes = [first, *_pieces(video.shape[2] - first, 4 * size)]
    cache = encoder.new_cache()
    parts = [encoder(part, cache, is_first=at == 0) for at, part in enumerate(torch.split(video, sizes, dim=2))]
    streamed = torch.cat(parts, dim=2)
    found.equal("pieces equal the whole clip", streamed, whole)
    found.close("latents_streamed", streamed[0], data.get("latents_streamed", data["latents_whole"]), ATOL)


def _condition(folder: Path, name: str, entry: Entry, found: Comparison) -> None:
    data = tensors(folder, name)
    encoder, image, size = _encoder(folder, entry["seed"]), data["image"], entry["chunk_size"]
    stream = ConditionStream(encoder, image[None], size)
    condition = torch.stack([stream.chunk(index) for index in range(entry["chunk_count"])])
    found.close("condition", condition, data["condition"], ATOL)
    found.equal("mask", condition[:, :, :4], data["condition"][:, :, :4])
    clip = image.new_zeros((1, 3, sum(entry["pixel_frames_per_chunk"]), *image.shape[1:]))
    clip[:, :, 0] = image
    whole = encoder(clip, encoder.new_cache(), is_first=True, is_last=True)[0]
    found.close("latents_whole", whole, data["latents_whole"], ATOL)
    found.equal("pieces equal the whole clip", condition[:, 0, 4:].transpose(0, 1).flatten(1, 2), whole)

    count = data["latents_long"].shape[1]
    again = ConditionStream(encoder, image[None], 1)
    long = torch.cat([again.chunk(index)[0, 4:] for index in range(count)], dim=1)
    found.close("latents_long", long, data["latents_long"], ATOL)
    found.close("constant_latent", long[:, -1], data["constant_latent"], ATOL)
    settling = ConditionStream(encoder, image[None], 1, Constants())
    short = torch.cat([settling.chunk(index)[0, 4:] for index in range(count)], dim=1)
    found.equal("found to be constant, and encoded on", short, long)
    start = entry["bitwise_constant_from_latent"]
    found.equal("constant from there on", long[:, start:], long[:, start : start + 1].expand_as(long[:, start:]))
    other = ConditionStream(encoder, -image[None].flip(-1), 1)
    latent = [other.chunk(index)[0, 4:] for index in range(start + 1)][-1]
    found.equal("the constant doesn't depend on the image", latent[:, 0], long[:, start])


_ORDER = (RuntimeError, IndexError)
"""The reference's IndexError for a decode out of order is an accident of its cache; ours is the RuntimeError of an encode."""
_ACCEPTED: dict[str, tuple[type[Exception], ...]] = {
    "ValueError": (ValueError,),
    "KeyError": (KeyError,),
    "RuntimeError": _ORDER,
    "IndexError": _ORDER,
}


def _rejected(folder: Path, name: str, _entry: Entry, found: Comparison) -> None:
    seeds = [key for key in read_index(folder)["files"] if key.startswith("weights_")]
    vae, config = network(folder, seeds[0])
    for case in document(folder, name)["cases"]:
        text, error = case["case"], case["error"]
        run = _case(text, encoder_of(vae, config), decoder_of(vae, config))
        try:
            run()
            raised: Exception | None = None
        except (ValueError, RuntimeError, LookupError) as refusal:
            raised = refusal
        fits = raised is None if error is None else isinstance(raised, _ACCEPTED[error])
        found.equal(f"{text} ({error})", fits or repr(raised), True)


def _case(text: str, encoder: VaeEncoder, decoder: VaeDecoder) -> Callable[[], object]:
    cache, sessions = encoder.new_cache(), Sessions[object]()

    def encode(frames: int, *, is_first: bool, is_last: bool = False) -> object:
        return encoder(torch.zeros(1, 3, frames, 16, 16), cache, is_first=is_first, is_last=is_last)

    def twice() -> object:
        stream = ConditionStream(encoder, torch.zeros(1, 3, 16, 16), 1)
        return [stream.chunk(0), stream.chunk(0)]

    def register_twice() -> object:
        sessions.open("a", object())
        sessions.open("a", object())
        return sessions

    words = text.split()
    if text.startswith("encode first chunk with"):
        return lambda: encode(int(words[4]), is_first=True)
    if text.startswith("encode later chunk with ") and words[4].isdecimal():
        return lambda: [encode(1, is_first=True), encode(int(words[4]), is_first=False)]
    latent = torch.zeros(1, decoder.config.z_dim, 1, 2, 2)
    cases: dict[str, Callable[[], object]] = {
        "encode later chunk without a first chunk": lambda: encode(4, is_first=False),
        "encode another chunk after the last chunk": lambda: [
            encode(1, is_first=True, is_last=True),
            encode(4, is_first=False),
        ],
        "decode later chunk without a first chunk": lambda: decoder(latent, decoder.new_cache(), is_first=False),
        "register the same handle twice": register_twice,
        "encode with an unknown handle": lambda: sessions["a"],
        "release an unknown handle": lambda: sessions.close("a"),
        "encode condition chunk 0 twice in one session": twice,
    }
    return cases[text.partition(" (")[0]]
