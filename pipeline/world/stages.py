"""The three stages of a world session: encode the condition, denoise the latent, decode the frames.

Each stage has its weights, and for each session a cache that nobody else sees; sessions are never computed together, so
the bytes of one don't depend on which others run beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reelwire.spec import RequestError

from ..device import Lane
from ..sessions import Sessions
from ..stage import Initialized, StageResult, Values
from ..wan.vae import FeatureCache, VaeDecoder, VaeEncoder
from .condition import ConditionStream
from .config import WorldConfig
from .control import Steering, SteeringState, steer
from .dit import WorldDiT, session_bytes
from .dit_blocks import SessionCaches
from .geometry import Geometry, check_image, frames_to_bytes, image_to_tensor
from .kv_cache import CacheLimits
from .noise import NoiseSource, SeededNoise
from .request import WorldRequest
from .rollout import denoise_chunk
from .sampler import Step
from .sizes import decode_bytes, denoise_bytes, encode_bytes
from .stream import LATENTS_MAX

LatentShape = tuple[int, int, int, int, int]
"""Of a chunk: 1, channels, latent frames, rows, columns."""


class Prompts(Protocol):
    """What embeds prompts, such as a `PromptEncoder`."""

    def encode(self, prompt: str) -> Tensor:
        """The embedding [1, text_len, text_dim] of a prompt."""
        ...


class EncodeStage:
    """Embeds the prompt at initialization, then encodes [image, grey, ...] chunk by chunk.

    Args:
        config: of the model.
        encoder: the VAE's encoder.
        prompts: the prompt encoder.
        lane: where both are.
    """

    def __init__(self, config: WorldConfig, encoder: VaeEncoder, prompts: Prompts, lane: Lane) -> None:
        """Start with no session."""
        self._config = config
        self._encoder = encoder
        self._prompts = prompts
        self._lane = lane
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

        Hands out ``prompt_embeds`` [1, text_len, text_dim] float32, and the sizes ``height``, ``width``,
        ``image_height``, ``image_width``.

        Raises:
            RequestError: the request can't be served.
        """
        image, asked = self._asked(chunks, request)
        height, width = asked.geometry.height, asked.geometry.width
        with self._lane.work():
            picture = self._lane.take(image_to_tensor(image, height, width))
            stream = ConditionStream(self._encoder, picture[None], self._config.chunk_size)
            self._sessions.open(session, stream)
            try:
                embeds = self._lane.give(self._prompts.encode(asked.prompt).float())
            except BaseException:
                self._sessions.close(session)
                raise
        return Initialized(
            handed={
                "prompt_embeds": embeds,
                "height": height,
                "width": width,
                "image_height": int(image.shape[0]),
                "image_width": int(image.shape[1]),
            },
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
        """Encode the condition [1, 20, chunk, h, w] of a chunk."""
        assert is_first == (index == 0)
        stream = self._sessions[session]
        with self._lane.work():
            condition = self._lane.give(stream.chunk(index, is_last=is_last))
        return StageResult(outputs={"condition": {"condition": condition}})

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


@dataclass(slots=True)
class _Denoising:
    model: WorldDiT
    caches: SessionCaches
    steps: tuple[Step, ...]
    noise: NoiseSource
    steering: Steering
    state: SteeringState
    due: int = 0


class DenoiseStage:
    """Makes the latent of a chunk from noise, its condition and its control, and writes it into the session's cache.

    Args:
        config: of the model.
        models: the DiT in each dtype that a request may ask for, made when it is first needed.
        lane: where they are.
        noise: where a session gets its noise, from its seed, the shape of a chunk's latent, and the device.
    """

    def __init__(
        self,
        config: WorldConfig,
        models: Callable[[torch.dtype], WorldDiT],
        lane: Lane,
        noise: Callable[[int, LatentShape, torch.device], NoiseSource] = SeededNoise,
    ) -> None:
        """Make the model of the default dtype; start with no session."""
        self._config = config
        self._make = models
        self._lane = lane
        self._noise = noise
        self._models: dict[torch.dtype, WorldDiT] = {}
        self._sessions = Sessions[_Denoising]()
        self._model(config.dtypes[0])

    @property
    def session_bytes(self) -> int:
        """Keys and values of one session of the default area and window, in the widest dtype."""
        config = self._config
        side = int(config.area**0.5)
        limits = CacheLimits(config.window, config.sink, config.attention)
        layout = limits.layout(Geometry(side, side).frame_tokens, LATENTS_MAX)
        return max(session_bytes(config.dit, layout.capacity, getattr(torch, dtype)) for dtype in config.dtypes)

    def needed_bytes(self, chunks: int, request: Values, handed: Values, most: int) -> int:
        """Keys and values of a session and of its prompt.

        Raises:
            RequestError: the request can't be served, or takes more than `most` bytes.
        """
        return denoise_bytes(self._config, self._asked(chunks, request, handed), most)

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Make the key/value cache, and the prompt's keys and values.

        Raises:
            RequestError: the request can't be served.
        """
        asked = self._asked(chunks, request, handed)
        geometry, chunk_size = asked.geometry, self._config.chunk_size
        device = self._lane.device
        shape = (1, self._config.vae.z_dim, chunk_size, geometry.latent_height, geometry.latent_width)
        with self._lane.work():
            model = self._model(asked.dtype)
            layout = asked.limits.layout(geometry.frame_tokens, asked.latent_frames)
            caches = model.open_session(handed["prompt_embeds"], layout)
        self._sessions.open(
            session,
            _Denoising(
                model=model,
                caches=caches,
                steps=asked.steps,
                noise=self._noise(asked.seed, shape, device),
                steering=Steering(self._config.control, asked.camera, chunk_size, self._config.keyboard, str(device)),
                state=SteeringState(),
            ),
        )
        return Initialized(cache_bytes=caches.cache_bytes)

    def run(
        self,
        session: str,
        index: int,
        inputs: Mapping[str, Values],
        *,
        is_first: bool,
        is_last: bool,  # noqa: ARG002  the last chunk is denoised like any other
    ) -> StageResult:
        """Denoise a chunk: latent [1, 16, chunk, h, w], float32.

        The fact ``pose`` is the camera-to-world matrix at the end of the chunk, as 4 rows of 4 numbers.

        Raises:
            RuntimeError: another chunk is due.
            RequestError: the control doesn't fit the session.
        """
        assert is_first == (index == 0)
        held = self._sessions[session]
        if index != held.due:
            raise RuntimeError(f"chunk {index} was to be denoised, chunk {held.due} is due")
        with self._lane.work():
            steered = steer(held.steering, held.state, inputs["control"])
            condition = self._lane.take(inputs["condition"]["condition"])
            chunk = held.model.prepare(index, condition, steered.tensor)
            latent = self._lane.give(denoise_chunk(held.model, held.caches, chunk, held.steps, held.noise))
        held.state, held.due = steered.state, index + 1
        return StageResult(outputs={"latent": {"latent": latent}}, facts={"pose": steered.pose.tolist()})

    def release(self, session: str) -> None:
        """Drop a session's caches."""
        self._sessions.close(session)

    def _asked(self, chunks: int, request: Values, handed: Values) -> WorldRequest:
        return WorldRequest.of(self._config, chunks, request, handed["image_height"], handed["image_width"])

    def _model(self, dtype: str) -> WorldDiT:
        exact: torch.dtype = getattr(torch, dtype)
        if exact not in self._models:
            self._models[exact] = self._make(exact)
        return self._models[exact]


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
