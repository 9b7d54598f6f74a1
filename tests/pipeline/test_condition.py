"""The condition of a session: an image, then grey, in chunks of any size."""

from __future__ import annotations

import pytest
import torch

from reelwire.pipeline.wan.config import VaeConfig
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded
from reelwire.pipeline.wan.vae import VaeEncoder, encoder_of, vae_network
from reelwire.pipeline.world.condition import ConditionStream, condition_mask

CONFIG = VaeConfig(dim=4, dim_mult=(1, 1, 1, 1), num_res_blocks=1)


@pytest.fixture(scope="module")
def encoder() -> VaeEncoder:
    vae = vae_network(CONFIG)
    fill_seeded(vae, 1, by_fan_in)
    return encoder_of(vae, CONFIG)


def picture(seed: int = 0) -> torch.Tensor:
    return torch.rand((1, 3, 16, 24), generator=torch.Generator().manual_seed(seed)) * 2 - 1


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
