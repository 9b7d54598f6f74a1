"""The denoise stage of a world session: the latent of each chunk, and the key/value cache that it goes into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..device import Lane
from ..sessions import Sessions
from ..stage import Initialized, StageResult, Values
from .config import WorldConfig
from .control import Steering, SteeringState, steer
from .dit import WorldDiT, session_bytes
from .dit_blocks import SessionCaches
from .geometry import Geometry
from .kv_cache import CacheLimits
from .noise import NoiseSource, SeededNoise
from .request import WorldRequest
from .rollout import denoise_chunk
from .sampler import Step
from .sizes import denoise_bytes
from .stream import LATENTS_MAX

LatentShape = tuple[int, int, int, int, int]
"""Of a chunk: 1, channels, latent frames, rows, columns."""


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
