"""How well a language model predicts held-out text: nats, bits a byte and perplexity, with the memory on, frozen and zeroed.

Scored are the tokens of the text; neither <start> nor <end> is. Every document begins with a fresh memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from connectors.errors import UserError
from pipelines.language.data import Corpus
from titans_core import state as value
from titans_core.language_model import LanguageModel, MemoryMode, gate_statistics, memory_mode

MODES: tuple[MemoryMode, ...] = ("on", "frozen", "zeroed")


@dataclass(frozen=True)
class Score:
    """Nats over scored tokens; bytes of the text they spell."""

    nats: float
    tokens: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.bytes / math.log(2)

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.nats / self.tokens)


def score(
    model: LanguageModel, corpus: Corpus, *, context: int, carried: bool, rows: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Score:  # fmt: skip
    """Read every document once, in order.

    carried False: each context of a document starts with a fresh memory, as in training without carrying. carried True: the memory lives from a
    document's first token to its last, and so do attention's windows; the space is constant. Raises UserError for a model whose state
    grows: it would hold every token of a document.
    """
    if model.config.vocabulary != corpus.tokenizer.size:
        raise UserError(f"the model knows {model.config.vocabulary} tokens, the corpus has {corpus.tokenizer.size}")
    if carried and model.config.grows:
        raise UserError("the state of this model grows with the text: evaluate it without carrying")
    total, tokens, done = 0.0, 0, 0
    pairs = int((np.diff(corpus.offsets) - 2).sum())

    def tell(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, pairs), pairs)

    with torch.inference_mode():
        if carried:
            groups = [range(at, min(at + rows, len(corpus))) for at in range(0, len(corpus), rows)]
            order = np.argsort(-np.diff(corpus.offsets), kind="stable")  # documents of like length side by side: none waits for long
            for group in groups:
                nats, seen = _carried(model, [corpus.document(int(order[i]))[:-1] for i in group], context, tell)
                total, tokens = total + nats, tokens + seen
        else:
            cuts = [(i, at) for i in range(len(corpus)) for at in range(0, int(np.diff(corpus.offsets)[i]) - 2, context)]
            for first in range(0, len(cuts), rows):
                held = [corpus.document(i)[:-1][at : at + context + 1] for i, at in cuts[first : first + rows]]
                x, mask = _padded(held)
                logits, _ = model(x[:, :-1], model.initial_state(len(held)))
                nats, seen = _nats(logits, x[:, 1:], mask[:, 1:])
                total, tokens = total + nats, tokens + seen
                tell(seen)
    return Score(total, tokens, int(corpus.sizes.sum()))


def _carried(model: LanguageModel, documents: Sequence[np.ndarray], context: int, tell: Callable[[int], None]) -> tuple[float, int]:
    """Documents side by side, longest first; those that have ended take no part any more."""
    state, running = model.initial_state(len(documents)), len(documents)
    total, tokens = 0.0, 0
    for at in range(0, len(documents[0]) - 1, context):
        still = sum(len(each) > at + 1 for each in documents)
        if still < running:
            state, running = value.select(state, list(range(still))), still
        x, mask = _padded([each[at : at + context + 1] for each in documents[:running]])
        # Padding comes last, and only in documents that end here: what it writes is never read.
        logits, state = model(x[:, :-1], state)
        nats, seen = _nats(logits, x[:, 1:], mask[:, 1:])
        total, tokens = total + nats, tokens + seen
        tell(seen)
    return total, tokens


def _padded(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    length = max(len(each) for each in rows)
    x, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.bool)
    for row, each in enumerate(rows):
        x[row, : len(each)], mask[row, : len(each)] = torch.from_numpy(each), True
    return x, mask


def _nats(logits: Tensor, targets: Tensor, mask: Tensor) -> tuple[float, int]:
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return float(losses[mask.flatten()].double().sum()), int(mask.sum())


def evaluate(
    model: LanguageModel, corpus: Corpus, *, context: int, rows: int = 16, progress: Callable[[str, int, int], None] | None = None
) -> list[dict[str, float | str | int]]:
    """A row for each way to hold the memory: bits a byte and perplexity, with a fresh memory a context and with the memory carried."""
    found: list[dict[str, float | str | int]] = []
    for carried in (False,) if model.config.grows else (False, True):
        for mode in MODES:
            name = f"{mode}, {'carried' if carried else 'fresh each context'}"
            tell = None if progress is None else (lambda done, of, name=name: progress(name, done, of))  # type: ignore[misc]
            with memory_mode(model, mode):
                result = score(model, corpus, context=context, carried=carried, rows=rows, progress=tell)
            found.append({
                "memory": mode, "state": "carried" if carried else "fresh", "bits_per_byte": result.bits_per_byte,
                "perplexity": result.perplexity, "tokens": result.tokens, "bytes": result.bytes,
            })  # fmt: skip
    return found


def gates(model: LanguageModel, corpus: Corpus, *, context: int, rows: int = 4) -> dict[str, float]:
    """What the memories' gates do on the beginning of a corpus (`gate_statistics`)."""
    held = [corpus.document(i)[:context] for i in range(min(rows, len(corpus)))]
    length = min(len(each) for each in held)
    with torch.inference_mode(), gate_statistics(model) as found:
        model(torch.from_numpy(np.stack([each[:length] for each in held])), model.initial_state(len(held)))
    return found
