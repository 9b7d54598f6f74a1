"""The denoise stage of a world session: the latent of each chunk, and the key/value cache that it goes into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor

from ..device import Lane
from ..parallel import Parallel
from ..sessions import Sessions
from ..stage import Initialized, StageResult, Values
from .config import WorldConfig
from .control import Steering, SteeringState, steer
from .dit import WorldDiT, session_bytes
from .dit_blocks import SessionCaches
from .geometry import Geometry
from .kv_cache import CacheLimits, Slots
from .latent_cache import LatentStore
from .latent_key import first_link, next_link
from .noise import NoiseSource, SeededNoise
from .request import WorldRequest
from .rollout import denoise_chunk, write_cache
from .sampler import Step
from .sizes import denoise_bytes
from .stream import LATENTS_MAX

LatentShape = tuple[int, int, int, int, int]
"""Of a chunk: 1, channels, latent frames, rows, columns."""


@dataclass(slots=True)
class _Denoising:
    """One session. `link` is that of the chunk before in the chain of keys; None: its latents are neither kept nor known."""

    model: WorldDiT
    caches: SessionCaches
    steps: tuple[Step, ...]
    shape: LatentShape
    noise: NoiseSource
    steering: Steering
    state: SteeringState
    link: bytes | None
    due: int = 0


class DenoiseStage:
    """Makes the latent of a chunk from noise, its condition and its control, and writes it into the session's cache.

    A latent that was made before from the same beginning, in whatever session, is taken from `latents`. Then no denoising
    step runs, only the clean pass that writes the key/value cache, so that all that follows has the bits it would have had.

    In a worker group every rank is called with the same values and gives the same latents. Only rank 0 keeps and looks up
    latents, and tells the others what it found: whether a chunk is denoised can't then depend on what one rank's cache has
    evicted, failed at, or lost with the process that had the rank before.

    Args:
        config: of the model.
        models: the DiT in each dtype that a request may ask for, made when it is first needed.
        lane: where they are.
        noise: where a session gets its noise, from its seed, the shape of a chunk's latent, and the device.
        weights: what tells the weights of the DiT from others.
        latents: where latents are kept; None: nowhere.
        parallel: the worker group that computes this stage, as this rank sees it; None: nobody else does.
    """

    def __init__(
        self,
        config: WorldConfig,
        models: Callable[[torch.dtype], WorldDiT],
        lane: Lane,
        noise: Callable[[int, LatentShape, torch.device], NoiseSource] = SeededNoise,
        *,
        weights: str = "",
        latents: LatentStore | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """Make the model of the default dtype; start with no session."""
        self._config = config
        self._make = models
        self._lane = lane
        self._noise = noise
        self._weights = weights
        self._parallel = Parallel() if parallel is None else parallel
        self._latents = latents if self._parallel.rank == 0 else None
        self._models: dict[torch.dtype, WorldDiT] = {}
        self._sessions = Sessions[_Denoising]()
        self._model(config.dtypes[0])

    @property
    def latents(self) -> LatentStore | None:
        """Where latents are kept, if this rank keeps them; all sessions that live here share it, one call at a time."""
        return self._latents

    @property
    def session_bytes(self) -> int:
        """This rank's keys and values of one session of the default area and window, in the widest dtype."""
        config, world = self._config, self._parallel.world
        side = int(config.area**0.5)
        limits = CacheLimits(config.window, config.sink, config.attention)
        layout = limits.layout(Geometry(side, side).frame_tokens, LATENTS_MAX)
        return max(session_bytes(config.dit, layout.capacity, getattr(torch, dtype), world) for dtype in config.dtypes)

    def needed_bytes(self, chunks: int, request: Values, handed: Values, most: int) -> int:
        """This rank's keys and values of a session, and those of its prompt.

        Raises:
            RequestError: the request can't be served, or takes more than `most` bytes.
        """
        return denoise_bytes(self._config, self._asked(chunks, request, handed), most, self._parallel.world)

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
        link = self._first_link(model, caches, asked, handed.get("source_digest"))
        self._sessions.open(
            session,
            _Denoising(
                model=model,
                caches=caches,
                steps=asked.steps,
                shape=shape,
                noise=self._noise(asked.seed, shape, device),
                steering=Steering(self._config.control, asked.camera, chunk_size, self._config.keyboard, str(device)),
                state=SteeringState(),
                link=link,
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

        The fact ``pose`` is the camera-to-world matrix at the end of the chunk, as 4 rows of 4 numbers; the fact
        ``latent_cached``, which is there only when it is true, says that the latent was known.

        Raises:
            RuntimeError: another chunk is due.
            RequestError: the control doesn't fit the session.
        """
        assert is_first == (index == 0)
        held = self._sessions[session]
        if index != held.due:
            raise RuntimeError(f"chunk {index} was to be denoised, chunk {held.due} is due")
        facts: dict[str, Any] = {}
        with self._lane.work():
            steered = steer(held.steering, held.state, inputs["control"])
            condition = self._lane.take(inputs["condition"]["condition"])
            chunk = held.model.prepare(index, condition, steered.tensor)
            # All that can be wrong with a call is found on every rank before the first collective.
            slots = held.caches.rolling.advance(chunk.start, chunk.tokens)
            key = self._key(held.link, inputs["control"], slots)
            known = self._known(key, held.shape)
            latent = self._parallel.from_leader(known, held.shape, dtype=torch.float32, device=self._lane.device)
            if latent is None:
                latent = self._lane.give(denoise_chunk(held.model, held.caches, chunk, held.steps, held.noise))
                self._keep(key, latent)
            else:
                write_cache(held.model, held.caches, chunk, self._lane.take(latent))
                latent = self._lane.give(latent)
                facts["latent_cached"] = True
        held.state, held.link, held.due = steered.state, key, index + 1
        facts["pose"] = steered.pose.tolist()
        return StageResult(outputs={"latent": {"latent": latent}}, facts=facts)

    def release(self, session: str) -> None:
        """Drop a session's caches."""
        self._sessions.close(session)

    def _first_link(self, model: WorldDiT, caches: SessionCaches, asked: WorldRequest, source: Any) -> bytes | None:
        if self._latents is None or not self._weights or not isinstance(source, bytes):
            return None
        with self._guarded("key"):
            return first_link(self._config, self._weights, model, caches.rolling, asked, source)
        return None

    def _key(self, link: bytes | None, control: Values, slots: Slots) -> bytes | None:
        if link is None:
            return None
        with self._guarded("key"):
            return next_link(link, control, slots)
        return None

    def _known(self, key: bytes | None, shape: LatentShape) -> Tensor | None:
        if self._latents is None or key is None:
            return None
        with self._guarded("get"):
            latent = self._latents.get(key)
            if latent is not None and (latent.shape != shape or latent.dtype != torch.float32):
                raise ValueError(f"what is kept is {latent.dtype} {list(latent.shape)}, a latent is {list(shape)}")
            return latent
        return None

    def _keep(self, key: bytes | None, latent: Tensor) -> None:
        if self._latents is not None and key is not None:
            with self._guarded("put"):
                self._latents.put(key, latent)

    @contextmanager
    def _guarded(self, call: str) -> Iterator[None]:
        """A cache that fails costs time, never a chunk; what it holds may be what there is too much of."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever it is
            structlog.get_logger().warning("latent_cache_failed", call=call, error=f"{type(error).__name__}: {error}")
            if self._latents is not None:
                with suppress(Exception):
                    self._latents.clear()

    def _asked(self, chunks: int, request: Values, handed: Values) -> WorldRequest:
        return WorldRequest.of(self._config, chunks, request, handed["image_height"], handed["image_width"])

    def _model(self, dtype: str) -> WorldDiT:
        exact: torch.dtype = getattr(torch, dtype)
        if exact not in self._models:
            model = self._make(exact)
            if self._parallel.world > 1:
                model.join(self._parallel)
            self._models[exact] = model
        return self._models[exact]
