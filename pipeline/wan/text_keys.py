"""Names of the UMT5 encoder's weights: from those of the original Wan checkpoint to transformers' ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .config import TextConfig

_TOP = {
    "token_embedding.weight": "shared.weight",
    "norm.weight": "encoder.final_layer_norm.weight",
}
_IN_BLOCK = {
    "norm1.weight": "layer.0.layer_norm.weight",
    "attn.q.weight": "layer.0.SelfAttention.q.weight",
    "attn.k.weight": "layer.0.SelfAttention.k.weight",
    "attn.v.weight": "layer.0.SelfAttention.v.weight",
    "attn.o.weight": "layer.0.SelfAttention.o.weight",
    "pos_embedding.embedding.weight": "layer.0.SelfAttention.relative_attention_bias.weight",
    "norm2.weight": "layer.1.layer_norm.weight",
    "ffn.gate.0.weight": "layer.1.DenseReluDense.wi_0.weight",
    "ffn.fc1.weight": "layer.1.DenseReluDense.wi_1.weight",
    "ffn.fc2.weight": "layer.1.DenseReluDense.wo.weight",
}


def transformers_name(key: str) -> str:
    """The name in transformers' `UMT5EncoderModel` of a weight of the original Wan text encoder.

    Raises:
        ValueError: the original layout has no such name.
    """
    if key in _TOP:
        return _TOP[key]
    head, _, rest = key.partition(".")
    number, _, inner = rest.partition(".")
    if head == "blocks" and number.isdecimal() and inner in _IN_BLOCK:
        return f"encoder.block.{number}.{_IN_BLOCK[inner]}"
    raise ValueError(f"{key!r} is not a weight of a Wan text encoder")


def text_sizes(shapes: Mapping[str, Sequence[int]], text_len: int = 512) -> TextConfig:
    """The sizes of an original checkpoint, read off its tensors' shapes.

    Raises:
        ValueError: it isn't one of a text encoder; the message names the key that is missing.
    """

    def size(key: str, axis: int) -> int:
        if key not in shapes or len(shapes[key]) <= axis or shapes[key][axis] < 1:
            raise ValueError(f"there is no {key!r} of the expected rank: not a Wan text encoder")
        return int(shapes[key][axis])

    heads = size("blocks.0.pos_embedding.embedding.weight", 1)
    return TextConfig(
        dim=size("token_embedding.weight", 1),
        text_len=text_len,
        vocab_size=size("token_embedding.weight", 0),
        layers=len({key.split(".")[1] for key in shapes if key.startswith("blocks.")}),
        heads=heads,
        head_dim=size("blocks.0.attn.q.weight", 0) // heads,
        ffn_dim=size("blocks.0.ffn.fc1.weight", 0),
    )
