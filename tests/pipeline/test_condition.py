"""The condition of a session: an image, then grey, in chunks of any size."""

from __future__ import annotations

import pytest
import torch

from reelwire.pipeline.wan.config import VaeConfig
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded
from reelwire.pipeline.wan.vae import FeatureCache, VaeEncoder, encoder_of, vae_network
from reelwire.pipeline.wan.vae_cache import same_bits
from reelwire.pipeline.world.condition import ConditionStream, Constants, condition_mask

CONFIG = VaeConfig(dim=4, dim_mult=(1, 1, 1, 1), num_res_blocks=1)


@pytest.fixture(scope="module")
def encoder() -> VaeEncoder:
    vae = vae_network(CONFIG)
    fill_seeded(vae, 1, by_fan_in)
    return encoder_of(vae, CONFIG)


def picture(seed: int = 0, height: int = 16, width: int = 24) -> torch.Tensor:
    return torch.rand((1, 3, height, width), generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_chunks_are_the_latents_of_the_image_and_grey_frames(encoder: VaeEncoder, chunk_size: int) -> None:
    """Joined together, the chunks are the encoding of the image followed by frames of zeros, after four mask channels."""
    stream = ConditionStream(encoder, picture(), chunk_size)
    condition = torch.cat([stream.chunk(index, is_last=index == 1) for index in range(2)], dim=2)
    frames = torch.zeros(1, 3, 1 + 4 * (2 * chunk_size - 1), 16, 24)
    frames[:, :, 0] = picture()
    assert condition.shape == (1, 20, 2 * chunk_size, 2, 3)
    assert torch.equal(condition[:, 4:], encoder(frames, encoder.new_cache(), is_first=True))
    assert torch.equal(condition[:, :4, 0], torch.ones(1, 4, 2, 3))
    assert not condition[:, :4, 1:].any()


def test_the_image_is_dropped_after_chunk_0(encoder: VaeEncoder) -> None:
    """Once chunk 0 is encoded the image takes no memory, and chunk 0 can't be made again."""
    stream = ConditionStream(encoder, picture(), 3)
    assert stream.nbytes == picture().nbytes
    stream.chunk(0)
    with pytest.raises(RuntimeError, match="image was dropped"):
        stream.chunk(0)
    with pytest.raises(RuntimeError, match="chunk 1 is due"):
        stream.chunk(2)
    stream.chunk(1, is_last=True)
    with pytest.raises(RuntimeError, match="last piece"):
        stream.chunk(2)


def test_streams_do_not_see_each_other(encoder: VaeEncoder) -> None:
    """Two sessions on one encoder give the bits that each gives alone."""
    alone = [ConditionStream(encoder, picture(seed), 1) for seed in (1, 2)]
    expected = [[stream.chunk(index) for index in range(3)] for stream in alone]
    together = [ConditionStream(encoder, picture(seed), 1) for seed in (1, 2)]
    for index in range(3):
        for stream, chunks in zip(together, expected, strict=True):
            assert torch.equal(stream.chunk(index), chunks[index])
    assert not torch.equal(expected[0][0], expected[1][0])


def test_the_mask_marks_the_first_latent_frame_of_a_session() -> None:
    """Only the very first latent frame is given; all others are to be made."""
    latents = torch.zeros(1, 16, 3, 2, 4)
    assert condition_mask(latents, first=True).sum() == 4 * 2 * 4
    assert condition_mask(latents, first=False).sum() == 0


LATENTS = 26
"""Latent frames after which this encoder has long forgotten the image."""


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
@pytest.mark.parametrize(("height", "width"), [(16, 24), (24, 8)])
def test_streaming_08_a_constant_condition_is_what_encoding_on_gives(
    encoder: VaeEncoder, chunk_size: int, height: int, width: int
) -> None:
    """For any image, the stream settles, and every later chunk computed the long way is bitwise the constant."""
    constants = Constants()
    for image in (picture(1, height, width), torch.ones(1, 3, height, width)):
        short = ConditionStream(encoder, image, chunk_size, constants)
        long = ConditionStream(encoder, image, chunk_size)
        constant = None
        for index in range(LATENTS // chunk_size):
            ours, expected = short.chunk(index), long.chunk(index)
            assert same_bits(ours, expected)
            if short.settled and constant is None:
                constant = ours
            assert constant is None or same_bits(expected, constant)
        assert constant is not None
        assert not long.settled
    assert len(constants) == 1, "the constant doesn't depend on the image"


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_streaming_08_the_first_constant_chunk_is_found_exactly(encoder: VaeEncoder, chunk_size: int) -> None:
    """A stream settles with the first chunk after which the whole feature cache is bitwise what it was before."""
    stream = ConditionStream(encoder, picture(), chunk_size, Constants())
    cache = encoder.new_cache()
    frames = torch.cat([picture().unsqueeze(2), torch.zeros(1, 3, 4 * chunk_size - 4, 16, 24)], dim=2)
    encoder(frames, cache, is_first=True)
    stream.chunk(0)
    for index in range(1, LATENTS // chunk_size):
        before = remembered(cache)
        encoder(torch.zeros(1, 3, 4 * chunk_size, 16, 24), cache, is_first=False)
        stream.chunk(index)
        same = all(same_bits(a, b) for a, b in zip(before, remembered(cache), strict=True))
        assert stream.settled == same
    assert stream.settled


def remembered(cache: FeatureCache) -> list[torch.Tensor]:
    return [slot for slot in cache._slots if isinstance(slot, torch.Tensor)]


def test_streaming_08_a_settled_stream_holds_nothing_of_its_own(encoder: VaeEncoder) -> None:
    """Cache and image are gone, the order of chunks is still checked, and what is handed out can be written to."""
    stream = ConditionStream(encoder, picture(), 1, Constants())
    last, index = stream.chunk(0), 1
    while not stream.settled:
        last = stream.chunk(index)
        index += 1
        assert stream.settled or stream.nbytes > 0
    assert stream.nbytes == 0
    expected = last.clone()
    last.fill_(7.0)
    stream.chunk(index).fill_(7.0)
    with pytest.raises(RuntimeError, match=f"chunk {index + 1} is due"):
        stream.chunk(index)
    assert same_bits(stream.chunk(index + 1, is_last=True), expected)
    with pytest.raises(RuntimeError, match="last piece"):
        stream.chunk(index + 2)


def test_streaming_08_a_stream_may_end_with_the_chunk_that_it_settles_with(encoder: VaeEncoder) -> None:
    """Its last chunk is the constant, and nothing follows."""
    probe = ConditionStream(encoder, picture(), 2, Constants())
    count = 0
    while not probe.settled:
        probe.chunk(count)
        count += 1
    stream = ConditionStream(encoder, picture(), 2, Constants())
    for index in range(count):
        stream.chunk(index, is_last=index == count - 1)
    assert stream.settled
    with pytest.raises(RuntimeError, match="last piece"):
        stream.chunk(count)


def test_streaming_08_constants_are_shared_and_bounded() -> None:
    """One tensor per geometry, for all that have its bits; of many geometries those that were asked for last."""
    constants = Constants(most=2)
    first = torch.zeros(1, 20, 1, 2, 3)
    assert constants.shared(first) is first
    assert constants.shared(torch.zeros(1, 20, 1, 2, 3)) is first
    other = torch.full((1, 20, 1, 2, 3), -0.0)
    assert constants.shared(other) is other, "bits decide, not values"
    for columns in (4, 5):
        constants.shared(torch.zeros(1, 20, 1, 2, columns))
    assert len(constants) == 2
    assert constants.shared(first) is first
