"""GPU twins of the chunk forms, with the same signatures; imported only when a GPU or the interpreter is asked for.

`import kernels.triton` does not import triton: the first use of a name below does.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "linear_exact": "kernels.triton.linear",
    "linear_stale": "kernels.triton.linear",
    "deep": "kernels.triton.mlp",
    "newton_schulz": "kernels.triton.orthogonalise",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"kernels.triton has no {name!r}; it has {', '.join(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)
