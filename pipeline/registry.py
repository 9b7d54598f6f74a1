"""Pipelines by reference: a built-in name, an object of a Python file, or an object of an installed module.

::

    world                      the world model; options: see `WORLD_OPTIONS`
    path/to/file.py:object     a `Pipeline`, or a callable that gives one when it is called with the options
    package.module:object      the same

Kinds of jobs are named in the same way (`load_jobs`): there the object is a `job.JobPipeline`.

Options come from a command line, so their values are texts. Loading a reference runs its code: it is as trusted as the
command line that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from reelwire.job_spec import JobSpec, validate_job
from reelwire.spec import RequestError, SpecError, StreamSpec, validate

from .job import JobPipeline
from .stage import Pipeline

if TYPE_CHECKING:
    from .world.config import WorldConfig

_WORLD_NEEDS = ("torch", "diffusers", "transformers", "safetensors", "ftfy")
WORLD_OPTIONS: Mapping[str, str] = {
    "model": "tiny (weights drawn from a seed) or lingbot-world-fast",
    "checkpoint": "the folder with the weights",
    "transformer": "another place for that part of the checkpoint",
    "vae": "the same",
    "text_encoder": "the same",
    "tokenizer": "the same",
    "chunk_size": "latent frames per chunk",
    "control": "cam or act; of a checkpoint whatever it takes",
    "dtype": "what a checkpoint's DiT computes in",
    "condition_constant": "on, or off: encode every chunk, also where that is known to change nothing",
    "latent_cache_bytes": "memory for latents that sessions with the same beginning share; 0: none",
}
"""Options of the built-in pipeline ``world``."""
_CACHE_BYTES_MAX = 1 << 50
_FORMS = "a built-in name ({}), path/to/file.py:object, or package.module:object"


def load(
    reference: str,
    options: Mapping[str, str] | None = None,
    more: Mapping[str, Callable[[Mapping[str, str]], Pipeline]] | None = None,
) -> Pipeline:
    """The pipeline that a reference names, with a validated spec and no weights loaded yet.

    Args:
        reference: see the module's docstring.
        options: what the pipeline is made with; a ready object takes none.
        more: built-in names beside `BUILT_IN`, and what makes them: those of whoever asks.

    Raises:
        RequestError: there is no such pipeline, or it doesn't take these options; the message says what is accepted.
    """
    made = _named("pipeline", reference, {} if options is None else options, {**BUILT_IN, **(more or {})}, _PIPELINE)
    return cast(Pipeline, made)


def load_jobs(
    reference: str,
    options: Mapping[str, str] | None = None,
    more: Mapping[str, Callable[[Mapping[str, str]], JobPipeline]] | None = None,
) -> JobPipeline:
    """The kinds of jobs that a reference names, checked, with no weights loaded yet.

    Args:
        reference: see the module's docstring.
        options: what they are made with; a ready object takes none.
        more: built-in names beside `BUILT_IN_JOBS`, and what makes them: those of whoever asks.

    Raises:
        RequestError: of the field ``jobs``, or of an option: there is no such thing, or it doesn't take these options.
    """
    made = _named("jobs", reference, {} if options is None else options, {**BUILT_IN_JOBS, **(more or {})}, _JOBS)
    return cast(JobPipeline, made)


def _world(options: Mapping[str, str]) -> Pipeline:
    _check_installed("world", _WORLD_NEEDS)
    from .world.pipeline import LATENT_CACHE_BYTES, WorldPipeline

    for name in options:
        if name not in WORLD_OPTIONS:
            raise RequestError(name, f"unknown option of 'world'; accepted: {', '.join(WORLD_OPTIONS)}")
    return replace(
        WorldPipeline.of(_world_config(options)),
        condition_constant=_switch("condition_constant", options.get("condition_constant", "on")),
        latent_cache_bytes=_integer(
            "latent_cache_bytes", options.get("latent_cache_bytes", str(LATENT_CACHE_BYTES)), 0, _CACHE_BYTES_MAX
        ),
    )


def _world_config(options: Mapping[str, str]) -> WorldConfig:
    from .world.config import MODELS, ControlKind, Dtype, buildable_models

    folder = options.get("checkpoint")
    model, control = options.get("model", "tiny" if folder is None else "lingbot-world-fast"), options.get("control")
    if model not in MODELS:
        raise RequestError("model", f"there is no {model!r}; accepted: {', '.join(MODELS)}")
    if control not in (None, "cam", "act"):
        raise RequestError("control", f"{control!r} is not accepted; accepted: cam, act")
    dtype = options.get("dtype", "bfloat16")
    if dtype not in get_args(Dtype):
        raise RequestError("dtype", f"{dtype!r} is not accepted; accepted: {', '.join(get_args(Dtype))}")
    chunk_size = _integer("chunk_size", options.get("chunk_size", "3"), 1, 64)
    parts = {name: options[name] for name in ("transformer", "vae", "text_encoder", "tokenizer") if name in options}
    if folder is None or model in buildable_models():
        for name in ("checkpoint", *parts, *(["dtype"] if "dtype" in options else [])):
            if name in options:
                raise RequestError(
                    name, f"is given to model {model!r}, which reads no weights; accepted: only with a checkpoint"
                )
        return MODELS[model](chunk_size, cast(ControlKind, control or "cam"))
    from .world.checkpoint import Checkpoint

    checkpoint = Checkpoint.at(folder, parts)
    return checkpoint.config(chunk_size, cast("ControlKind | None", control), cast(Dtype, dtype))


BUILT_IN: Mapping[str, Callable[[Mapping[str, str]], Pipeline]] = {"world": _world}
"""Name of a built-in pipeline -> what makes it from its options."""
BUILT_IN_JOBS: Mapping[str, Callable[[Mapping[str, str]], JobPipeline]] = {}
"""Name of built-in kinds of jobs -> what makes them from their options."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a reference is to name.

    Attributes:
        words: what it is called.
        members: what it must have.
        fits: whether an object is one.
        check: raises a SpecError when it contradicts itself.
    """

    words: str
    members: str
    fits: Callable[[Any], bool]
    check: Callable[[Any], None]


def _named(
    field: str,
    reference: str,
    options: Mapping[str, str],
    built_in: Mapping[str, Callable[[Mapping[str, str]], Any]],
    wanted: _Wanted,
) -> Any:
    accepted = _FORMS.format(", ".join(built_in) or "none")
    place, colon, name = reference.rpartition(":")
    if not colon:
        if reference not in built_in:
            raise RequestError(field, f"there is no {reference!r}; accepted: {accepted}")
        return built_in[reference](options)
    if not place or not name:
        raise RequestError(field, f"{reference!r} is incomplete; accepted: {accepted}")
    return _checked(field, reference, _made(field, reference, _object(field, place, name), options, wanted), wanted)


def _check_installed(reference: str, packages: Sequence[str]) -> None:
    """Looked for, not imported: whoever only asks for the spec shall not wait for torch."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise RequestError("pipeline", f"{reference!r} needs {package}, which is missing; install reelwire[worker]")


def _integer(name: str, text: str, least: int, most: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise RequestError(name, f"{text!r} is not accepted; accepted: an integer from {least} to {most}")
    return value


def _switch(name: str, text: str) -> bool:
    truth = {"on": True, "true": True, "off": False, "false": False}  # the latter two as a TOML file's values arrive
    if text not in truth:
        raise RequestError(name, f"{text!r} is not accepted; accepted: on, off")
    return truth[text]


def _object(field: str, place: str, name: str) -> Any:
    if not place.endswith(".py") and (os.sep in place or Path(place).is_file()):
        raise RequestError(field, f"{place} is no Python file; accepted: a path that ends in .py")
    module = _from_file(field, Path(place)) if place.endswith(".py") else _from_module(field, place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))) or "nothing"
            raise RequestError(field, f"{place} has no {name!r}; it has: {public}")
        found = getattr(found, part)
    return found


def _from_file(field: str, path: Path) -> Any:
    if not path.is_file():
        raise RequestError(field, f"{path} is not a file; accepted: the path of a Python file that is there")
    name = f"reelwire_pipeline_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path.resolve())
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up while it runs
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise RequestError(field, f"{path} can't be run: {type(error).__name__}: {error}") from error
    return module


def _from_module(field: str, name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise RequestError(field, f"{name} can't be imported: {type(error).__name__}: {error}") from error


def _made(field: str, reference: str, found: Any, options: Mapping[str, str], wanted: _Wanted) -> Any:
    if not isinstance(found, type) and wanted.fits(found):
        if options:
            raise RequestError(min(options), f"{reference} is a ready {wanted.words.lower()}; accepted: no options")
        return found
    if not callable(found):
        raise RequestError(
            field, f"{reference} is {_kind(found)}; accepted: a {wanted.words} or a callable that gives one"
        )
    try:
        return found(**options)
    except TypeError as error:
        given = ", ".join(options) or "none"
        raise RequestError(field, f"{reference} doesn't take these options ({given}): {error}") from error


def _checked(field: str, reference: str, made: Any, wanted: _Wanted) -> Any:
    if not wanted.fits(made):
        raise RequestError(field, f"{reference} gives {_kind(made)}; accepted: an object with {wanted.members}")
    if made.array_library not in ("numpy", "torch"):
        raise RequestError(field, f"{reference}: array_library is {made.array_library!r}; accepted: numpy, torch")
    if made.array_library == "torch":
        _check_installed(reference, ("torch",))
    try:
        wanted.check(made)
    except SpecError as error:
        raise RequestError(field, f"{reference}: {error}") from error
    return made


def _is_pipeline(value: Any) -> bool:
    return (
        isinstance(getattr(value, "spec", None), StreamSpec)
        and hasattr(value, "array_library")
        and callable(getattr(value, "build", None))
    )


def _does_jobs(value: Any) -> bool:
    kinds = getattr(value, "jobs", None)
    return (
        isinstance(kinds, tuple)
        and all(isinstance(kind, JobSpec) for kind in kinds)
        and hasattr(value, "array_library")
        and callable(getattr(value, "check_group", None))
        and callable(getattr(value, "build", None))
    )


def _check_stream(made: Any) -> None:
    validate(made.spec)


def _check_kinds(made: Any) -> None:
    names = [spec.name for spec in made.jobs]
    if not names:
        raise SpecError("there is no kind of job")
    for name in names:
        if names.count(name) > 1:
            raise SpecError(f"two kinds of jobs are called {name!r}")
    for spec in made.jobs:
        validate_job(spec)


_PIPELINE = _Wanted("Pipeline", "spec, array_library and build", _is_pipeline, _check_stream)
_JOBS = _Wanted("JobPipeline", "jobs, array_library, check_group and build", _does_jobs, _check_kinds)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
