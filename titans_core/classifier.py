"""SequenceClassifier: which class a DNA sequence belongs to, from where its motifs stand and from what it is made of.

    one-hot rows -> motif convolution -> max-pool -> exp        tokens: how well each motif fits near each place
    tokens -> backbone (Titans memory) -> tokens                 what the sequence held so far
    head: every token by its place, and the maximum and mean over all of them
    composition: a linear map of the sequence's k-mer counts (a k-mer logistic regression inside the model)
    logits = a * head + b * composition + c, with a, b and c fitted on held-out rows

A head that only pools loses where a motif stands (core promoters fall from MCC 73 to 53); one that only looks at places
loses what a bag of k-mers sees (mouse transcription factors fall from 60 to 50). The classifier keeps both.
exp after the first convolution makes a strong match outweigh many weak ones, as binding energies do
(Koo & Ploenzke 2021, "Improving representations of genomic sequence motifs").

Axis letters: B sequences, L bases, M motifs, T tokens = ceil(L / pool), D model width, C classes.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from titans_core.blocks import Backbone
from titans_core.config import BackboneConfig, ConfigError, MemoryConfig, Mixer, Rule, require

FORMAT = "1"
Strands = Literal["forward", "both", "equivariant"]


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """Shape and classes of a classifier; it travels with the weights.

    classes: names, in the order of the logits (sorted, so that it never depends on the order of rows).
    length: bases the model looks at; shorter sequences are padded with N on the right, longer ones cut about their
        middle (`fit_length` in pipelines.genomics.training counts both).
    strands: "both" averages the logits of a sequence and its reverse complement, and trains on either at random;
        "forward" keeps them apart, as promoters and splice sites need; "equivariant" looks for every motif on both strands
        at each place, reads the places in both directions with the same weights and averages what is read.
        With "both" and "equivariant" a sequence and its reverse complement get the same answer, to the bit.
    kmer: bases of the words whose counts the composition branch sees; 0 leaves it out.
    task: "single" label, or "multi" (each class on its own, sigmoid instead of softmax).
    """

    classes: tuple[str, ...]
    length: int
    strands: Strands = "forward"
    motifs: int = 96
    motif_width: int = 15
    pool: int = 6
    dim: int = 64
    heads: int = 4
    layers: tuple[Mixer, ...] = ("lmm",)
    rule: Rule = "exact"
    window: int = 1
    feed_forward: float = 1.0
    place_width: int = 16
    kmer: int = 6
    dropout: float = 0.3
    task: Literal["single", "multi"] = "single"

    def __post_init__(self) -> None:
        require(len(self.classes) >= 2 or self.task == "multi", "a single-label classifier needs at least two classes")
        require(list(self.classes) == sorted(set(self.classes)), f"classes {self.classes} must be sorted and distinct")
        require(self.length >= 1, f"length {self.length} must be positive")
        require(self.motif_width % 2 == 1, f"motif_width {self.motif_width} must be odd")
        require(self.pool >= 1, f"pool {self.pool} must be positive")
        require(0 <= self.kmer <= 8, f"kmer {self.kmer} must lie in 0 to 8 (4^kmer weights a class)")
        require(self.strands in ("forward", "both", "equivariant"), f"strands '{self.strands}' is none of forward, both, equivariant")
        require(self.task in ("single", "multi"), f"task '{self.task}' is neither single nor multi")

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> ClassifierConfig:
        """A config from what `dataclasses.asdict` gave and JSON kept."""
        return cls(**{**settings, "classes": tuple(settings["classes"]), "layers": tuple(settings["layers"])})

    @property
    def tokens(self) -> int:
        return -(-self.length // self.pool)


@dataclass(frozen=True)
class Card:
    """What a saved classifier says of itself beside its configuration: data digests and measured scores."""

    data: dict[str, str] = field(default_factory=dict)
    scores: dict[str, float] = field(default_factory=dict)


def reverse_complement(codes: Tensor) -> Tensor:
    """Encoded bases (..., L), A 0 to T 3 and N 4, on the other strand."""
    flipped = codes.flip(-1)
    return torch.where(flipped < 4, 3 - flipped, flipped)


def either_strand(codes: Tensor) -> Tensor:
    """Encoded bases (B, L): of each row and its reverse complement the smaller one, so that both are the same row.

    Which strand goes first changes no average over both; it only makes them round alike.
    """
    other = reverse_complement(codes)
    differ = codes != other
    first = differ.to(torch.uint8).argmax(-1, keepdim=True)  # 0 where the two are equal, which is right as well
    smaller = codes.gather(-1, first) <= other.gather(-1, first)
    return torch.where(smaller, codes, other)


def word_counts(codes: Tensor, k: int, strands: str) -> Tensor:
    """Counts of the clean k-mers of encoded bases (B, L) -> (B, 4^k), rows of length one (zero rows stay zero)."""
    counts = codes.new_zeros(codes.shape[0], 4**k + 1, dtype=torch.float32)
    for strand in (codes,) if strands == "forward" else (codes, reverse_complement(codes)):
        windows = strand.unfold(1, k, 1)  # (B, L - k + 1, k)
        place = 4 ** torch.arange(k - 1, -1, -1, device=codes.device)
        words = torch.where((windows < 4).all(-1), (windows * place).sum(-1), 4**k)
        counts.scatter_add_(1, words, torch.ones_like(words, dtype=torch.float32))
    return F.normalize(counts[:, :-1], dim=1)


def _by_token(norm: nn.BatchNorm1d, x: Tensor) -> Tensor:
    """Batch statistics over streams and tokens (B, T, D)."""
    return norm(x.flatten(0, 1)).view(x.shape)  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """What every classifier shares: strands, the composition branch, calibration. A subclass brings the network.

    Logits of encoded sequences are a pure function of the input, the same under inference_mode as in evaluation.
    """

    kind: ClassVar[str]
    network_scale: Tensor  # a, b and c of the module's docstring: set by `calibrate`, never by training
    composition_scale: Tensor
    bias: Tensor

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        classes = len(config.classes)
        with torch.random.fork_rng(devices=[]):  # the network starts from the same numbers with and without this branch
            self.composition = nn.Linear(4**config.kmer, classes) if config.kmer else None
        self.register_buffer("network_scale", torch.ones(()))
        self.register_buffer("composition_scale", torch.zeros(()))
        self.register_buffer("bias", torch.zeros(classes))

    def network(self, codes: Tensor) -> Tensor:
        """Logits of encoded bases (B, L) -> (B, C), without the composition branch; averaged over both strands unless "forward".

        In training "both" sees one strand: the caller shows either at random.
        """
        raise NotImplementedError

    def both(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the network and of the composition branch, each over the strands that the model reads."""
        if self.config.strands != "forward":
            codes = either_strand(codes)
        network = self.network(codes)
        if self.composition is None:
            return network, torch.zeros_like(network)
        return network, self.composition(word_counts(codes, self.config.kmer, self.config.strands))

    def forward(self, codes: Tensor) -> Tensor:
        """Encoded bases (B, length), A 0, C 1, G 2, T 3, N 4 -> logits (B, C)."""
        if codes.shape[-1] != self.config.length:
            raise ValueError(f"sequences of {codes.shape[-1]} bases for a model of {self.config.length}: fit them first")
        network, composition = self.both(codes)
        return self.network_scale * network + self.composition_scale * composition + self.bias

    def probabilities(self, codes: Tensor) -> Tensor:
        """(B, length) -> probabilities (B, C)."""
        logits = self(codes)
        return logits.softmax(-1) if self.config.task == "single" else logits.sigmoid()

    def calibrate(self, network: Tensor, composition: Tensor, target: Tensor, strength: float = 1e-2) -> None:
        """Fit a, b and c to held-out rows: logits (N, C) of both branches, target (N,) classes or (N, C) zeros and ones.

        Convex (a multinomial logistic regression of 2 + C numbers); `strength` pulls b towards 0 and a towards 1, so that
        a handful of rows change little.
        """
        values = torch.zeros(2 + network.shape[1], dtype=torch.float64)
        values[0] = 1.0
        values.requires_grad_(True)
        network, composition = network.double(), composition.double()
        optimizer = torch.optim.LBFGS([values], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            logits = values[0] * network + values[1] * composition + values[2:]
            fit = (
                F.cross_entropy(logits, target)
                if self.config.task == "single"
                else F.binary_cross_entropy_with_logits(logits, target.double())
            )
            total = fit + strength * ((values[0] - 1) ** 2 + values[1] ** 2 + (values[2:] ** 2).sum()) / 2
            total.backward()
            return total

        with torch.inference_mode(False), torch.enable_grad():
            optimizer.step(loss)
        found = values.detach().float()
        self.network_scale.copy_(found[0])
        self.composition_scale.copy_(found[1] if self.composition is not None else found.new_zeros(()))
        self.bias.copy_(found[2:])

    @property
    def parameters_count(self) -> int:
        """Trained numbers."""
        return sum(parameter.numel() for parameter in self.parameters())

    def settings(self) -> dict[str, Any]:
        """What `restore` makes the model from again, as JSON."""
        return asdict(self.config)

    def tensors(self) -> dict[str, Tensor]:
        """What is saved beside the settings."""
        return dict(self.state_dict())

    @classmethod
    def restore(cls, settings: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
        """A model from what `settings` and `tensors` gave."""
        model = cls(ClassifierConfig.from_settings(settings))
        model.load_state_dict(tensors)
        return model


class SequenceClassifier(Classifier):
    """Motifs, a Titans memory over them, and a head that sees places and composition."""

    kind = "motifs"
    rows: Tensor  # one-hot row of each code (5, 4)

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        classes, dim = len(config.classes), config.dim
        self.motifs = nn.Linear(4 * config.motif_width, config.motifs, bias=False)
        self.motif_norm = nn.BatchNorm1d(config.motifs)
        self.embed = nn.Linear(config.motifs, dim)
        self.embed_norm = nn.BatchNorm1d(dim)
        memory = MemoryConfig(dim=dim, heads=config.heads, rule=config.rule, window=config.window)
        self.backbone = Backbone(BackboneConfig(memory=memory, layers=config.layers, persistent=0, feed_forward=config.feed_forward))
        self.token_norm = nn.BatchNorm1d(dim)
        self.place = nn.Linear(dim, config.place_width)
        width = config.place_width * config.tokens + 2 * dim
        self.head = nn.Sequential(
            nn.Dropout(config.dropout),
            nn.Linear(width, 64),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(64, classes),
        )
        self.register_buffer("rows", torch.cat((torch.eye(4), torch.full((1, 4), 0.25))), persistent=False)

    def network(self, codes: Tensor) -> Tensor:
        return self.network_of(self.rows[codes])

    def network_of(self, rows: Tensor) -> Tensor:
        """The same of one-hot rows (B, L, 4), for gradients by base."""
        if self.config.strands == "equivariant":
            fits = torch.maximum(self._fits(rows), self._fits(rows.flip(1, 2)).flip(1))
            return (self._read(fits) + self._read(fits.flip(1))) / 2
        if self.config.strands == "both" and not self.training:
            return (self._read(self._fits(rows)) + self._read(self._fits(rows.flip(1, 2)))) / 2
        return self._read(self._fits(rows))

    def _fits(self, rows: Tensor) -> Tensor:
        """How well each motif fits around each base: (B, L, 4) -> (B, L, M)."""
        width = self.config.motif_width
        windows = F.pad(rows, (0, 0, width // 2, width // 2)).unfold(1, width, 1)  # (B, L, 4, width)
        # One product over all windows: with four input channels a third faster than a convolution on CPU.
        return _by_token(self.motif_norm, self.motifs(windows.flatten(2)))

    def _read(self, fits: Tensor) -> Tensor:
        """Fits (B, L, M) -> tokens -> backbone -> head: logits (B, C)."""
        config, count = self.config, fits.shape[0]
        short = config.tokens * config.pool - config.length
        # exp after the maximum is the maximum after exp, at a fraction of the exponentials.
        fits = F.pad(fits, (0, 0, 0, short), value=-torch.inf).unflatten(1, (config.tokens, config.pool)).amax(2)
        fits = torch.exp(fits.clamp(max=4.0))  # (B, T, M)
        fits = fits * F.dropout(fits.new_ones(count, 1, config.motifs), 0.1, self.training)  # whole motifs at a time
        tokens = _by_token(self.embed_norm, self.embed(fits))  # (B, T, D)
        read, _ = self.backbone(tokens, self.backbone.initial_state(count))
        tokens = _by_token(self.token_norm, tokens + read)
        places = F.gelu(self.place(tokens)).flatten(1)
        logits: Tensor = self.head(torch.cat((places, tokens.amax(1), F.gelu(tokens).mean(1)), dim=1))
        return logits


def save(model: Classifier, path: str | Path, card: Card | None = None) -> None:
    """Weights as safetensors, with configuration, class names and card as JSON in the header."""
    about = {"format": FORMAT, "kind": model.kind, "config": json.dumps(model.settings()), "card": json.dumps(asdict(card or Card()))}
    save_file({name: tensor.contiguous() for name, tensor in model.tensors().items()}, str(path), metadata=about)


def load(path: str | Path) -> tuple[Classifier, Card]:
    """A classifier from what `save` wrote, ready to predict. ConfigError where the file holds something else."""
    from titans_core.dna_classifier import PretrainedClassifier  # it builds on this module

    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ConfigError(f"{path} is no safetensors file ({error})") from None
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path}: format {metadata.get('format')} of a classifier is not {FORMAT}")
    kinds: dict[str, type[Classifier]] = {each.kind: each for each in (SequenceClassifier, PretrainedClassifier)}
    try:
        model = kinds[metadata.get("kind", SequenceClassifier.kind)].restore(json.loads(metadata["config"]), tensors)
        return model.eval(), Card(**json.loads(metadata["card"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} holds no classifier of this project ({' '.join(str(error).split())[:200]})") from error
