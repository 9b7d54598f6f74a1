"""The decode stage of a world session: latents to pictures."""

from __future__ import annotations

from collections.abc import Mapping

from ..device import Lane
from ..sessions import Sessions
from ..stage import Initialized, StageResult, Values
from ..wan.vae import FeatureCache, VaeDecoder
from .config import WorldConfig
from .geometry import frames_to_bytes
from .sizes import decode_bytes


class DecodeStage:
    """Decodes latents to pictures.

    Args:
        config: of the model.
        decoder: the VAE's decoder.
        lane: where it is.
    """

    def __init__(self, config: WorldConfig, decoder: VaeDecoder, lane: Lane) -> None:
        """Start with no session."""
        self._config = config
        self._decoder = decoder
        self._lane = lane
        self._sessions = Sessions[FeatureCache]()

    @property
    def session_bytes(self) -> int:
        """Feature cache of one session of the default area."""
        side = int(self._config.area**0.5)
        return decode_bytes(self._config, side, side)

    def needed_bytes(
        self,
        chunks: int,  # noqa: ARG002  the cache doesn't grow with the session
        request: Values,  # noqa: ARG002  all that matters was handed on
        handed: Values,
        most: int,
    ) -> int:
        """Feature cache of a session.

        Raises:
            RequestError: it takes more than `most` bytes.
        """
        return decode_bytes(self._config, handed["height"], handed["width"], most)

    def initialize(
        self,
        session: str,
        chunks: int,  # noqa: ARG002  the cache doesn't grow with the session
        request: Values,  # noqa: ARG002  all that matters was handed on
        handed: Values,
    ) -> Initialized:
        """Make the feature cache for frames of the size that the encode stage handed out."""
        self._sessions.open(session, self._decoder.new_cache())
        return Initialized(cache_bytes=decode_bytes(self._config, handed["height"], handed["width"]))

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """Decode a chunk: frames [T, H, W, 3], uint8."""
        assert is_first == (index == 0)
        cache = self._sessions[session]
        with self._lane.work():
            latent = self._lane.take(inputs["latent"]["latent"])
            frames = self._decoder(latent, cache, is_first=is_first, is_last=is_last)
            pictures = self._lane.give(frames_to_bytes(frames[0]))
        return StageResult(outputs={"frames": {"frames": pictures}})

    def release(self, session: str) -> None:
        """Drop a session's feature cache."""
        self._sessions.close(session)
