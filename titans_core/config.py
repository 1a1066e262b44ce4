"""What a model is made of: plain data, checked when it is built, kept as JSON beside the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

Rule = Literal["exact", "stale", "deep", "gated", "hybrid", "atlas", "atlas++"]
RULES = get_args(Rule)
Mixer = Literal["lmm", "mac", "mag", "mal", "attention", "window", "deep_transformer", "swdt", "dot"]
MIXERS = get_args(Mixer)
MOST_FEATURES = 4096  # of a head: a memory of 64 by 4096 is 1 MB a head and stream, four times with momentum and anchor


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
        gated MLP of Atlas++, likewise; `hybrid`, the MLP with an exact last layer (finite where `deep` explodes);
        `atlas`, the Omega rule with Muon (orthogonalised momentum) on the MLP of `deep`, or with depth 1 on a matrix;
        `atlas++`, the same on the gated MLP.
    chunk: tokens a gradient anchor serves (part of the function for every rule but `exact`).
    window: tokens whose loss each write descends (the Omega rule of ATLAS; 1 is Titans), for every rule but `hybrid`.
    read: the token reads `after` or `before` its own write, or at the chunk's `anchor` (cheapest; not for `exact`).
    degree: polynomial features of keys and queries up to this degree, with learned coefficients (ATLAS section 3.1; 1: none).
        A head of width d then has binom(d + degree, degree) features: keep heads narrow (8 to 32 at degree 2).
    muon_every: tokens one Muon write gathers, a divisor of the chunk; 1 is the papers' Atlas, about 200 times the cost of
        the gradient, `chunk` is one write a chunk.
    loss: `l2`, 1/2 |M(k) - v|^2, or `dot`, -<M(k), v> (linear attention and its relatives; not for `exact` and `hybrid`).
    decayed_error: the error is that of the memory after forgetting, as in Gated DeltaNet; Titans take it before (`exact` only).
    momentum, decay: False removes eta or alpha (ablations of Titans table 5).
    forget: `head`, one alpha a token and head (and memory layer); `channel`, one for each output channel of a head (Titans NeurIPS
        section 2.1), for the matrix memories of `exact` and `stale`: an MLP's layers have other channels, and no paper says which forget.
    decay_to_init: forgetting leads back to the learned initial memory instead of to zero.
    precision: the least that products may have. With `bfloat16` the native kernels round their operands and sum in float32; states, gates
        and triangular systems stay float32, as does every implementation that gains nothing from it (`tethys doctor` says which runs).
    """

    dim: int
    heads: int = 4
    rule: Rule = "exact"
    chunk: int = 64
    window: int = 1
    read: Literal["after", "before", "anchor"] = "after"
    degree: int = 1
    muon_every: int = 1
    loss: Literal["l2", "dot"] = "l2"
    decayed_error: bool = False
    depth: int = 2
    expansion: int = 4
    conv: int = 4
    momentum: bool = True
    decay: bool = True
    forget: Literal["head", "channel"] = "head"
    decay_to_init: bool = True
    precision: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        require(self.dim > 0 and self.heads > 0, f"dim {self.dim} and heads {self.heads} must be positive")
        require(self.dim % self.heads == 0, f"dim {self.dim} must be a multiple of heads {self.heads}")
        require(self.rule in RULES, f"rule '{self.rule}' is none of {', '.join(RULES)}")
        require(self.window >= 1, f"window {self.window} must be at least 1")
        require(self.read in ("after", "before", "anchor"), f"read '{self.read}' is none of after, before, anchor")
        require(self.chunk >= 1, f"chunk {self.chunk} must be at least 1")
        require(self.precision in ("float32", "bfloat16"), f"precision '{self.precision}' is none of float32, bfloat16")
        require(self.loss in ("l2", "dot"), f"loss '{self.loss}' is none of l2, dot")
        if self.loss == "dot":
            require(
                self.rule not in ("exact", "hybrid"),
                f"rule '{self.rule}' solves for the errors of loss 'l2': with loss 'dot' take 'stale', which is then exact, or 'deep'",
            )
        require(self.forget in ("head", "channel"), f"forget '{self.forget}' is none of head, channel")
        if self.forget == "channel":
            require(
                self.rule in ("exact", "stale") and self.decay,
                f"forget 'channel' needs rule 'exact' or 'stale' and decay, found '{self.rule}' and {self.decay}",
            )
        if self.decayed_error:
            require(
                self.rule == "exact" and self.window == 1 and self.decay,
                f"decayed_error needs rule 'exact', window 1 and decay, found '{self.rule}', {self.window} and {self.decay}",
            )
        if self.rule == "exact":
            require(self.read != "anchor", "rule 'exact' has no anchor to read at: read 'after' or 'before'")
        if self.rule == "hybrid":
            require(self.window == 1, f"rule 'hybrid' has no Omega window, found window {self.window}: take 'exact' or 'deep'")
        if self.muon:
            require(self.read != "anchor", f"rule '{self.rule}' reads 'after' or 'before' the write, not at the anchor")
            divides = self.muon_every >= 1 and self.chunk % self.muon_every == 0
            require(divides, f"muon_every {self.muon_every} must divide chunk {self.chunk}")
        else:
            require(self.muon_every == 1, f"muon_every {self.muon_every} belongs to rules 'atlas' and 'atlas++', not to '{self.rule}'")
        require(self.degree >= 1, f"degree {self.degree} must be at least 1")
        require(
            self.features <= MOST_FEATURES,
            f"degree {self.degree} gives a head of width {self.width} {self.features} features, at most {MOST_FEATURES}: take more heads",
        )
        require(self.conv >= 1, f"conv {self.conv} must be at least 1 (1 switches the convolution off)")
        require(self.depth >= 1, f"depth {self.depth} must be at least 1")

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    @property
    def features(self) -> int:
        """Width of a head's keys and queries as its memory sees them."""
        return self.width if self.degree == 1 else math.comb(self.width + self.degree, self.degree)

    @property
    def matrix(self) -> bool:
        """Whether the memory is one matrix, rather than an MLP."""
        return self.rule in ("exact", "stale") or (self.rule == "atlas" and self.depth == 1)

    @property
    def muon(self) -> bool:
        """Whether momentum is orthogonalised before it is written."""
        return self.rule in ("atlas", "atlas++")


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    """A stack of blocks: `layers` names the mixer of each.

    window: tokens that sliding-window attention sees; segment: tokens of a MAC segment; persistent: learned tokens
    before the sequence (written into the memory once, and always visible to attention). `deep_transformer`, `swdt` and `dot` have
    one form each: of the memory's settings they take dim, heads and conv, `swdt` and `dot` the window, and `dot` the decay.
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
        if "swdt" in self.layers:
            require(self.memory.window > 1, "layer 'swdt' writes a window of tokens: set the memory's window to 2 or more")
        require(len(self.layers) > 0, "layers must name at least one block")
        require(self.window >= 1 and self.segment >= 1, "window and segment must be at least 1")
        require(self.persistent >= 0, "persistent must not be negative")
        require(self.memory.width % 2 == 0, f"head width {self.memory.width} must be even (rotary positions)")

    @property
    def dim(self) -> int:
        """Width of the stream between blocks."""
        return self.memory.dim


# The memories the papers name, as settings (Titans appendix C, ATLAS Table 1). No paper gives the window: 8 is ours.
FAMILY: dict[str, dict[str, Any]] = {
    "titans": {"rule": "deep"},
    "delta_net": {"momentum": False, "decay": False},
    "gated_delta_net": {"momentum": False, "decayed_error": True, "decay_to_init": False},
    "ttt_linear": {"rule": "deep", "depth": 1, "momentum": False, "decay": False},
    "ttt_mlp": {"rule": "deep", "momentum": False, "decay": False},
    "dla": {"rule": "deep", "loss": "dot", "momentum": False, "degree": 2},
    "swla": {"rule": "stale", "loss": "dot", "momentum": False, "window": 8, "degree": 2},
    "omega_net": {"rule": "deep", "momentum": False, "window": 8, "degree": 2},
    "atlas": {"rule": "atlas", "window": 8, "degree": 2},
    "atlas++": {"rule": "atlas++", "window": 8, "degree": 2},
}


def family(name: str, **settings: Any) -> MemoryConfig:
    """The named memory; `settings` (dim at least) go before the family's own."""
    require(name in FAMILY, f"memory '{name}' is none of {', '.join(FAMILY)}")
    return MemoryConfig(**(FAMILY[name] | settings))


class Size(NamedTuple):
    """Geometry of a language model of the papers."""

    blocks: int
    dim: int
    heads: int


PAPER_CHUNK, PAPER_BLOCKS = 16, {"window": 2048, "segment": 512, "persistent": 128}  # Titans appendix E
# Titans table 5 and ATLAS table 7, which are the same.
PRESETS = {"170M": Size(12, 768, 16), "340M": Size(24, 1024, 16), "760M": Size(24, 1536, 16), "1.3B": Size(18, 2048, 8)}
