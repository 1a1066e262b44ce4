"""What a model is made of: plain data, checked when it is built, kept as JSON beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Rule = Literal["exact", "stale", "deep", "gated", "hybrid"]
RULES = get_args(Rule)
Mixer = Literal["lmm", "mac", "mag", "mal", "attention", "window"]
MIXERS = get_args(Mixer)


class ConfigError(ValueError):
    """A configuration that cannot be built: says which field, what it holds and what it may hold."""


def require(condition: bool, message: str) -> None:
    """Raise ConfigError unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """A neural long-term memory (Titans section 3.1).

    rule: `exact`, a matrix with the true per-token gradient (the default for streams: stays finite on autocorrelated
        keys, and the chunk never changes the result); `stale`, a matrix with the papers' gradient at the chunk's
        start; `deep`, a residual MLP of `depth` layers with LayerNorm, gradient at the chunk's start; `gated`, the
        gated MLP of Atlas++, likewise; `hybrid`, the MLP with an exact last layer (finite where `deep` explodes).
    chunk: tokens a gradient anchor serves (part of the function for every rule but `exact`).
    window: tokens whose loss each write descends (the Omega rule of ATLAS; 1 is Titans), for every rule but `hybrid`.
    read: the token reads `after` or `before` its own write, or at the chunk's `anchor` (cheapest; not for `exact`).
    momentum, decay: False removes eta or alpha (ablations of Titans table 5).
    decay_to_init: forgetting leads back to the learned initial memory instead of to zero.
    """

    dim: int
    heads: int = 4
    rule: Rule = "exact"
    chunk: int = 64
    window: int = 1
    read: Literal["after", "before", "anchor"] = "after"
    depth: int = 2
    expansion: int = 4
    conv: int = 4
    momentum: bool = True
    decay: bool = True
    decay_to_init: bool = True

    def __post_init__(self) -> None:
        require(self.dim > 0 and self.heads > 0, f"dim {self.dim} and heads {self.heads} must be positive")
        require(self.dim % self.heads == 0, f"dim {self.dim} must be a multiple of heads {self.heads}")
        require(self.rule in RULES, f"rule '{self.rule}' is none of {', '.join(RULES)}")
        require(self.window >= 1, f"window {self.window} must be at least 1")
        require(self.read in ("after", "before", "anchor"), f"read '{self.read}' is none of after, before, anchor")
        if self.rule == "exact":
            require(self.read != "anchor", "rule 'exact' has no anchor to read at: read 'after' or 'before'")
        if self.rule == "hybrid":
            require(self.window == 1, f"rule 'hybrid' has no Omega window, found window {self.window}: take 'exact' or 'deep'")
        require(self.chunk >= 1, f"chunk {self.chunk} must be at least 1")
        require(self.conv >= 1, f"conv {self.conv} must be at least 1 (1 switches the convolution off)")
        require(self.depth >= 1, f"depth {self.depth} must be at least 1")

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """A stack of blocks: `layers` names the mixer of each.

    window: tokens that sliding-window attention sees; segment: tokens of a MAC segment; persistent: learned tokens
    before the sequence (written into the memory once, and always visible to attention).
    """

    memory: MemoryConfig
    layers: tuple[Mixer, ...] = ("lmm", "lmm")
    window: int = 64
    segment: int = 64
    persistent: int = 4
    feed_forward: float = 8 / 3

    def __post_init__(self) -> None:
        for mixer in self.layers:
            require(mixer in MIXERS, f"layer '{mixer}' is none of {', '.join(MIXERS)}")
        require(len(self.layers) > 0, "layers must name at least one block")
        require(self.window >= 1 and self.segment >= 1, "window and segment must be at least 1")
        require(self.persistent >= 0, "persistent must not be negative")
        require(self.memory.width % 2 == 0, f"head width {self.memory.width} must be even (rotary positions)")

    @property
    def dim(self) -> int:
        """Width of the stream between blocks."""
        return self.memory.dim
