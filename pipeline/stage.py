"""What a pipeline is to the worker that serves it: a spec, and stages that hold the caches of sessions.

Nothing here needs torch. A stage is called from one thread only, one call at a time, so it needs no locks; two stages
of one process run on two threads and must not share mutable state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from reelwire.spec import StreamSpec

Values = Mapping[str, Any]
"""Named values of one artifact. Each is an array of the pipeline's `array_library`, or plain: None, bool, int, float,
str, bytes, lists and string-keyed dicts of these."""


@dataclass(frozen=True, slots=True)
class Initialized:
    """What initializing a session at a stage gave.

    Attributes:
        handed: values for the initialization of every later stage of the session.
        cache_bytes: memory that the session holds at this stage until it is released.
    """

    handed: Values = field(default_factory=dict)
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StageResult:
    """What one task gave.

    Attributes:
        outputs: for each artifact that the stage produces, its values.
        facts: small plain values that travel to the client with the chunk (such as the camera pose at its end).
        constant: the outputs of all later chunks would be the same, bit for bit: the stage isn't run again for this
            session. Only of a stage whose spec says that it `settles`.
    """

    outputs: Mapping[str, Values]
    facts: Mapping[str, Any] = field(default_factory=dict)
    constant: bool = False


class Stage(Protocol):
    """One stage with its weights, and the caches of the sessions that live there.

    A stage whose caches are large or differ from session to session is a `SizedStage` as well.
    """

    @property
    def session_bytes(self) -> int:
        """Memory in bytes that a session with the default request takes here; placement reckons with it until
        `initialize` says what a session really takes.
        """
        ...

    def initialize(self, session: str, chunks: int, request: Values, handed: Values) -> Initialized:
        """Make the caches of a session.

        Args:
            session: the session's id, unique among the living.
            chunks: how many chunks the session will have.
            request: the session's parameters, complete, and the tensors of the request that the spec names for this
                stage.
            handed: what the stages before this one in `initialize_order` handed out.

        Raises:
            RequestError: the request can't be served, and the field says why.
        """
        ...

    def run(
        self, session: str, index: int, inputs: Mapping[str, Values], *, is_first: bool, is_last: bool
    ) -> StageResult:
        """Make the outputs of chunk `index` from its inputs, artifact name to values."""
        ...

    def release(self, session: str) -> None:
        """Drop the caches of a session. A session that isn't there is no error."""
        ...


@runtime_checkable
class SizedStage(Protocol):
    """A stage that knows what a session will hold before it makes any of it, so that nothing is made in vain.

    Of any other stage the worker learns from `Initialized.cache_bytes`, and takes back what was too much.
    """

    def needed_bytes(self, chunks: int, request: Values, handed: Values, most: int) -> int:
        """Memory in bytes that `initialize` would hold for these arguments; nothing large is made here.

        Args:
            chunks: as of `Stage.initialize`.
            request: the same.
            handed: the same.
            most: what all sessions of the worker may hold at this stage, in bytes.

        Raises:
            RequestError: the request can't be served, or it alone needs more than `most`; the field says what to ask
                less of.
        """
        ...


class Pipeline(Protocol):
    """A streaming pipeline that a worker can serve.

    Attributes:
        spec: the dataflow.
        array_library: what the values given to its stages are; ``"torch"`` gives CPU tensors that the stage moves.
    """

    spec: StreamSpec
    array_library: Literal["numpy", "torch"]

    def build(self, stage: str, device: str) -> Stage:
        """Load the weights of one stage onto `device` (``"cpu"`` or ``"cuda:N"``).

        Called once per actor, on its own thread; may take minutes. On a GPU this call and all later ones run with a
        stream of the stage's own as the current one: what the stage computes there, the worker waits for.
        """
        ...


class Ranks(Protocol):
    """A worker group as one of its ranks sees it; `parallel.Parallel` is the one with collectives in it."""

    @property
    def rank(self) -> int:
        """Which this is, from 0; 0 leads."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...


@runtime_checkable
class ParallelPipeline(Protocol):
    """A pipeline some of whose stages can be computed by all ranks of a worker group together.

    Every rank builds such a stage and is given the same calls in the same order: what `Stage.run` returns counts on rank 0
    alone. The other stages of the pipeline live on rank 0, as on a worker without a group.

    Attributes:
        parallel_stages: their names.
    """

    parallel_stages: tuple[str, ...]

    def check_group(self, world: int) -> None:
        """Check that a group of `world` ranks can compute them; loads nothing.

        Raises:
            RequestError: it can't, as when `world` doesn't divide the attention heads; the field is ``world``.
        """
        ...

    def build_parallel(self, stage: str, device: str, ranks: Ranks) -> Stage:
        """Load one of `parallel_stages` for the rank that calls; as `Pipeline.build` otherwise.

        `ranks` has its process group when the stage is first run, and may have another one at a later run: a group that
        had to be formed again keeps its weights.
        """
        ...
