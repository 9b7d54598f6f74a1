"""What a session asks for, checked and worked out once: every stage reads the same numbers from the same request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from reelwire.spec import RequestError, check_parameters

from ..stage import Values
from .camera import Camera
from .config import Dtype, WorldConfig
from .geometry import Geometry
from .kv_cache import CacheLimits, settle_limits
from .sampler import Step, flow_schedule, select_steps
from .stream import world_spec


@dataclass(frozen=True, slots=True, eq=False)
class WorldRequest:
    """A session's request.

    Attributes:
        prompt: as it was given.
        seed: of the noise.
        geometry: size of the frames.
        camera: intrinsics, rescaled to the frames.
        limits: of the key/value cache.
        latent_frames: length of the session.
        steps: the denoising steps.
        dtype: what the DiT computes in.
    """

    prompt: str
    seed: int
    geometry: Geometry
    camera: Camera
    limits: CacheLimits
    latent_frames: int
    steps: tuple[Step, ...]
    dtype: Dtype

    @classmethod
    def of(cls, config: WorldConfig, chunks: int, request: Values, image_height: int, image_width: int) -> WorldRequest:
        """Check a request.

        Args:
            config: of the model.
            chunks: length of the session.
            request: parameters and, if they were given, the tensor ``intrinsics``.
            image_height: rows of the session's image.
            image_width: its columns.

        Raises:
            RequestError: it can't be served; the field says why.
        """
        spec = world_spec(config)
        tensors = {tensor.name for tensor in spec.tensors}
        given = {name: value for name, value in request.items() if name not in tensors and value is not None}
        parameters: dict[str, Any] = dict(check_parameters(spec, given))
        geometry = Geometry.of_image(image_height, image_width, parameters["area"])
        camera = Camera.of_session(
            geometry,
            image_height,
            image_width,
            request.get("intrinsics"),
            parameters["calibration_height"],
            parameters["calibration_width"],
        )
        limits = settle_limits(
            CacheLimits(parameters["window"], parameters["sink"], parameters["attention"] or -1),
            chunk_frames=config.chunk_size,
            chunks=chunks,
        )
        try:
            steps = select_steps(flow_schedule(float(parameters["shift"])), config.timestep_indices)
        except ValueError as error:
            raise RequestError("shift", str(error)) from None
        return cls(
            prompt=parameters["prompt"],
            seed=parameters["seed"],
            geometry=geometry,
            camera=camera,
            limits=limits,
            latent_frames=chunks * config.chunk_size,
            steps=steps,
            dtype=cast(Dtype, parameters["dtype"]),
        )
