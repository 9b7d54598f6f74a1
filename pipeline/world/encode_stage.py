"""The encode stage of a world session: the prompt's embedding once, then the condition of each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from reelwire.spec import RequestError

from ..device import Lane
from ..sessions import Sessions
from ..stage import Initialized, StageResult, Values
from ..wan.vae import VaeEncoder
from .condition import ConditionStream, Constants
from .config import WorldConfig
from .geometry import check_image, image_to_tensor
from .latent_key import source_digest
from .request import WorldRequest
from .sizes import encode_bytes


class Prompts(Protocol):
    """What embeds prompts, such as a `PromptEncoder`."""

    def encode(self, prompt: str) -> Tensor:
        """The embedding [1, text_len, text_dim] of a prompt."""
        ...


class EncodeStage:
    """Embeds the prompt at initialization, then encodes [image, grey, ...] chunk by chunk, until that is constant.

    Args:
        config: of the model.
        encoder: the VAE's encoder.
        prompts: the prompt encoder.
        lane: where both are.
        weights: what tells the weights of both from others; without it sessions have no ``source_digest``.
        settle: find out from which chunk on a session's condition is constant, and say so; False: encode every chunk.
    """

    def __init__(
        self,
        config: WorldConfig,
        encoder: VaeEncoder,
        prompts: Prompts,
        lane: Lane,
        *,
        weights: str = "",
        settle: bool = True,
    ) -> None:
        """Start with no session."""
        self._config = config
        self._encoder = encoder
        self._prompts = prompts
        self._lane = lane
        self._weights = weights
        self._constants = Constants() if settle else None
        self._sessions = Sessions[ConditionStream]()

    @property
    def session_bytes(self) -> int:
        """Feature cache and image of one session of the default area."""
        side = int(self._config.area**0.5)
        return encode_bytes(self._config, side, side)

    def needed_bytes(
        self,
        chunks: int,
        request: Values,
        handed: Values,  # noqa: ARG002  it is the first to be initialized
        most: int,
    ) -> int:
        """Feature cache and image of a session.

        Raises:
            RequestError: the request can't be served, or takes more than `most` bytes.
        """
        geometry = self._asked(chunks, request)[1].geometry
        return encode_bytes(self._config, geometry.height, geometry.width, most)

    def initialize(
        self,
        session: str,
        chunks: int,
        request: Values,
        handed: Values,  # noqa: ARG002  it is the first to be initialized
    ) -> Initialized:
        """Check the whole request, embed the prompt, and make the feature cache.

        Hands out ``prompt_embeds`` [1, text_len, text_dim] float32, the sizes ``height``, ``width``, ``image_height``,
        ``image_width``, and ``source_digest``, which tells all that comes from here from what others may get.

        Raises:
            RequestError: the request can't be served.
        """
        image, asked = self._asked(chunks, request)
        height, width = asked.geometry.height, asked.geometry.width
        digest = None
        if self._weights:
            digest = source_digest(self._config, self._weights, self._lane.device, image, asked.prompt)
        with self._lane.work():
            picture = self._lane.take(image_to_tensor(image, height, width))
            stream = ConditionStream(self._encoder, picture[None], self._config.chunk_size, self._constants)
            self._sessions.open(session, stream)
            try:
                embeds = self._lane.give(self._prompts.encode(asked.prompt).float())
            except BaseException:
                self._sessions.close(session)
                raise
        given: dict[str, Any] = {
            "prompt_embeds": embeds,
            "height": height,
            "width": width,
            "image_height": int(image.shape[0]),
            "image_width": int(image.shape[1]),
        }
        if digest is not None:
            given["source_digest"] = digest
        return Initialized(
            handed=given,
            cache_bytes=encode_bytes(self._config, height, width),
        )

    def run(
        self,
        session: str,
        index: int,
        inputs: Mapping[str, Values],  # noqa: ARG002  the request for a condition carries no values
        *,
        is_first: bool,
        is_last: bool,
    ) -> StageResult:
        """Encode the condition [1, 20, chunk, h, w] of a chunk.

        Once the result is constant, the session holds no feature cache here any more, though `Initialized.cache_bytes`
        stays what was said of it.
        """
        assert is_first == (index == 0)
        stream = self._sessions[session]
        with self._lane.work():
            condition = self._lane.give(stream.chunk(index, is_last=is_last))
        return StageResult(outputs={"condition": {"condition": condition}}, constant=stream.settled)

    def release(self, session: str) -> None:
        """Drop a session's feature cache and image."""
        self._sessions.close(session)

    def _asked(self, chunks: int, request: Values) -> tuple[Tensor, WorldRequest]:
        """The image, and the whole request, checked."""
        image = request.get("image")
        if not isinstance(image, Tensor):
            raise RequestError("image", "is required: uint8 [rows, columns, 3], red green blue")
        rows, columns, _ = check_image(image).shape
        return image, WorldRequest.of(self._config, chunks, request, rows, columns)
