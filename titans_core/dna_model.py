"""A language model of DNA: context counts of a training genome, mixed by a network with a Titans memory.

    counts    how often each base followed each context of 1 to 12, 16 and 22 bases in the training genome, on both strands
              (weights: frozen once counted)
    memory    which contexts have been right of late in this stream, and what its stretch is like (state: learns at test time)
    logits    sum over contexts k of w_k(t) log p_k(base) + r(t), with w and r from the network; bits per base by log2

In training the counts leave the predicted base itself out, or a context seen once would seem certain. The state is a
fixed number of floats whatever the length of the sequence, and one call over T bases equals any split of it.

Axis letters: B streams, T bases, K context lengths, D width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from titans_core.blocks import Backbone
from titans_core.config import BackboneConfig, ConfigError, MemoryConfig, Mixer, require
from titans_core.memory import NeuralMemory
from titans_core.tokenizers import N, complement

Codes = NDArray[np.uint8]
FORMAT = "1"
KIND = "dna language model"
DIRECT = 12  # longest context whose counts may stand in a plain table of 4^k rows


def context_codes(codes: Codes, k: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each position the k bases before it as a base-4 number, and whether all of them are there and known."""
    length = len(codes)
    words, clean = np.zeros(length, np.int64), np.ones(length, bool)
    for back in range(k, 0, -1):
        part = np.full(length, N, np.uint8)
        part[back:] = codes[:-back]
        words = words * 4 + np.minimum(part, 3)
        clean &= part < N
    return words, clean


def _followed(strand: Codes, k: int) -> NDArray[np.int64]:
    """Every clean context of k bases and the base after it, as one number of k + 1 bases."""
    context, clean = context_codes(strand, k)
    clean &= strand < N
    return context[clean] * 4 + strand[clean]


@dataclass(frozen=True)
class ContextCounts:
    """Counts of the base after each context, on both strands of a training genome.

    direct[k] (4^k, 4); sparse[k] = (sorted context numbers, counts (n, 4)), saturating at 255.
    """

    orders: tuple[int, ...]
    direct: dict[int, NDArray[Any]]
    sparse: dict[int, tuple[NDArray[np.int64], NDArray[np.uint8]]]

    @classmethod
    def of(cls, contigs: Sequence[Codes], orders: Sequence[int]) -> ContextCounts:
        """Count contigs of encoded bases."""
        require(all(1 <= k <= 30 for k in orders), f"orders {tuple(orders)} must lie in 1 to 30")
        direct: dict[int, NDArray[Any]] = {}
        sparse: dict[int, tuple[NDArray[np.int64], NDArray[np.uint8]]] = {}
        for k in orders:
            pairs = np.concatenate([_followed(strand, k) for contig in contigs for strand in (contig, complement(contig))])
            if k <= DIRECT and 4**k <= max(len(pairs), 256):  # a plain table only where it is not mostly empty
                table = np.bincount(pairs, minlength=4 ** (k + 1)).reshape(-1, 4)
                direct[k] = np.minimum(table, 65_535).astype(np.uint16) if k > 8 else table.astype(np.int32)
            else:
                found, times = np.unique(pairs, return_counts=True)
                contexts, row = np.unique(found >> 2, return_inverse=True)
                counts = np.zeros((len(contexts), 4), np.uint8)
                counts[row, found & 3] = np.minimum(times, 255)
                sparse[k] = contexts, counts
        return cls(tuple(orders), direct, sparse)

    def __deepcopy__(self, _: dict[int, Any]) -> ContextCounts:
        return self  # frozen once counted; a copy would be hundreds of megabytes

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The tables by name, for a safetensors file."""
        found: dict[str, NDArray[Any]] = {f"direct.{k}": table for k, table in self.direct.items()}
        for k, (contexts, table) in self.sparse.items():
            found |= {f"contexts.{k}": contexts, f"sparse.{k}": table}
        return found

    @classmethod
    def from_tensors(cls, orders: Sequence[int], tensors: dict[str, NDArray[Any]]) -> ContextCounts:
        """Counts from what `tensors` gave."""
        direct = {k: tensors[f"direct.{k}"] for k in orders if f"direct.{k}" in tensors}
        return cls(tuple(orders), direct, {k: (tensors[f"contexts.{k}"], tensors[f"sparse.{k}"]) for k in orders if k not in direct})

    def look_up(self, codes: Codes, start: int, stop: int, *, leave_out: bool = False) -> NDArray[np.float32]:
        """Counts (T, K, 4) at positions start to stop of a sequence; leave_out takes each position's own count away."""
        first = max(start - max(self.orders), 0)
        part, skip = codes[first:stop], start - first
        target = part[skip:]
        found = np.zeros((stop - start, len(self.orders), 4), np.float32)
        for place, k in enumerate(self.orders):
            context, clean = (each[skip:] for each in context_codes(part, k))
            if k in self.direct:
                counts = self.direct[k][context].astype(np.float32)
            else:
                contexts, table = self.sparse[k]
                at = np.minimum(np.searchsorted(contexts, context), max(len(contexts) - 1, 0))
                counts = table[at].astype(np.float32) * (contexts[at] == context)[:, None]
            counts[~clean] = 0
            if leave_out:
                own = clean & (target < N)
                rows = np.flatnonzero(own)
                counts[rows, target[own]] = np.maximum(counts[rows, target[own]] - 1, 0)
            found[:, place] = counts
        return found

    def back_off(self, codes: Codes, start: int, stop: int, strength: float = 16.0) -> dict[int, NDArray[np.float64]]:
        """Interpolated back-off: for each order the probabilities (T, 4) of a chain from the uniform up to that order."""
        counts = self.look_up(codes, start, stop).astype(np.float64)
        chain, found = np.full((stop - start, 4), 0.25), {}
        for place, k in enumerate(self.orders):
            total = counts[:, place].sum(1, keepdims=True)
            chain = (counts[:, place] + strength * chain) / (total + strength)
            found[k] = chain
        return found


@dataclass(frozen=True, kw_only=True)
class DnaModelConfig:
    """orders: context lengths, rising; dim, heads, layers: the backbone."""

    orders: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 9, 10, 11, 12, 16, 22)
    dim: int = 48
    heads: int = 2
    layers: int = 1


@dataclass(frozen=True)
class DnaState:
    """The backbone's state, and the log-probabilities that the contexts gave the last base (B, K), with that base (B,)."""

    backbone: tuple[Any, ...]
    hits: Tensor
    last: Tensor


class DnaModel(nn.Module):
    """(counts, bases, state) -> (log-probabilities, state)."""

    rows: Tensor  # one-hot row of each code (5, 4)
    prior: Tensor  # added to every count (K, 1)

    def __init__(self, config: DnaModelConfig) -> None:
        super().__init__()
        self.config = config
        contexts = len(config.orders)
        self.enter = nn.Linear(6 * contexts + 5, config.dim)
        memory = MemoryConfig(dim=config.dim, heads=config.heads)
        block: Mixer = "lmm"
        self.backbone = Backbone(BackboneConfig(memory=memory, layers=(block,) * config.layers, persistent=0, feed_forward=2.0))
        self.weigh = nn.Linear(config.dim, contexts)
        self.rest = nn.Linear(config.dim, 4)
        nn.init.zeros_(self.weigh.weight)
        nn.init.constant_(self.weigh.bias, 1.0 / contexts)
        nn.init.zeros_(self.rest.weight)
        nn.init.zeros_(self.rest.bias)
        # The longer a context, the fewer bases follow it: its counts are taken at their word sooner.
        prior = torch.tensor([1.0 if k < 11 else 1.0 / 16 for k in config.orders])
        self.register_buffer("prior", prior[:, None], persistent=False)
        self.register_buffer("rows", torch.cat((torch.eye(4), torch.zeros(1, 4))), persistent=False)

    def initial_state(self, batch: int) -> DnaState:
        """Streams of which nothing has been seen."""
        zeros = self.prior.new_zeros(batch, len(self.config.orders))
        last = torch.full((batch,), N, dtype=torch.long, device=zeros.device)
        return DnaState(self.backbone.initial_state(batch), zeros, last)

    def forward(self, counts: Tensor, codes: Tensor, state: DnaState) -> tuple[Tensor, DnaState]:
        """counts (B, T, K, 4) of the contexts before each base, codes (B, T) -> log-probabilities (B, T, 4), next state.

        Position t sees the bases before t only: its own is used for what position t + 1 is told.
        """
        known, read, after = self.read(counts, codes, state)
        logits = (self.weigh(read)[..., None] * known).sum(2) + self.rest(read)
        return logits.log_softmax(-1), after

    def read(self, counts: Tensor, codes: Tensor, state: DnaState) -> tuple[Tensor, Tensor, DnaState]:
        """What the contexts say (log-probabilities, B, T, K, 4), what the backbone makes of it (B, T, D), next state."""
        total = counts.sum(-1)
        known = torch.log((counts + self.prior) / (total + 4 * self.prior.squeeze(-1))[..., None])  # (B, T, K, 4)
        own = codes.clamp(max=3)[..., None, None].expand(-1, -1, known.shape[2], 1)
        hits = known.gather(-1, own).squeeze(-1) + math.log(4)  # what each context gave the base that came
        hits = hits * (codes < N)[..., None]
        before = torch.cat((state.hits[:, None], hits[:, :-1]), dim=1)
        last = torch.cat((state.last[:, None], codes[:, :-1]), dim=1)
        size = torch.log1p(total)
        seen = torch.cat(((known + math.log(4)).flatten(2), size / 4, before, self.rows[last], torch.ones_like(size[..., :1])), dim=-1)
        read, backbone = self.backbone(self.enter(seen), state.backbone)
        return known, read, DnaState(backbone, hits[:, -1], codes[:, -1])


@contextmanager
def without_writes(model: DnaModel) -> Iterator[DnaModel]:
    """The same model with every memory's learning rate at zero: what the trained weights know without test-time memory."""
    held = []
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, NeuralMemory):
                gates, first = module.gates, 2 * module.config.heads * module.layers  # forget, momentum, then the rate
                held.append((gates, first, gates.weight[first:].clone(), gates.bias[first:].clone()))
                gates.weight[first:] = 0.0
                gates.bias[first:] = -100.0
    try:
        yield model
    finally:
        with torch.no_grad():
            for gates, first, weight, bias in held:
                gates.weight[first:] = weight
                gates.bias[first:] = bias


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a model is trained: `steps` steps of `batch` windows of `window` bases, at random places, each with fresh memory."""

    steps: int = 120
    window: int = 512
    batch: int = 32
    rate: float = 4e-3
    seed: int = 0


Gradients = Callable[[DnaModel, list[tuple[int, int]]], tuple[float, int, list[Tensor]]]


def train(
    model: DnaModel,
    counts: ContextCounts,
    contigs: Sequence[Codes],
    training: Training | None = None,
    *,
    gradients: Gradients | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train in place on the genome that was counted; bits per base of every step.

    gradients: takes the model and the windows of a step (contig, start) and gives what `window_gradients` gives; other
    processes may compute them.
    """
    training = training or Training()
    window = training.window
    choose = np.random.default_rng(training.seed)
    long = [place for place, contig in enumerate(contigs) if len(contig) > window]
    require(len(long) > 0, f"no contig is longer than the window of {window}")
    share = np.array([len(contigs[place]) - window for place in long], float)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.rate, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, training.rate, total_steps=training.steps + 1, pct_start=0.1)
    history = []
    model.train()
    for step in range(1, training.steps + 1):
        picked = [long[i] for i in choose.choice(len(long), training.batch, p=share / share.sum())]
        places = [(place, int(choose.integers(0, len(contigs[place]) - window))) for place in picked]
        if gradients is None:
            loss, known, found = window_gradients(model, counts, contigs, places, window)
        else:
            loss, known, found = gradients(model, places)
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient / max(known, 1)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(loss / max(known, 1) / math.log(2))
        if progress is not None:
            progress(step, training.steps, history[-1])
    model.eval()
    return history


def window_gradients(
    model: DnaModel, counts: ContextCounts, contigs: Sequence[Codes], places: Sequence[tuple[int, int]], window: int
) -> tuple[float, int, list[Tensor]]:
    """Summed negative log-likelihood of the known bases of some windows (nats), how many there are, and its gradients.

    Sums, so that parts of a step computed apart add up to the whole step.
    """
    rows = np.stack([counts.look_up(contigs[place], start, start + window, leave_out=True) for place, start in places])
    codes = torch.from_numpy(np.stack([contigs[place][start : start + window] for place, start in places])).long()
    answer, _ = model(torch.from_numpy(rows), codes, model.initial_state(len(places)))
    known = codes < N
    loss = -answer.gather(-1, codes.clamp(max=3)[..., None]).squeeze(-1)[known].sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), gradients, strict=True)]
    return loss.item(), int(known.sum()), filled


def bits_per_base(
    model: DnaModel, counts: ContextCounts, codes: Codes, start: int = 0, *, piece: int = 8192, state: DnaState | None = None
) -> tuple[float, DnaState]:
    """Mean bits of the known bases from `start` on, read once in order with the memory carried; memory use is flat."""
    state = state or model.initial_state(1)
    total, bases = 0.0, 0
    with torch.inference_mode():
        for at in range(start, len(codes), piece):
            stop = min(at + piece, len(codes))
            rows = torch.from_numpy(counts.look_up(codes, at, stop))[None]
            target = torch.from_numpy(codes[at:stop].astype(np.int64))[None]
            answer, state = model(rows, target, state)
            known = target < N
            total -= float(answer.gather(-1, target.clamp(max=3)[..., None]).squeeze(-1)[known].double().sum())
            bases += int(known.sum())
    return total / max(bases, 1) / math.log(2), state


def embed(model: DnaModel, counts: ContextCounts, codes: Codes, *, piece: int = 8192) -> NDArray[np.float32]:
    """Mean over a sequence of what the backbone reads at each base (D,), the memory carried from its first base on."""
    state, total = model.initial_state(1), np.zeros(model.config.dim, np.float64)
    with torch.inference_mode():
        for at in range(0, len(codes), piece):
            stop = min(at + piece, len(codes))
            rows = torch.from_numpy(counts.look_up(codes, at, stop))[None]
            _, read, state = model.read(rows, torch.from_numpy(codes[at:stop].astype(np.int64))[None], state)
            total += read[0].double().sum(0).numpy()
    return (total / max(len(codes), 1)).astype(np.float32)


def save(model: DnaModel, counts: ContextCounts, path: str | Path) -> None:
    """Weights and counts in one safetensors file, the configuration as JSON in its header."""
    tensors = {f"weights.{name}": tensor.numpy() for name, tensor in model.state_dict().items()} | counts.tensors()
    metadata = {"format": FORMAT, "kind": KIND, "config": json.dumps(asdict(model.config))}
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path, metadata)


def load(path: str | Path) -> tuple[DnaModel, ContextCounts]:
    """A model and its counts from what `save` wrote, ready to read. ConfigError where the file holds something else."""
    try:
        with safe_open(str(path), "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ConfigError(f"{path} is no safetensors file ({error})") from None
    if metadata.get("format") != FORMAT or metadata.get("kind", KIND) != KIND or not any("weights." in name for name in tensors):
        raise ConfigError(f"{path} holds no DNA language model of format {FORMAT}")
    settings = json.loads(metadata["config"])
    config = DnaModelConfig(**{**settings, "orders": tuple(settings["orders"])})
    model = DnaModel(config)
    weights = {name.removeprefix("weights."): torch.from_numpy(each) for name, each in tensors.items() if "weights." in name}
    model.load_state_dict(weights)
    return model.eval(), ContextCounts.from_tensors(config.orders, tensors)
