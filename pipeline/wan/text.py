"""Prompts as the Wan models read them: cleaned, tokenized to a fixed length, and embedded by a UMT5 encoder."""

from __future__ import annotations

import html
from typing import Any

import torch
from torch import Tensor

from .config import TextConfig as TextConfig


def clean(prompt: str) -> str:
    """A prompt with broken encodings repaired, HTML entities resolved twice, and single spaces for white space."""
    from ftfy import fix_text

    return " ".join(html.unescape(html.unescape(fix_text(prompt))).split())


class PromptEncoder:
    """Embeds prompts.

    Args:
        tokenizer: a tokenizer of transformers.
        model: a `UMT5EncoderModel`, on the device where prompts are to be embedded.
        text_len: rows of an embedded prompt.
    """

    def __init__(self, tokenizer: Any, model: Any, text_len: int) -> None:
        """Put the model into inference mode."""
        self._tokenizer = tokenizer
        self._model = model.requires_grad_(False).eval()
        self._text_len = text_len

    @torch.inference_mode()
    def encode(self, prompt: str) -> Tensor:
        """Embed one prompt.

        The encoder sees the padding masked. Rows past the prompt's tokens are zero then; the world model attends to
        them all the same, as it did in training.

        Returns:
            [1, text_len, dim] in the model's dtype, on its device. A prompt with more than `text_len` tokens is cut.
        """
        tokens = self._tokenizer(
            [clean(prompt)],
            padding="max_length",
            max_length=self._text_len,
            truncation=True,
            add_special_tokens=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        device = next(self._model.parameters()).device
        mask: Tensor = tokens["attention_mask"].to(device)
        embedded: Tensor = self._model(tokens["input_ids"].to(device), mask).last_hidden_state
        return embedded.masked_fill(mask.unsqueeze(-1) == 0, 0.0)


def text_network(config: TextConfig) -> Any:
    """A `UMT5EncoderModel` of these sizes, with the library's own initial weights."""
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=config.vocab_size,
            d_model=config.dim,
            d_kv=config.head_dim,
            d_ff=config.ffn_dim,
            num_layers=config.layers,
            num_heads=config.heads,
        )
    )


def byte_tokenizer() -> Any:
    """A tokenizer that needs no files: one token per UTF-8 byte, vocabulary of 384 (ByT5's)."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()
