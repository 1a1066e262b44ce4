"""State as a value: everything that learns at test time, for many streams at once.

A state is any nesting of dataclasses, named tuples, tuples and dicts whose leaves are tensors with the streams on
their first axis, or `None`. These functions work on every such nesting, so no model writes its own:
`stack` and `split` join and part streams, `select` and `replace` move some of them, `to_bytes` and `from_bytes`
carry them to disk or over a network as safetensors (never pickle).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
from torch import Tensor

FORMAT_VERSION = 1

S = TypeVar("S")


class StateError(ValueError):
    """A state that does not fit: another model's, another version's, or a broken file."""


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """Named parts of an inner node; None for a leaf."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    if isinstance(node, tuple):
        names = getattr(node, "_fields", None) or [str(i) for i in range(len(node))]
        return list(zip(names, node, strict=True))
    if isinstance(node, dict):
        return sorted(node.items())
    return None


def _map(function: Callable[..., Any], first: Any, *others: Any, path: str = "") -> Any:
    """Apply `function(path, leaf, *other leaves)` to every tensor; the nesting is kept."""
    if first is None:
        return None
    children = _children(first)
    if children is None:
        if not isinstance(first, Tensor):
            raise StateError(f"state leaf '{path}' is {type(first).__name__}, not a tensor")
        return function(path, first, *others)
    other_children = [_children(o) for o in others]
    if any(c is None or [n for n, _ in c] != [n for n, _ in children] for c in other_children):
        raise StateError(f"states have different parts at '{path or 'the root'}'")
    mapped = {
        name: _map(
            function,
            child,
            *[cast(list[tuple[str, Any]], c)[i][1] for c in other_children],
            path=f"{path}.{name}" if path else name,
        )
        for i, (name, child) in enumerate(children)
    }
    if isinstance(first, dict):
        return mapped
    if dataclasses.is_dataclass(first):
        return dataclasses.replace(cast(Any, first), **mapped)
    return type(first)(**mapped) if hasattr(first, "_fields") else tuple(mapped.values())


def leaves(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its dotted path, in a fixed order."""
    if state is None:
        return
    children = _children(state)
    if children is None:
        yield path, state
        return
    for name, child in children:
        yield from leaves(child, f"{path}.{name}" if path else name)


def map_state(function: Callable[[Tensor], Tensor], state: S) -> S:
    """The same nesting with `function` applied to every tensor."""
    return cast(S, _map(lambda _, leaf: function(leaf), state))


def map_leaves(function: Callable[[str, Tensor], Tensor], state: S) -> S:
    """As `map_state`, with the path of every tensor."""
    return cast(S, _map(function, state))


def count(state: Any) -> int:
    """Number of streams held."""
    sizes = {leaf.shape[0] for _, leaf in leaves(state)}
    if len(sizes) != 1:
        raise StateError(f"the tensors of a state disagree on the number of streams: {sorted(sizes)}")
    return sizes.pop()


def stack(states: Sequence[S]) -> S:
    """Join states along the stream axis, in the given order."""
    if not states:
        raise StateError("nothing to stack: no states given")
    return cast(S, _map(lambda _, *parts: torch.cat(parts), *states))


def split(state: S, sizes: Sequence[int] | None = None) -> list[S]:
    """Part a state along the stream axis: one stream each, or the given sizes. The parts own their memory."""
    total = count(state)
    sizes = [1] * total if sizes is None else list(sizes)
    if sum(sizes) != total:
        raise StateError(f"sizes {sizes} sum to {sum(sizes)}, the state holds {total} streams")
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return [
        map_state(lambda leaf, a=a, b=b: leaf[a:b].clone(), state)  # type: ignore[misc]
        for a, b in zip(bounds, bounds[1:], strict=False)
    ]


def select(state: S, index: Tensor | Sequence[int]) -> S:
    """The streams at `index` (long, any order), as a new state."""
    rows = torch.as_tensor(index, dtype=torch.long)
    return map_state(lambda leaf: leaf.index_select(0, rows.to(leaf.device)), state)


def replace(state: S, index: Tensor | Sequence[int], part: S) -> S:
    """A new state in which the streams at `index` are those of `part`; the others are untouched."""
    rows = torch.as_tensor(index, dtype=torch.long)
    return cast(S, _map(lambda _, leaf, new: leaf.index_copy(0, rows.to(leaf.device), new), state, part))


def owned(state: S) -> S:
    """The same numbers in contiguous tensors of their own, no two of one memory: a state that may be overwritten."""
    return map_state(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), state)


def write_(state: S, index: Tensor, part: S) -> None:
    """`replace` in place: the streams at `index` (long) become those of `part`."""
    with torch.inference_mode():
        for (_, leaf), (_, new) in zip(leaves(state), leaves(part), strict=True):
            leaf.index_copy_(0, index, new.to(leaf.dtype))


def to_bytes(state: Any, **metadata: str) -> bytes:
    """safetensors bytes with the format version; `metadata` (strings) travels along.

    Equal states give equal bytes, so bytes can be hashed and compared.
    """
    # A copy of each: parts of a state may be one tensor (a fresh anchor is the memory itself), which safetensors refuses.
    tensors = {path: leaf.detach().cpu().contiguous().clone() for path, leaf in leaves(state)}
    # One metadata entry only: safetensors writes several in random order, and equal states must give equal bytes.
    header = json.dumps({"format_version": FORMAT_VERSION, "metadata": metadata}, sort_keys=True)
    return safetensors.torch.save(tensors, metadata={"tethys_state": header})


def read_metadata(data: bytes) -> dict[str, str]:
    """The metadata given to `to_bytes`; raises StateError for bytes of another format or version."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["tethys_state"])
        version, metadata = int(header["format_version"]), header["metadata"]
    except (KeyError, ValueError, TypeError) as error:
        raise StateError(f"these {len(data)} bytes are not a saved state ({type(error).__name__})") from error
    if version != FORMAT_VERSION:
        raise StateError(f"the saved state has format version {version}, this program reads {FORMAT_VERSION}")
    return cast(dict[str, str], metadata)


def from_bytes(data: bytes, like: S) -> S:
    """Rebuild a state saved by `to_bytes`.

    `like`: a state of the same model (any number of streams, for instance one fresh stream) that gives nesting,
    dtypes, devices and trailing shapes; bytes that do not fit it raise StateError naming the tensor.
    """
    read_metadata(data)
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # safetensors raises its own error types for broken files
        raise StateError(f"the saved state cannot be read: {error}") from error
    expected = {path for path, _ in leaves(like)}
    if expected != set(tensors):
        missing, extra = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        raise StateError(f"the saved state is another model's: missing {missing}, unexpected {extra}")

    def take(path: str, leaf: Tensor) -> Tensor:
        saved = tensors[path]
        if saved.shape[1:] != leaf.shape[1:] or saved.dtype != leaf.dtype:
            raise StateError(
                f"'{path}' was saved as {saved.dtype} {list(saved.shape[1:])} a stream, "
                f"this model has {leaf.dtype} {list(leaf.shape[1:])}"
            )
        return saved.to(leaf.device)

    rebuilt = cast(S, _map(take, like))
    count(rebuilt)
    return rebuilt
