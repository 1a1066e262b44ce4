"""Text from a language model: prefill, then one token at a time, under inference mode and with the memory live.

What has been read and written so far is a value, a `Conversation`: it can be saved as safetensors bytes, continued in another process, and
branched by using it twice. Prompts of different lengths are read each to its own end, so nothing is padded and no padding can write to
a memory. Where the model's state has a fixed size, so has a conversation, whatever its length.

Axis letters: B conversations, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titans_core import state as value
from titans_core.config import require
from titans_core.language_model import LanguageModel, ragged
from titans_core.tokenizers import Tokenizer

START, END = "<start>", "<end>"  # special tokens before and after every document
READ_AT_ONCE = 1024  # tokens of a prompt in one call: what is held beside the state does not grow with the prompt


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, in this order.

    repetition_penalty: logits of tokens that the conversation has held are divided by it where positive, multiplied where negative (CTRL,
    Keskar et al. 2019; 1: none). temperature: divides the logits; 0 takes the most likely token and makes the rest idle. top_k: the so many
    most likely (0: all). top_p: the fewest most likely that hold this much probability. min_p: those at least this likely relative to
    the most likely. seed: the same seed, model and conversation give the same text, alone or in a batch, at once or continued later.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.temperature >= 0, f"temperature {self.temperature} must not be negative")
        require(self.top_k >= 0, f"top_k {self.top_k} must not be negative")
        require(0 < self.top_p <= 1, f"top_p {self.top_p} must lie in (0, 1]")
        require(0 <= self.min_p <= 1, f"min_p {self.min_p} must lie in [0, 1]")
        require(self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} must be positive")


@dataclass(frozen=True)
class Conversation:
    """B conversations: all that is needed to go on. A value: nothing changes it, so using it twice branches it."""

    state: tuple[Any, ...]
    logits: Tensor  # (B, V) of the next token
    held: Tensor  # (B, V) bool: tokens that were read or written
    count: Tensor  # (B,) int64: how many


@dataclass(frozen=True)
class Generation:
    """What one prompt became. reason: `end` (the model ended the text), `stop` (a stop string) or `limit`."""

    text: str
    ids: tuple[int, ...]
    reason: str


def to_bytes(conversation: Conversation, model: LanguageModel) -> bytes:
    """safetensors bytes of conversations, with a digest of the model's configuration and weights."""
    return value.to_bytes(conversation, model=digest(model))


def from_bytes(data: bytes, model: LanguageModel) -> Conversation:
    """Conversations that `to_bytes` saved. Raises StateError for another model's, or for bytes that are none."""
    saved = value.read_metadata(data).get("model")
    if saved != digest(model):
        raise value.StateError(f"the conversation was held with another model ({saved}, this one is {digest(model)})")
    return value.from_bytes(data, like=_shaped(model, data))


def digest(model: LanguageModel) -> str:
    """Sixteen hexadecimal digits of the configuration and every weight."""
    found = hashlib.sha256(model.config.to_json().encode())
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _shaped(model: LanguageModel, data: bytes) -> Conversation:
    """An empty conversation of the model; where its state grows, one of the saved length."""
    with torch.inference_mode():
        empty = _fresh(model, 1)
        if not model.config.grows:
            return empty
        import safetensors.torch

        saved = safetensors.torch.load(data)

        def lengthen(path: str, leaf: Tensor) -> Tensor:
            found = saved.get(path)
            grows = found is not None and leaf.dim() == 4 and found.shape[1:2] == leaf.shape[1:2] and found.shape[3:] == leaf.shape[3:]
            return leaf.new_zeros(1, *found.shape[1:]) if found is not None and grows else leaf

        return value.map_leaves(lengthen, empty)


def _fresh(model: LanguageModel, batch: int) -> Conversation:
    vocabulary, device = model.config.vocabulary, model.embedding.device
    return Conversation(
        model.initial_state(batch),
        torch.zeros(batch, vocabulary, device=device, dtype=model.embedding.dtype),
        torch.zeros(batch, vocabulary, dtype=torch.bool, device=device),
        torch.zeros(batch, dtype=torch.long, device=device),
    )


@torch.inference_mode()
def read(
    model: LanguageModel, prompts: Sequence[Sequence[int]], conversation: Conversation | None = None
) -> list[tuple[Tensor, Conversation]]:
    """Read prompts, one a conversation (fresh ones where none is given); constant memory beside the state.

    Returns groups: rows (n,) and their conversations, together every row once. One group where the state has a fixed size; where it grows,
    one for each length, because states of different lengths do not stack.
    """
    require(len(prompts) > 0 and all(len(each) > 0 for each in prompts), "every prompt must hold at least one token")
    device = model.embedding.device
    start = _fresh(model, len(prompts)) if conversation is None else conversation
    lengths = torch.tensor([len(each) for each in prompts], device=device)
    tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long, device=device)
    for row, each in enumerate(prompts):
        tokens[row, : len(each)] = torch.as_tensor(each, dtype=torch.long)

    def run(part: Tensor, held: Conversation) -> tuple[Tensor, Conversation]:
        for piece in part.split(READ_AT_ONCE, dim=1):
            hidden, state = model.hidden(piece, held.state)
            seen = held.held.scatter(1, piece, True)
            held = Conversation(state, model.head(hidden[:, -1]), seen, held.count + piece.shape[1])
        return held.logits, held

    _, finished = ragged(run, tokens, lengths, start)
    if model.config.grows:
        return finished
    rows = torch.cat([rows for rows, _ in finished])
    together = value.stack([part for _, part in finished])
    return [(torch.arange(len(prompts), device=device), value.select(together, rows.argsort()))]


def probabilities(logits: Tensor, held: Tensor, sampling: Sampling) -> Tensor:
    """logits (B, V), held (B, V) bool -> the probabilities (B, V) that a token is drawn from, in float64."""
    logits = logits.double()
    if sampling.repetition_penalty != 1.0:
        penalised = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        logits = torch.where(held, penalised, logits)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(1, logits.argmax(1, keepdim=True), 1.0)
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    few, nucleus = 0 < sampling.top_k < logits.shape[1], sampling.top_p < 1.0
    if not few and not nucleus:
        p = logits.softmax(1)
        return p if sampling.min_p == 0 else _at_least(p, sampling.min_p * p.amax(1, keepdim=True))
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    if few:
        ordered[:, sampling.top_k :] = -torch.inf
    p = ordered.softmax(1)
    if nucleus:
        p = torch.where(p.cumsum(1) - p >= sampling.top_p, 0.0, p)  # the token that crosses the bound stays
    return torch.zeros_like(p).scatter_(1, order, _at_least(p, sampling.min_p * p[:, :1]))


def _at_least(p: Tensor, bound: Tensor) -> Tensor:
    """Probabilities without those below the bound (B, 1)."""
    p = torch.where(p < bound, 0.0, p)
    return p / p.sum(1, keepdim=True)


def _uniform(seed: int, count: int) -> float:
    """A number in [0, 1) that belongs to one token of one seed: a conversation continued later draws what it would have drawn."""
    mixed = hashlib.blake2b(f"{seed}:{count}".encode(), digest_size=8).digest()
    return (int.from_bytes(mixed, "little") >> 11) / 2**53


def draw(conversation: Conversation, sampling: Sampling, seeds: Sequence[int]) -> Tensor:
    """The next token of each conversation (B,); seeds: one a conversation."""
    p = probabilities(conversation.logits, conversation.held, sampling)
    if sampling.temperature == 0:
        return p.argmax(1)
    at = torch.tensor([_uniform(seed, n) for seed, n in zip(seeds, conversation.count.tolist(), strict=True)], device=p.device)
    total = p.cumsum(1)
    chosen = torch.searchsorted(total, (at.double() * total[:, -1])[:, None], right=True).squeeze(1)
    return torch.where(p.gather(1, chosen.clamp(max=p.shape[1] - 1)[:, None]).squeeze(1) > 0, chosen, p.argmax(1))


def decoder(model: LanguageModel) -> Callable[[Conversation, Tensor], Conversation]:
    """A function that lets conversations hold one token more each, tokens (B,), and overwrites them: give it `state.owned` ones.

    The weights are those of now.
    """
    run = model.in_place()

    @torch.inference_mode()
    def go_on(conversation: Conversation, tokens: Tensor) -> Conversation:
        logits, state = run(tokens, conversation.state)
        return Conversation(state, logits, conversation.held.scatter_(1, tokens[:, None], True), conversation.count.add_(1))

    return go_on


class Writing:
    """One conversation going on: iterate over it for text that is certain, piece by piece.

    The text ends before the first stop string, at <end>, or after `limit` tokens.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, conversation: Conversation, *,
        sampling: Sampling, limit: int, stop: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._go_on, self._talk = decoder(model), value.owned(conversation)
        self._writer, self._end = _Writer(tokenizer, stop), tokenizer.specials.get(END)
        self._sampling, self._limit = sampling, limit

    def __iter__(self) -> Iterator[str]:
        writer = self._writer
        while len(writer.ids) < self._limit and writer.reason == "limit":
            token = draw(self._talk, self._sampling, [self._sampling.seed])
            if int(token) == self._end:
                writer.reason = "end"
                break
            self._talk = self._go_on(self._talk, token)
            if text := writer.add(int(token)):
                yield text
        if text := writer.finish():
            yield text

    @property
    def reason(self) -> str:
        """Why it ended, or would end if nothing more came: `end`, `stop` or `limit`."""
        return self._writer.reason

    @property
    def count(self) -> int:
        """Tokens written so far."""
        return len(self._writer.ids)

    def conversation(self) -> Conversation:
        """What has been read and written so far: a value, which going on does not change. It holds the tokens that spelt a stop string, and
        never the <end>, so that it can go on."""
        return value.owned(self._talk)


@torch.inference_mode()
def generate(
    model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], *,
    sampling: Sampling, limit: int, stop: Sequence[str] = (),
) -> list[Generation]:  # fmt: skip
    """Continue every prompt, all in one batch; row i draws with seed + i, and gives what it would give alone with that seed."""
    writers = [_Writer(tokenizer, stop) for _ in prompts]
    go_on = decoder(model)
    for rows, conversation in read(model, [encode_prompt(tokenizer, text) for text in prompts]):
        running, conversation = rows.tolist(), value.owned(conversation)
        for turn in range(limit):
            seeds = [sampling.seed + row for row in running]
            tokens = draw(conversation, sampling, seeds)
            on = []
            for place, (row, token) in enumerate(zip(running, tokens.tolist(), strict=True)):
                if token == tokenizer.specials.get(END):
                    writers[row].reason = "end"
                    continue
                writers[row].add(token)
                if writers[row].reason == "limit":
                    on.append(place)
            if not on or turn == limit - 1:
                break
            if len(on) < len(running):  # what has ended takes no part any more
                conversation, tokens, running = value.select(conversation, on), tokens[on], [running[place] for place in on]
            conversation = go_on(conversation, tokens)
    for writer in writers:
        writer.finish()
    return [Generation(writer.text, tuple(writer.ids), writer.reason) for writer in writers]


def encode_prompt(tokenizer: Tokenizer, text: str, *, begins: bool = True) -> list[int]:
    """Ids of a prompt, after <start> where it begins a conversation and the tokeniser has that token."""
    start = [tokenizer.specials[START]] if begins and START in tokenizer.specials else []
    return start + [int(each) for each in tokenizer.encode(text)]


class _Writer:
    """Ids become text that is certain: whole characters, and nothing that may yet turn out to begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        require(all(stop), "a stop string must not be empty")
        self.stop, self.reason = tuple(stop), "limit"
        self.ids: list[int] = []
        self.text = ""  # given out
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._decoder = tokenizer.incremental_decoder()

    def add(self, token: int) -> str:
        self.ids.append(token)
        return self._take(self._decoder(token), last=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.reason == "stop" else self._take(self._decoder(None), last=True)

    def _take(self, text: str, *, last: bool) -> str:
        self._held += text
        found = [at for at in (self._held.find(each) for each in self.stop) if at >= 0]
        if found:
            out, self._held, self.reason = self._held[: min(found)], "", "stop"
        else:
            keep = 0 if last else max((n for each in self.stop for n in range(1, len(each)) if self._held.endswith(each[:n])), default=0)
            cut = len(self._held) - keep
            out, self._held = self._held[:cut], self._held[cut:]
        self.text += out
        return out
