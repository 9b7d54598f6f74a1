"""Prompts: cleaned, cut or padded to a fixed length, embedded with their padding masked, then padded with zeros."""

from __future__ import annotations

import pytest
import torch

from reelwire.pipeline.wan.config import TextConfig
from reelwire.pipeline.wan.seeded import by_fan_in, fill_seeded
from reelwire.pipeline.wan.text import PromptEncoder, byte_tokenizer, clean, text_network

CONFIG = TextConfig(dim=16, text_len=24, vocab_size=384, layers=2, heads=2, head_dim=8, ffn_dim=32)


def encoder(text_len: int = CONFIG.text_len) -> PromptEncoder:
    network = text_network(CONFIG)
    fill_seeded(network, 3, by_fan_in)
    return PromptEncoder(byte_tokenizer(), network, text_len)


@pytest.mark.parametrize(
    ("given", "cleaned"),
    [
        ("  a \t stone\n\nbridge  ", "a stone bridge"),
        ("caf\u00c3\u00a9", "caf\u00e9"),
        ("rock &amp;amp; roll", "rock & roll"),
        ("a &lt;b&gt;", "a <b>"),
        ("\uff26\uff55\uff4c\uff4c", "Full"),
    ],
)
def test_prompts_are_cleaned(given: str, cleaned: str) -> None:
    """Broken encodings are repaired, entities resolved twice, and white space becomes single spaces."""
    assert clean(given) == cleaned


def test_rows_past_the_prompt_are_zero() -> None:
    """A prompt of n bytes has n + 1 rows (with the end mark); all others are exactly zero."""
    embedded = encoder().encode("stone")
    assert embedded.shape == (1, 24, 16)
    assert embedded.dtype == torch.float32
    assert bool((embedded[0, :6].abs().sum(-1) > 0).all())
    assert not embedded[0, 6:].any()


def test_padding_does_not_reach_the_prompt_s_rows() -> None:
    """The encoder sees the padding masked: the length that a prompt is padded to doesn't change its rows."""
    short, long = encoder(8).encode("stone"), encoder(24).encode("stone")
    torch.testing.assert_close(short[0, :6], long[0, :6], atol=1e-5, rtol=1e-5)


def test_a_long_prompt_is_cut() -> None:
    """A prompt with more tokens than there are rows fills all rows."""
    embedded = encoder().encode("x" * 100)
    assert embedded.shape == (1, 24, 16)
    assert bool((embedded[0].abs().sum(-1) > 0).all())


def test_equal_prompts_give_equal_bits() -> None:
    """Two encoders of one seed agree to the last bit, and prompts that are cleaned to the same text do too."""
    assert torch.equal(encoder().encode("a  bridge "), encoder().encode("a bridge"))
    assert not torch.equal(encoder().encode("a bridge"), encoder().encode("a fridge"))
