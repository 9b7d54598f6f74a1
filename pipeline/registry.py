"""Pipelines by reference: a built-in name, an object of a Python file, or an object of an installed module.

::

    world                      the world model; options: see `WORLD_OPTIONS`
    path/to/file.py:object     a `Pipeline`, or a callable that gives one when it is called with the options
    package.module:object      the same

Options come from a command line, so their values are texts. Loading a reference runs its code: it is as trusted as the
command line that names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from reelwire.spec import RequestError, SpecError, StreamSpec, validate

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
    options = {} if options is None else options
    built_in = {**BUILT_IN, **(more or {})}
    accepted = _FORMS.format(", ".join(built_in))
    place, colon, name = reference.rpartition(":")
    if not colon:
        if reference not in built_in:
            raise RequestError("pipeline", f"there is no {reference!r}; accepted: {accepted}")
        return built_in[reference](options)
    if not place or not name:
        raise RequestError("pipeline", f"{reference!r} is incomplete; accepted: {accepted}")
    return _checked(reference, _made(reference, _object(place, name), options))


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


def _object(place: str, name: str) -> Any:
    if not place.endswith(".py") and (os.sep in place or Path(place).is_file()):
        raise RequestError("pipeline", f"{place} is no Python file; accepted: a path that ends in .py")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))) or "nothing"
            raise RequestError("pipeline", f"{place} has no {name!r}; it has: {public}")
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise RequestError("pipeline", f"{path} is not a file; accepted: the path of a Python file that is there")
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
        raise RequestError("pipeline", f"{path} can't be run: {type(error).__name__}: {error}") from error
    return module


def _from_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise RequestError("pipeline", f"{name} can't be imported: {type(error).__name__}: {error}") from error


def _made(reference: str, found: Any, options: Mapping[str, str]) -> Any:
    if not isinstance(found, type) and _is_pipeline(found):
        if options:
            raise RequestError(min(options), f"{reference} is a ready pipeline; accepted: no options")
        return found
    if not callable(found):
        raise RequestError(
            "pipeline", f"{reference} is {_kind(found)}; accepted: a Pipeline or a callable that gives one"
        )
    try:
        return found(**options)
    except TypeError as error:
        given = ", ".join(options) or "none"
        raise RequestError("pipeline", f"{reference} doesn't take these options ({given}): {error}") from error


def _checked(reference: str, made: Any) -> Pipeline:
    if not _is_pipeline(made):
        raise RequestError(
            "pipeline", f"{reference} gives {_kind(made)}; accepted: an object with spec, array_library and build"
        )
    if made.array_library not in ("numpy", "torch"):
        raise RequestError("pipeline", f"{reference}: array_library is {made.array_library!r}; accepted: numpy, torch")
    if made.array_library == "torch":
        _check_installed(reference, ("torch",))
    try:
        validate(made.spec)
    except SpecError as error:
        raise RequestError("pipeline", f"{reference}: {error}") from error
    return cast(Pipeline, made)


def _is_pipeline(value: Any) -> bool:
    return (
        isinstance(getattr(value, "spec", None), StreamSpec)
        and hasattr(value, "array_library")
        and callable(getattr(value, "build", None))
    )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
