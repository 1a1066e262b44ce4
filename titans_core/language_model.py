"""A language model of any block: embedding, backbone, and the embedding again as the head; a pure function (tokens, state) -> (logits, state).

Two doors beside the plain call. `ragged` runs streams of different lengths, each to its own end, with no padding that a memory could learn.
`packed` runs rows that hold several documents: every document is a stream of its own, which starts with a fresh memory, a fresh
convolution and no keys to attend to, so that nothing crosses from one to the next.

Axis letters: B rows or streams, T tokens, V vocabulary, D model width.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from kernels import dispatch
from titans_core import decoding, tokenizers
from titans_core import state as value
from titans_core.blocks import Backbone
from titans_core.config import (
    FAMILY,
    PAPER_BLOCKS,
    PAPER_CHUNK,
    PRESETS,
    BackboneConfig,
    ConfigError,
    MemoryConfig,
    Mixer,
    Size,
    require,
)
from titans_core.memory import KernelMemory, NeuralMemory
from titans_core.tokenizers import Tokenizer

FORMAT = "1"
GROWING = ("attention", "deep_transformer", "swdt", "dot")  # mixers whose state holds every token so far
# For two processor cores: minutes, half an hour and an evening of training.
SMALL = {"tiny": Size(2, 64, 2), "small": Size(4, 128, 4), "base": Size(6, 256, 8)}
SIZES = SMALL | PRESETS
POLYNOMIAL_WIDTH = 48  # of a head, at most, where keys and queries get polynomial features
MemoryMode = Literal["on", "frozen", "zeroed"]


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """vocabulary: ids of the tokeniser, its special ones included; backbone: the blocks."""

    vocabulary: int
    backbone: BackboneConfig

    def __post_init__(self) -> None:
        require(self.vocabulary >= 2, f"vocabulary {self.vocabulary} must be at least 2")

    @property
    def grows(self) -> bool:
        """Whether the state grows with the sequence."""
        return any(mixer in GROWING for mixer in self.backbone.layers)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> LanguageModelConfig:
        settings = json.loads(text)
        backbone = settings["backbone"]
        memory = MemoryConfig(**backbone.pop("memory"))
        layers = tuple(backbone.pop("layers"))
        return cls(vocabulary=settings["vocabulary"], backbone=BackboneConfig(memory=memory, layers=layers, **backbone))


def configure(size: str, vocabulary: int, *, layers: str = "mag", memory: str = "exact", **settings: Any) -> LanguageModelConfig:
    """A model by the names of its parts.

    size: one of SIZES: the papers' (with their chunk 16, segment 512, window 2048 and 128 persistent tokens, Titans appendix E), or a
    small one for the CPU (chunk 64, segment and window 64, 4 persistent tokens). layers: a mixer, or several that alternate
    ("lmm+window"). memory: `exact` (the matrix memory with the true gradient) or a name of FAMILY. settings: fields of MemoryConfig, or
    window, segment and persistent of the blocks as `attention_window`, `segment`, `persistent`.

    Polynomial memories get more heads than the papers' tables where a head would be wider than 48, that of the 170M table: at degree 2 a
    width of 256 has 33,153 features.
    """
    require(size in SIZES, f"size '{size}' is none of {', '.join(SIZES)}")
    require(memory == "exact" or memory in FAMILY, f"memory '{memory}' is none of exact, {', '.join(FAMILY)}")
    blocks, dim, heads = SIZES[size]
    paper = size in PRESETS
    form = dict(PAPER_BLOCKS) if paper else {"window": 64, "segment": 64, "persistent": 4}
    for name, field in (("attention_window", "window"), ("segment", "segment"), ("persistent", "persistent")):
        if name in settings:
            form[field] = settings.pop(name)
    chosen: dict[str, Any] = {"dim": dim, "heads": heads, "chunk": PAPER_CHUNK if paper else 64} | FAMILY.get(memory, {}) | settings
    pattern = layers.split("+")
    if "swdt" in pattern:
        chosen.setdefault("window", 8)
    degree = chosen.get("degree", 1)
    while degree > 1 and "heads" not in settings and dim // chosen["heads"] > POLYNOMIAL_WIDTH:
        chosen["heads"] *= 2
    named = tuple(cast(Mixer, pattern[i % len(pattern)]) for i in range(blocks))
    return LanguageModelConfig(vocabulary=vocabulary, backbone=BackboneConfig(memory=MemoryConfig(**chosen), layers=named, **form))


class LanguageModel(nn.Module):
    """(tokens, state) -> (logits, state); the head is the embedding.

    Initialisation: embeddings of variance 1 / D, scaled by sqrt(D) on the way in, so that tokens enter with unit variance; every linear map of
    a block has variance 1 / fan-in, those that write to the residual stream divided by twice the number of blocks. (A spread of 0.02, as
    in GPT-2, leaves models of this size on the plateau of the uniform answer.) Gates, convolutions and initial memories keep what
    their layers gave them.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.backbone.dim
        self.embedding = nn.Parameter(torch.randn(config.vocabulary, dim) / math.sqrt(dim))
        self.backbone = Backbone(config.backbone)
        shrink = 1.0 / math.sqrt(2 * len(config.backbone.layers))
        with torch.no_grad():
            for name, module in self.backbone.named_modules():
                last = name.rpartition(".")[2]
                if isinstance(module, nn.Linear) and last not in ("gates", "lags"):
                    nn.init.normal_(module.weight, std=(shrink if last in ("out", "down") else 1.0) / math.sqrt(module.in_features))

    @property
    def parameters_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def initial_state(self, batch: int) -> tuple[Any, ...]:
        """Streams that have seen nothing. All are alike, so the persistent tokens are written once."""
        with torch.autocast(self.embedding.device.type, enabled=False):
            one = self.backbone.initial_state(1)
        return value.select(one, torch.zeros(batch, dtype=torch.long))

    def hidden(self, tokens: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """tokens (B, T) -> what the head reads (B, T, D), and the state after the last token, of the weights' type even under autocast."""
        x = F.embedding(tokens, self.embedding) * math.sqrt(self.config.backbone.dim)
        y, state = self.backbone(x, state)
        if torch.is_autocast_enabled(tokens.device.type):
            state = value.map_state(lambda leaf: leaf.to(self.embedding.dtype) if leaf.is_floating_point() else leaf, state)
        return y, state

    def head(self, hidden: Tensor) -> Tensor:
        """(..., D) -> logits (..., V)."""
        return dispatch.project(hidden, self.embedding)

    def forward(self, tokens: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
        """tokens (B, T) int64 -> logits (B, T, V) of the token after each, and the state after the last one."""
        hidden, state = self.hidden(tokens, state)
        return self.head(hidden), state

    def in_place(self) -> Callable[[Tensor, tuple[Any, ...]], tuple[Tensor, tuple[Any, ...]]]:
        """A function of one token a stream, (tokens (B,), state) -> (logits (B, V), state), that overwrites the state; no autograd.

        The numbers are those of the model called with (B, 1) tokens, to rounding. The given state must be `state.owned` and is not to be
        used again. The weights are those of now: make it anew when they change.
        """
        run, scale = decoding.in_place(self.backbone), math.sqrt(self.config.backbone.dim)

        @torch.inference_mode()
        def step(tokens: Tensor, state: tuple[Any, ...]) -> tuple[Tensor, tuple[Any, ...]]:
            x, state = run(F.embedding(tokens, self.embedding) * scale, state)
            return decoding.head(x, self.backbone.norm.weight, self.embedding), state

        return step

    def packed(self, tokens: Tensor, starts: Tensor, state: tuple[Any, ...] | None) -> tuple[Tensor, tuple[Any, ...] | None]:
        """Rows of several documents: tokens (B, T), starts (B, T) true at the first token of each -> logits (B, T, V) and the next state.

        A row that does not begin with a start goes on from its stream of `state`. With `state` None every row begins afresh and no state
        comes back. Raises ConfigError where the state grows and some rows go on while others begin: their lengths differ.
        """
        rows, columns = tokens.shape
        first = starts.clone()
        first[:, 0] = True
        row, column = first.nonzero(as_tuple=True)
        fresh = starts[row, column] if state is not None else torch.ones_like(row, dtype=torch.bool)
        if state is not None and not bool(fresh.any()):
            return self(tokens, state)
        require(state is None or not self.config.grows, "a state that grows cannot be carried past document boundaries: carry nothing")
        ends = torch.full_like(column, columns)
        ends[:-1] = torch.where(row[1:] == row[:-1], column[1:], columns)
        streams = self.initial_state(len(row))
        if state is not None and not bool(fresh.all()):
            going = (~fresh).nonzero(as_tuple=True)[0]
            streams = value.replace(streams, going, value.select(state, row[going]))
        lengths = ends - column
        offset = torch.arange(int(lengths.max()), device=tokens.device)
        place = (column[:, None] + offset).clamp(max=columns - 1)
        pieces, finished = ragged(self.hidden, tokens[row[:, None], place], lengths, streams)
        where = torch.cat(
            [((row[p.rows] * columns + column[p.rows] + p.start)[:, None] + offset[: p.y.shape[1]]).flatten() for p in pieces]
        )
        flat = torch.cat([p.y.flatten(0, 1) for p in pieces])
        hidden = torch.empty_like(flat).index_copy(0, where, flat).unflatten(0, (rows, columns))
        logits = self.head(hidden)
        if state is None:
            return logits, None
        after = state
        for which, part in finished:
            last = (ends[which] == columns).nonzero(as_tuple=True)[0]
            if len(last):
                after = value.replace(after, row[which[last]], value.select(part, last))
        return logits, after


class Piece(NamedTuple):
    """Outputs y (n, t, ...) of the streams `rows` (n,) at their tokens start to start + t."""

    rows: Tensor
    start: int
    y: Tensor


def ragged(
    run: Callable[[Tensor, Any], tuple[Tensor, Any]], x: Tensor, lengths: Tensor, state: Any
) -> tuple[list[Piece], list[tuple[Tensor, Any]]]:
    """Streams of different lengths, each to its own end: columns that the same streams share go in one call.

    run: (x, state) -> (y, state), of which any split into calls equals one call. x (B, T, ...), of which row i counts up to lengths[i] >= 1;
    state: B streams. Returns the outputs in pieces, and the states as the streams ended: pairs of rows and their states. A state that
    grows has one shape within a pair.
    """
    rows = torch.arange(len(lengths), device=lengths.device)
    pieces, finished, start = [], [], 0
    for stop in lengths.unique().tolist():
        y, state = run(x[rows, start:stop], state)
        pieces.append(Piece(rows, start, y))
        ended = lengths[rows] == stop
        done, on = ended.nonzero(as_tuple=True)[0], (~ended).nonzero(as_tuple=True)[0]
        if len(on) == 0:
            finished.append((rows, state))
            break
        finished.append((rows[done], value.select(state, done)))
        state, rows, start = value.select(state, on), rows[on], stop
    return pieces, finished


@contextmanager
def memory_mode(model: nn.Module, mode: MemoryMode) -> Iterator[None]:
    """How the memories of a model take part until the block ends.

    `on`: as trained. `frozen`: nothing is written and nothing forgotten, so a state made inside the block stays the initial memory; the memories
    of DeepTransformer, SWDT and Dot, which are nothing but what was written, stay empty. `zeroed`: what a memory layer puts out is 0.
    Weights are changed for the time of the block: use a model in one thread.
    """
    held: list[tuple[Tensor, Tensor]] = []

    def put(tensor: Tensor, number: float) -> None:
        held.append((tensor, tensor.clone()))
        tensor.fill_(number)

    with torch.no_grad():
        for module in model.modules() if mode != "on" else ():
            if not isinstance(module, NeuralMemory | KernelMemory):
                continue
            if mode == "zeroed":
                put(module.out.weight, 0.0)
            elif isinstance(module, KernelMemory):
                put(module.qkv.weight[2 * module.config.dim :], 0.0)  # values, and with them the rows
            else:
                heads = module.config.heads
                for rows in (slice(heads * module.forgets), slice(-heads * module.layers, None)):  # forgetting and the step
                    put(module.gates.weight[rows], 0.0)
                    put(module.gates.bias[rows], -1000.0)  # whose sigmoid is 0
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in held:
                tensor.copy_(before)


@contextmanager
def gate_statistics(model: LanguageModel) -> Iterator[dict[str, float]]:
    """Collects what the memories' gates do while the model runs; the figures are there when the block has ended.

    block.N.{forget,momentum,step}: means of the gates (step before the division that bounds it). block.N.branch and branch_sd: mean, and mean
    spread over tokens, of the gate that the memory puts on the attention of MAG and MAC. A branch that has collapsed shows a spread of 0.
    """
    sums: dict[str, list[float]] = {}
    found: dict[str, float] = {}
    hooks = []

    def note(name: str, number: Tensor) -> None:
        sums.setdefault(name, []).append(float(number))

    def memory_gates(name: str, memory: NeuralMemory) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            x = inputs[0].detach()
            opened = torch.sigmoid(F.linear(x, memory.gates.weight, memory.gates.bias).detach().float())
            sizes = [memory.config.heads * each for each in (memory.forgets, memory.layers, memory.layers)]
            for which, part in zip(("forget", "momentum", "step"), opened.split(sizes, dim=-1), strict=True):
                note(f"{name}.{which}", part.mean())

        return hook

    def branch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            opened = output.detach().float().sigmoid()
            note(f"{name}.branch", opened.mean())
            if opened.shape[1] > 1:
                note(f"{name}.branch_sd", opened.std(dim=1).mean())

        return hook

    for index, block in enumerate(model.backbone.blocks):
        for _, module in block.named_modules():
            if isinstance(module, NeuralMemory):
                # Of the memory, not of its gates: where the whole layer is one native call, the gates are not called.
                hooks.append(module.register_forward_hook(memory_gates(f"block.{index}", module)))
        mixer = cast(Any, block).mixer
        if hasattr(mixer, "memory_norm"):
            hooks.append(mixer.memory_norm.register_forward_hook(branch(f"block.{index}")))
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
        found.update({name: sum(numbers) / len(numbers) for name, numbers in sums.items()})


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters for AdamW: decay on the linear maps of the blocks alone; embeddings, gates, norms, convolutions, persistent tokens and initial
    memories have none."""
    linear = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in ("gates", "lags"):
            linear.add(f"{name}.weight")
    named = dict(model.named_parameters())
    return [
        {"params": [p for name, p in named.items() if name in linear], "weight_decay": weight_decay},
        {"params": [p for name, p in named.items() if name not in linear], "weight_decay": 0.0},
    ]


def save(model: LanguageModel, tokenizer: Tokenizer, path: str | Path) -> None:
    """Weights in one safetensors file, configuration and tokeniser as JSON in its header; replaced as a whole."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    metadata = {"format": FORMAT, "config": model.config.to_json(), "tokenizer": tokenizer.to_json()}
    new = Path(path).with_name(f"{Path(path).name}.new")
    save_file(tensors, new, {"tethys_language_model": json.dumps(metadata, sort_keys=True)})
    with open(new, "rb") as file:
        os.fsync(file.fileno())
    os.replace(new, path)


def load(path: str | Path) -> tuple[LanguageModel, Tokenizer]:
    """A model and its tokeniser from what `save` wrote, ready to read. Raises ConfigError for any other file."""
    try:
        with safe_open(str(path), "pt") as file:
            header = json.loads((file.metadata() or {}).get("tethys_language_model", "{}"))
            if header.get("format") != FORMAT:
                raise ConfigError(f"{path}: format {header.get('format')} of a language model is not {FORMAT}")
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path} is no language model: {error}") from error
    except Exception as error:  # safetensors raises its own error type for a broken file
        raise ConfigError(f"{path} is no language model: {error}") from error
    model = LanguageModel(LanguageModelConfig.from_json(header["config"]))
    model.load_state_dict(tensors)
    return model.eval(), tokenizers.from_json(header["tokenizer"])
