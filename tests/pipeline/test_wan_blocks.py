"""Blocks that the Wan models share."""

from __future__ import annotations

import pytest
import torch

from reelwire.pipeline.wan.blocks import (
    RMSNorm,
    layer_norm,
    patchify,
    rotary_split,
    rotary_table,
    rotate,
    timestep_embedding,
    unpatchify,
)


def test_patch_rows_are_channel_major() -> None:
    """A patch row holds channel, frame, row, column; tokens are ordered frame, row, column."""
    x = torch.arange(2 * 3 * 4 * 6).float().reshape(1, 2, 3, 4, 6)
    rows = patchify(x, (1, 2, 2))
    assert rows.shape == (1, 3 * 2 * 3, 8)
    token = 1 * 6 + 1 * 3 + 2
    assert torch.equal(rows[0, token], x[0, :, 1, 2:4, 4:6].flatten())


def test_head_rows_are_channel_last() -> None:
    """A head's row holds frame, row, column, channel: `unpatchify` is not the inverse of `patchify`."""
    rows = torch.randn(1, 3 * 2 * 3, 4 * 5)
    x = unpatchify(rows, (1, 2, 2), (3, 4, 6))
    assert x.shape == (1, 5, 3, 4, 6)
    token = 2 * 6 + 0 * 3 + 1
    assert torch.equal(x[0, :, 2, 0:2, 2:4].permute(1, 2, 0).flatten(), rows[0, token])


def test_sizes_that_can_not_be_cut_are_refused() -> None:
    """A size that isn't a multiple of the patch is refused."""
    with pytest.raises(ValueError, match="3 x 5 x 6 can't be cut"):
        patchify(torch.zeros(1, 2, 3, 5, 6), (1, 2, 2))


@pytest.mark.parametrize(
    ("head_dim", "split"), [(12, (4, 4, 4)), (14, (6, 4, 4)), (18, (6, 6, 6)), (24, (8, 8, 8)), (128, (44, 42, 42))]
)
def test_rotary_channels_are_split_in_three(head_dim: int, split: tuple[int, int, int]) -> None:
    """Rows and columns get a third each, rounded down; frames get the rest."""
    assert rotary_split(head_dim) == split


@pytest.mark.parametrize("head_dim", [2, 10, 13, 16, 64 + 1])
def test_heads_that_can_not_be_paired_are_refused(head_dim: int) -> None:
    """A third that is odd or empty is refused."""
    with pytest.raises(ValueError, match="three rotary axes"):
        rotary_split(head_dim)


def test_rotation_turns_adjacent_pairs_by_position() -> None:
    """The first pair of a share turns by the position itself, in the order frame, row, column."""
    x = torch.zeros(1, 2 * 3 * 4, 1, 18)
    x[..., ::2] = 1.0
    turned = rotate(x, rotary_table(18, 2, 3, 4, start_frame=5))
    token = 1 * 12 + 2 * 4 + 3
    for first_channel, position in ((0, 6.0), (6, 2.0), (12, 3.0)):
        pair = turned[0, token, 0, first_channel : first_channel + 2]
        angle = torch.tensor(position)
        torch.testing.assert_close(pair, torch.stack((angle.cos(), angle.sin())))


def test_products_depend_on_distance_only() -> None:
    """Query-key products don't change when all frame positions move together."""
    q, k = torch.randn(2, 1, 12, 2, 12)

    def scores(start: int) -> torch.Tensor:
        table = rotary_table(12, 3, 2, 2, start_frame=start)
        return torch.einsum("bihd,bjhd->bhij", rotate(q, table), rotate(k, table))

    torch.testing.assert_close(scores(0), scores(900), atol=2e-4, rtol=0)


def test_positions_beyond_the_table_are_refused() -> None:
    """Position 1023 is the last; one further is refused, as is a negative one."""
    rotary_table(12, 3, 2, 2, start_frame=1021)
    with pytest.raises(ValueError, match="must lie in 0 to 1024"):
        rotary_table(12, 3, 2, 2, start_frame=1022)
    with pytest.raises(ValueError, match="must lie in 0 to 1024"):
        rotary_table(12, 1, 2, 2, start_frame=-1)


def test_timestep_embedding_is_cosines_then_sines() -> None:
    """The first half are cosines of t / 10000^(i / half), the second half their sines."""
    embedded = timestep_embedding(torch.tensor(937), 8)
    rates = 10_000.0 ** -(torch.arange(4).double() / 4)
    torch.testing.assert_close(embedded, torch.cat(((937 * rates).cos(), (937 * rates).sin())).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    """The norm of low-precision values is that of their float32 values, rounded once."""
    norm = RMSNorm(7, 1e-6)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm.to(dtype)
    x = torch.randn(2, 5, 7).to(dtype)
    exact = x.float()
    expected = exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.float()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), expected.to(dtype), atol=0 if dtype == torch.bfloat16 else 1e-6, rtol=8e-3)


def test_layer_norm_stays_in_float32() -> None:
    """Layer norm of bfloat16 values is returned in float32, with zero mean and unit variance."""
    y = layer_norm(torch.randn(3, 64).bfloat16(), 1e-6)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.mean(-1), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(y.var(-1, correction=0), torch.ones(3), atol=1e-4, rtol=0)
