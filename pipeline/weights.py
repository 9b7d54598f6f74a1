"""Weights from safetensors: one file, or the shards of a folder; loaded strictly, so that nothing is left to chance.

Headers alone are read until a tensor is wanted, and tensors are read one at a time, straight to where they are to be.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reelwire.spec import RequestError

FIELD = "checkpoint"
NAMED_MAX = 4
"""Keys that an error names; it counts the others."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of a checkpoint, by name; none of them is in memory.

    Attributes:
        path: the file or the folder, for messages.
        files: tensor name to the file that holds it.
        shapes: tensor name to its shape.
    """

    path: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path, stem: str) -> Weights:
        """Read the headers of ``STEM.safetensors``, or of the shards that ``STEM.safetensors.index.json`` names.

        Args:
            path: a safetensors file, or a folder that holds one or its shards.
            stem: how the files in a folder are called, such as ``diffusion_pytorch_model``.

        Raises:
            RequestError: of the field ``checkpoint``: nothing is there, or it can't be read.
        """
        files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        listed = _listed(path, stem)
        for file, names in listed.items():
            for name, shape in _header(file).items():
                if name in files:
                    raise RequestError(FIELD, f"{name!r} is in {files[name].name} and in {file.name} of {path}")
                files[name], shapes[name] = file, shape
            for name in names or ():
                if files.get(name) != file:
                    raise RequestError(FIELD, f"the index of {path} looks for {name!r} in {file.name}; it isn't there")
        return cls(path, files, shapes)

    def read(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one after the other, on a device and in the dtype of the file."""
        from safetensors import safe_open

        for file in dict.fromkeys(self.files.values()):
            with safe_open(file, framework="pt", device=str(device)) as opened:
                for name in [name for name, place in self.files.items() if place == file]:
                    yield name, opened.get_tensor(name)

    def fingerprint(self) -> str:
        """What tells these weights from others: a hash of all names and shapes, and of the files' sizes and times."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self.files):
            digest.update(f"{name}{list(self.shapes[name])}".encode())
        for file in sorted(set(self.files.values())):
            stat = file.stat()
            digest.update(f"{file.name}/{stat.st_size}/{stat.st_mtime_ns}".encode())
        return digest.hexdigest()


def load_strictly(
    network: nn.Module,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype | None = None,
    *,
    rename: Callable[[str], str] = str,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Give a network, which may be on the meta device, the weights of a checkpoint: each one, and nothing else.

    Args:
        network: whose parameters and buffers are to be filled.
        weights: the checkpoint.
        device: where the network is to be.
        dtype: what its weights are to be; None: as in the checkpoint.
        rename: from a name of the checkpoint to the network's; ValueError: it has none there.
        tied: the network's second names for one tensor, to the first; a checkpoint may leave them out.

    Raises:
        RequestError: of the field ``checkpoint``: a key is missing or left over, or a tensor has another shape, no float
            dtype, or a value that isn't finite.
    """
    tied = {} if tied is None else tied
    own = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    names = renamed(weights.shapes, rename, weights.path)
    for second, first in tied.items():
        if first in names:
            names.setdefault(second, names[first])
    check_fit(own, {mine: weights.shapes[theirs] for mine, theirs in names.items()}, weights.path, names)
    owners: dict[str, list[str]] = {}
    for mine in own:
        owners.setdefault(names[mine], []).append(mine)
    for theirs, tensor in weights.read(device):
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            kind = str(tensor.dtype).removeprefix("torch.")
            reason = f"{theirs!r} of {weights.path} is {kind}; accepted: float32, bfloat16, float16"
            raise RequestError(FIELD, reason)
        if not bool(torch.isfinite(tensor).all()):
            raise RequestError(FIELD, f"{theirs!r} of {weights.path} holds values that aren't finite")
        # A copy in any case: a tensor of a file lies at any address, and the CPU's matrix kernels give the same bits only
        # for the same alignment.
        cast = tensor.to(tensor.dtype if dtype is None else dtype, copy=True)
        for mine in owners[theirs]:
            _put(network, mine, cast)
    network.requires_grad_(False).eval()


def renamed(keys: Iterable[str], rename: Callable[[str], str], path: Path) -> dict[str, str]:
    """A network's names of a checkpoint's keys, each to the key.

    Args:
        keys: those of the checkpoint.
        rename: from one of them to the network's; ValueError: it has none there.
        path: the checkpoint, for messages.

    Raises:
        RequestError: of the field ``checkpoint``: a key has no name there, or two have one; the message names the keys.
    """
    names: dict[str, str] = {}
    nameless: list[str] = []
    for theirs in keys:
        try:
            mine = rename(theirs)
        except ValueError:
            nameless.append(theirs)
            continue
        if mine in names:
            reason = f"{names[mine]!r} and {theirs!r} of {path} are both {mine!r} of the model; accepted: one of them"
            raise RequestError(FIELD, reason)
        names[mine] = theirs
    _refuse({"left over": nameless}, path)
    return names


def check_fit(
    needed: Mapping[str, Sequence[int]],
    given: Mapping[str, Sequence[int]],
    path: Path,
    names: Mapping[str, str] | None = None,
) -> None:
    """Check that a checkpoint holds exactly what a network needs.

    Args:
        needed: the network's names and shapes.
        given: the checkpoint's shapes by the network's names.
        path: the checkpoint, for messages.
        names: the network's names to the checkpoint's, for messages; None: they are the same.

    Raises:
        RequestError: of the field ``checkpoint``: it doesn't; the message names the keys, as the checkpoint does where it
            has them.
    """
    theirs = {} if names is None else names
    surplus = [theirs.get(mine, mine) for mine in given.keys() - needed.keys()]
    _refuse({"missing": list(needed.keys() - given.keys()), "left over": surplus}, path)
    for mine, shape in needed.items():
        if tuple(given[mine]) != tuple(shape):
            name = theirs.get(mine, mine)
            raise RequestError(FIELD, f"{name!r} of {path} is {list(given[mine])}; accepted: {list(shape)}")


def read_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder.

    Raises:
        RequestError: of the field ``checkpoint``: it isn't there, or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(FIELD, f"{path} can't be read ({error}); accepted: a JSON object") from None
    if not isinstance(config, dict):
        raise RequestError(FIELD, f"{path} holds no JSON object")
    return config


def _refuse(faults: Mapping[str, Sequence[str]], path: Path) -> None:
    """Refuse a checkpoint for its keys, if there are any."""
    said = [f"{len(keys)} {what} ({_some(sorted(keys))})" for what, keys in faults.items() if keys]
    if said:
        raise RequestError(FIELD, f"{path} doesn't fit the model: keys {', '.join(said)}")


def _put(network: nn.Module, name: str, tensor: Tensor) -> None:
    place, _, last = name.rpartition(".")
    module = network.get_submodule(place)
    if isinstance(getattr(module, last), nn.Parameter):
        setattr(module, last, nn.Parameter(tensor, requires_grad=False))
    else:
        setattr(module, last, tensor)


def _listed(path: Path, stem: str) -> dict[Path, list[str] | None]:
    """The files to read, and which tensors an index looks for in each."""
    if path.is_file():
        return {path: None}
    index, single = path / f"{stem}.safetensors.index.json", path / f"{stem}.safetensors"
    if index.is_file():
        return _from_index(path, index)
    if single.is_file():
        return {single: None}
    raise RequestError(FIELD, f"{path} holds neither {single.name} nor {index.name}")


def _from_index(folder: Path, index: Path) -> dict[Path, list[str] | None]:
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in placed.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(FIELD, f"{index} can't be read ({error!r}); accepted: JSON with a weight_map") from None
    files: dict[Path, list[str] | None] = {}
    for name, file in pairs:
        if Path(file).name != file:
            raise RequestError(FIELD, f"{index} places {name!r} in {file!r}; accepted: a file of the same folder")
        names = files.setdefault(folder / file, [])
        assert names is not None, "an index names its tensors"
        names.append(name)
    return files


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118  no dict
    except (OSError, SafetensorError) as error:
        raise RequestError(FIELD, f"{file} can't be read ({error}); accepted: a safetensors file") from None


def _some(names: Sequence[str]) -> str:
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
