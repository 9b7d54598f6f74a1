"""The streaming VAE: how a clip is cut changes nothing, streams don't see each other, and pieces out of order are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from reelwire.pipeline.wan.config import VaeConfig
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded
from reelwire.pipeline.wan.vae import (
    VaeDecoder,
    VaeEncoder,
    cache_bytes,
    decoder_of,
    encoder_of,
    load_state,
    vae_network,
)
from reelwire.pipeline.wan.vae_cpu import NarrowOnCpu
from reelwire.pipeline.wan.vae_keys import diffusers_name, is_original

CONFIG = VaeConfig(dim=4, num_res_blocks=1)
ROWS, COLUMNS = 3, 5  # an odd latent size in both directions


@pytest.fixture(scope="module")
def network() -> Any:
    vae = vae_network(CONFIG)
    fill_seeded(vae, 5, by_fan_in)
    return vae


@pytest.fixture(scope="module")
def encoder(network: Any) -> VaeEncoder:
    return encoder_of(network, CONFIG)


@pytest.fixture(scope="module")
def decoder(network: Any) -> VaeDecoder:
    return decoder_of(network, CONFIG)


def clip(frames: int, seed: int = 0) -> Tensor:
    shape = (1, 3, frames, ROWS * 8, COLUMNS * 8)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def latents(count: int, seed: int = 0) -> Tensor:
    return torch.randn((1, 16, count, ROWS, COLUMNS), generator=torch.Generator().manual_seed(seed))


def streamed(half: VaeEncoder | VaeDecoder, pieces: tuple[Tensor, ...]) -> Tensor:
    cache = half.new_cache()
    return torch.cat([half(piece, cache, is_first=at == 0) for at, piece in enumerate(pieces)], dim=2)


@pytest.mark.parametrize("sizes", [[1, 4, 4, 4, 4], [5, 12], [9, 8], [1, 8, 4, 4]])
def test_encoding_in_pieces_equals_the_whole_clip(encoder: VaeEncoder, sizes: list[int]) -> None:
    """However a clip is cut, its latents are the same to the last bit."""
    video = clip(17)
    whole = streamed(encoder, (video,))
    assert whole.shape == (1, 16, 5, ROWS, COLUMNS)
    assert torch.equal(streamed(encoder, torch.split(video, sizes, dim=2)), whole)


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [3, 1], [1, 2, 1], [2, 2]])
def test_decoding_in_pieces_equals_the_whole_clip(decoder: VaeDecoder, sizes: list[int]) -> None:
    """However latents are cut, their frames are the same to the last bit."""
    z = latents(4)
    whole = streamed(decoder, (z,))
    assert whole.shape == (1, 3, 13, ROWS * 8, COLUMNS * 8)
    assert float(whole.abs().max()) <= 1.0
    assert torch.equal(streamed(decoder, torch.split(z, sizes, dim=2)), whole)


def test_streams_equal_the_library_s_whole_clip(network: Any, encoder: VaeEncoder, decoder: VaeDecoder) -> None:
    """The library's own encode and decode, which keep their cache on the model, give the same numbers."""
    video, z = clip(9), latents(3)
    with torch.inference_mode():
        moments = network.encode(video).latent_dist.mean
        frames = network.decode(decoder.denormalise(z)).sample
    torch.testing.assert_close(streamed(encoder, (video,)), encoder.normalise(moments), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(streamed(decoder, (z,)), frames, atol=2e-5, rtol=1e-5)


def test_two_streams_interleave_on_one_model(network: Any, encoder: VaeEncoder, decoder: VaeDecoder) -> None:
    """Neither another stream nor a cleared cache of the library changes a stream by a bit."""
    first, second = torch.split(latents(4, 1), 1, dim=2), torch.split(latents(4, 2), 1, dim=2)
    caches = decoder.new_cache(), decoder.new_cache()
    mixed: tuple[list[Tensor], list[Tensor]] = ([], [])
    for at, pair in enumerate(zip(first, second, strict=True)):
        for out, piece, cache in zip(mixed, pair, caches, strict=True):
            out.append(decoder(piece, cache, is_first=at == 0))
        network.clear_cache()
    assert torch.equal(torch.cat(mixed[0], dim=2), streamed(decoder, first))
    assert torch.equal(torch.cat(mixed[1], dim=2), streamed(decoder, second))

    a, b = clip(5, 1), clip(5, 2)
    one, two = encoder.new_cache(), encoder.new_cache()
    encoder(a[:, :, :1], one, is_first=True)
    encoder(b[:, :, :1], two, is_first=True)
    assert torch.equal(encoder(a[:, :, 1:], one, is_first=False), streamed(encoder, (a,))[:, :, 1:])


@pytest.mark.parametrize(("frames", "is_first"), [(0, True), (4, True), (8, True), (0, False), (3, False), (5, False)])
def test_a_piece_of_the_wrong_length_is_refused(encoder: VaeEncoder, frames: int, is_first: bool) -> None:
    """A first piece has 1 + 4k frames and a later one 4k; a refusal says so and leaves the stream as it was."""
    cache = encoder.new_cache()
    if not is_first:
        encoder(clip(1), cache, is_first=True)
    before = cache.nbytes
    with pytest.raises(ValueError, match="accepted"):
        encoder(clip(frames), cache, is_first=is_first)
    assert cache.nbytes == before


def test_a_picture_of_the_wrong_size_is_refused(encoder: VaeEncoder, decoder: VaeDecoder) -> None:
    """Frames come in multiples of 8 pixels and three channels, latents in the model's channels."""
    with pytest.raises(ValueError, match="multiples of 8"):
        encoder(torch.zeros(1, 3, 1, 12, 16), encoder.new_cache(), is_first=True)
    with pytest.raises(ValueError, match=r"\[1, 3, T, H, W\]"):
        encoder(torch.zeros(1, 4, 1, 16, 16), encoder.new_cache(), is_first=True)
    with pytest.raises(ValueError, match=r"\[1, 16, T, h, w\]"):
        decoder(torch.zeros(1, 8, 1, 2, 2), decoder.new_cache(), is_first=True)


def test_pieces_out_of_order_are_refused(encoder: VaeEncoder, decoder: VaeDecoder) -> None:
    """A later piece before the first, a second first one, and a piece after the last one are errors."""
    for half, first, later in ((encoder, clip(1), clip(4)), (decoder, latents(1), latents(1))):
        with pytest.raises(RuntimeError, match="before the first"):
            half(later, half.new_cache(), is_first=False)
        cache = half.new_cache()
        half(first, cache, is_first=True)
        with pytest.raises(RuntimeError, match="new cache"):
            half(first, cache, is_first=True)
        half(later, cache, is_first=False, is_last=True)
        with pytest.raises(RuntimeError, match="last piece"):
            half(later, cache, is_first=False)


@pytest.mark.parametrize("config", [CONFIG, VaeConfig(dim=6, dim_mult=(1, 2, 2, 4)), VaeConfig(dim=4)])
def test_the_size_of_a_cache_is_known_before_it_is_made(config: VaeConfig) -> None:
    """`cache_bytes` is exactly what a cache holds after three pieces, and it doesn't grow from there on."""
    vae = vae_network(config)
    height, width = 24, 40
    encoder, decoder = encoder_of(vae, config), decoder_of(vae, config)
    cache = encoder.new_cache()
    for at, frames in enumerate((1, 4, 4, 4)):
        encoder(torch.zeros(1, 3, frames, height, width), cache, is_first=at == 0)
    assert cache.nbytes == cache_bytes(config, "encoder", height, width)
    cache = decoder.new_cache()
    for at in range(4):
        decoder(torch.zeros(1, 16, 1, height // 8, width // 8), cache, is_first=at == 0)
    assert cache.nbytes == cache_bytes(config, "decoder", height, width)


def original_names(config: VaeConfig) -> list[str]:
    """The original checkpoint's names of a VAE of four levels, in our own words."""
    block = ["residual.0.gamma", "residual.2.weight", "residual.2.bias", "residual.3.gamma", "residual.6.weight"]
    names = ["conv1.weight", "conv2.bias"]
    widening = {"encoder": (3, 6), "decoder": (4,)}  # blocks whose channel count changes have a shortcut
    for half, levels, residuals in (("encoder", "downsamples", 2), ("decoder", "upsamples", 3)):
        names += [
            f"{half}.conv1.weight",
            f"{half}.head.0.gamma",
            f"{half}.head.2.bias",
            f"{half}.middle.1.to_qkv.weight",
        ]
        names += [f"{half}.middle.{place}.{name}" for place in (0, 2) for name in block]
        for at in range(4 * (residuals + 1) - 1):
            resample = at % (residuals + 1) == residuals
            tails = (
                ["resample.1.weight", "resample.1.bias"]
                if resample
                else [*block, *(["shortcut.weight"] if at in widening[half] else [])]
            )
            names += [f"{half}.{levels}.{at}.{tail}" for tail in tails]
    assert is_original(names)
    return names


def test_original_names_map_as_the_library_maps_them() -> None:
    """Our table of names agrees with the library's converter of whole checkpoints."""
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    config = VaeConfig()
    convert: Any = convert_wan_vae_to_diffusers
    converted = convert({name: name for name in original_names(config)})
    theirs = {old: new for new, old in converted.items()}
    assert {name: diffusers_name(name, config) for name in original_names(config)} == theirs
    with pytest.raises(ValueError, match="not a weight"):
        diffusers_name("decoder.sideways.0.weight", config)


def test_weights_that_do_not_fit_are_refused(network: Any) -> None:
    """Missing, unknown and wrongly shaped weights are named; matching ones are loaded."""
    state = {name: value.clone() for name, value in network.state_dict().items()}
    other = vae_network(CONFIG)
    load_state(other, CONFIG, state)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match=r"1 missing .*quant_conv.bias"):
        load_state(other, CONFIG, {name: value for name, value in state.items() if name != "quant_conv.bias"})
    with pytest.raises(ValueError, match=r"quant_conv.bias has shape \[3\]"):
        load_state(other, CONFIG, {**state, "quant_conv.bias": torch.zeros(3)})


def test_the_fast_way_on_a_cpu_gives_the_same_numbers() -> None:
    """Convolution and norm within `NarrowOnCpu` agree with the plain ones; other calls pass through untouched."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((1, 4, 5, 9, 7), generator=generator)
    convolution = torch.nn.Conv3d(4, 6, 3, stride=(2, 1, 1), padding=1)
    plain = convolution(x), torch.nn.functional.normalize(x, dim=1), x.half().float() * 2
    with torch.inference_mode(), NarrowOnCpu():
        fast = convolution(x), torch.nn.functional.normalize(x, dim=1), x.half().float() * 2
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), atol=1e-5, rtol=1e-5)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    """The number of steps down and of latent statistics follow from the other sizes."""
    with pytest.raises(ValueError, match="temporal_downsample"):
        VaeConfig(dim_mult=(1, 2))
    with pytest.raises(ValueError, match="latents_std"):
        VaeConfig(latents_std=(1.0,))
