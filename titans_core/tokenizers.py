"""Tokenisers: bytes and BPE for text, bases and k-mers for DNA. Each is a value with a JSON form beside the weights.

Every tokeniser gives `encode(text) -> int64 array`, `decode(ids) -> text`, `size`, and the ids of its special tokens,
which follow its own. The DNA rules, for every DNA tokeniser and for the classifier's one-hot rows:

    case is no information: "acgt" is ACGT; U is T;
    the eleven IUPAC ambiguity codes and the gaps "-" and "." share one id, N, whose one-hot row is (1/4, 1/4, 1/4, 1/4);
    any other letter is a TokenError that says which, and where.
"""

from __future__ import annotations

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

BASES = "ACGT"
N = 4  # the id of every base that is not known
_CODE = np.full(256, 255, np.uint8)
for _id, _letters in enumerate(("Aa", "Cc", "Gg", "TtUu", "NnRrYySsWwKkMmBbDdHhVv-.")):
    _CODE[np.frombuffer(_letters.encode(), np.uint8)] = _id


class TokenError(ValueError):
    """Text that a tokeniser cannot take, or ids that it never gave."""


def encode_bases(sequence: str | bytes) -> NDArray[np.uint8]:
    """Bases as numbers (T,): A 0, C 1, G 2, T and U 3, every ambiguity code and gap 4."""
    text = np.frombuffer(sequence.encode() if isinstance(sequence, str) else sequence, np.uint8)
    codes: NDArray[np.uint8] = _CODE[text]
    if codes.size and codes.max() == 255:
        at = int(np.argmax(codes == 255))
        raise TokenError(f"{chr(text[at])!r} at base {at + 1} is no nucleotide code")
    return codes


def complement(codes: NDArray[Any]) -> NDArray[Any]:
    """The other strand of encoded bases, along the last axis: N stays N."""
    flipped = codes[..., ::-1]
    return np.where(flipped < N, 3 - flipped, flipped).astype(codes.dtype)


class Tokenizer(ABC):
    """What every tokeniser shares. Special tokens have the ids after the own ones, in the order given."""

    kind: ClassVar[str]

    def __init__(self, own: int, specials: Sequence[str] = ()) -> None:
        self.specials = {name: own + i for i, name in enumerate(specials)}
        self.own = own

    @property
    def size(self) -> int:
        """How many ids there are, the special ones included."""
        return self.own + len(self.specials)

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """Ids of a whole text."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens leave nothing."""

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[Ids]:
        """Ids of a text that comes in pieces: joined, they are those of the whole text."""
        for piece in pieces:
            yield self.encode(piece)

    def decode_stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Text of ids that come one by one: joined, it is that of all of them."""
        decode = self.incremental_decoder()
        for each in ids:
            yield decode(each)
        yield decode(None)

    def incremental_decoder(self) -> Callable[[int | None], str]:
        """A function that is given one id after another and gives the text that is certain by then; None ends the text."""
        return lambda id: "" if id is None else self.decode((id,))

    def settings(self) -> dict[str, Any]:
        """What a constructor needs to make this tokeniser again."""
        return {"specials": list(self.specials)}

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, **self.settings()})

    def _known(self, ids: Iterable[int]) -> list[int]:
        found = [int(each) for each in ids]
        for each in found:
            if not 0 <= each < self.size:
                raise TokenError(f"id {each} is outside 0 to {self.size - 1}")
        return [each for each in found if each < self.own]


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8: 256 ids, any text comes back as it was."""

    kind = "bytes"

    def __init__(self, specials: Sequence[str] = ()) -> None:
        super().__init__(256, specials)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(self._known(ids)).decode("utf-8", "replace")

    def incremental_decoder(self) -> Callable[[int | None], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda id: decoder.decode(b"", final=True) if id is None else decoder.decode(bytes(self._known((id,))))


class BaseTokenizer(Tokenizer):
    """One id a base: A 0, C 1, G 2, T 3, N 4."""

    kind = "bases"

    def __init__(self, specials: Sequence[str] = ()) -> None:
        super().__init__(5, specials)

    def encode(self, text: str) -> Ids:
        return encode_bases(text).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join("ACGTN"[each] for each in self._known(ids))


class KmerTokenizer(Tokenizer):
    """Words of k bases, read as base-4 numbers; ids 4^k to 4^k + 4 are the single bases A, C, G, T and N.

    Side by side (overlap False): floor(L / k) words and then the L mod k bases of the tail, one id each; a word that
    holds an N is spelled out base by base. decode gives the sequence back, with N for every ambiguity code.
    Overlapping: max(0, L - k + 1) words; one that holds an N is the id of N. decode gives the sequence back when no
    word holds an N, and otherwise N where no clean word tells.
    """

    kind = "kmers"

    def __init__(self, k: int, *, overlap: bool = False, specials: Sequence[str] = ()) -> None:
        if not 1 <= k <= 12:
            raise TokenError(f"k {k} must lie in 1 to 12")
        super().__init__(4**k + 5, specials)
        self.k, self.overlap = k, overlap

    def settings(self) -> dict[str, Any]:
        return {"k": self.k, "overlap": self.overlap, **super().settings()}

    def encode(self, text: str) -> Ids:
        codes = encode_bases(text).astype(np.int64)
        places = max(len(codes) - self.k + 1, 0)
        words, clean = np.zeros(places, np.int64), np.ones(places, bool)
        for i in range(self.k):
            part = codes[i : i + places]
            words, clean = words * 4 + part, clean & (part < N)
        if self.overlap:
            return np.where(clean, words, 4**self.k + N)
        ids: list[int] = []
        last = len(codes) // self.k * self.k
        for at in range(0, last, self.k):
            ids += [int(words[at])] if clean[at] else (4**self.k + codes[at : at + self.k]).tolist()
        return np.array(ids + (4**self.k + codes[last:]).tolist(), np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        known = self._known(ids)
        words = [
            "".join(BASES[each >> 2 * i & 3] for i in reversed(range(self.k))) if each < 4**self.k else "ACGTN"[each - 4**self.k]
            for each in known
        ]
        if not self.overlap:
            return "".join(words)
        letters = ["N"] * (len(words) + self.k - 1 if words else 0)
        for at, word in enumerate(words):
            if len(word) == self.k and known[at] < 4**self.k:
                letters[at : at + self.k] = word
        return "".join(letters)

    def incremental_decoder(self) -> Callable[[int | None], str]:
        if not self.overlap:
            return super().incremental_decoder()
        held: list[int] = []  # a later word may tell a letter that an unclean one left open: nothing is certain before the end

        def decode(id: int | None) -> str:
            if id is None:
                return self.decode(held)
            held.append(id)
            return ""

        return decode

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[Ids]:
        held = ""
        for piece in pieces:
            held += piece
            if self.overlap:
                yield self.encode(held)
                held = held[max(len(held) - self.k + 1, 0) :]
            else:
                whole = len(held) // self.k * self.k
                yield self.encode(held[:whole])
                held = held[whole:]
        if not self.overlap:
            yield self.encode(held)


class BpeTokenizer(Tokenizer):
    """Byte-pair encoding over bytes, trained and applied by the `tokenizers` library; any text comes back as it was.

    dna: the text has no words, so nothing is split before pairs are merged, and case is folded.
    """

    kind = "bpe"

    def __init__(self, model: str, *, dna: bool = False, specials: Sequence[str] = ()) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_str(model)
        self._model, self.dna = model, dna
        super().__init__(self._library.get_vocab_size(), specials)
        self._bytes = {id: bytes(_UNICODE_TO_BYTE[c] for c in token) for token, id in self._library.get_vocab().items()}

    @classmethod
    def train(cls, texts: Iterable[str], size: int, *, dna: bool = False, specials: Sequence[str] = ()) -> BpeTokenizer:
        """Learn merges from texts until there are `size` ids (256 bytes among them), special ones not counted."""
        from tokenizers import Tokenizer as Library
        from tokenizers import models, pre_tokenizers, trainers

        if size < 256:
            raise TokenError(f"size {size} must be at least 256: every byte has an id")
        library = Library(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not dna)
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(_UNICODE_TO_BYTE), show_progress=False, special_tokens=[])
        library.train_from_iterator((text.upper() if dna else text for text in texts), trainer)
        return cls(library.to_str(), dna=dna, specials=specials)

    def settings(self) -> dict[str, Any]:
        return {"model": self._model, "dna": self.dna, **super().settings()}

    def encode(self, text: str) -> Ids:
        if self.dna:
            text = text.upper()
        return np.array(self._library.encode(text).ids, np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self._bytes[each] for each in self._known(ids)).decode("utf-8", "replace")

    def encode_stream(self, pieces: Iterable[str]) -> Iterator[Ids]:
        """Cuts only before a lone blank between words, which is where the library cuts too."""
        held = ""
        for piece in pieces:
            held += piece
            cut = len(held) - 2
            while cut > 0 and not (held[cut] == " " and not held[cut - 1].isspace() and not held[cut + 1].isspace()):
                cut -= 1
            if cut > 0 and not self.dna:
                yield self.encode(held[:cut])
                held = held[cut:]
        yield self.encode(held)

    def incremental_decoder(self) -> Callable[[int | None], str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def decode(id: int | None) -> str:
            if id is None:
                return decoder.decode(b"", final=True)
            return decoder.decode(b"".join(self._bytes[known] for known in self._known((id,))))

        return decode


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes bytes (GPT-2): printable bytes are themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_UNICODE_TO_BYTE = _byte_alphabet()
_KINDS: dict[str, type[Tokenizer]] = {each.kind: each for each in (ByteTokenizer, BaseTokenizer, KmerTokenizer, BpeTokenizer)}


def from_json(text: str) -> Tokenizer:
    """A tokeniser from what `to_json` wrote."""
    settings = json.loads(text)
    kind = settings.pop("kind", None)
    if kind not in _KINDS:
        raise TokenError(f"tokeniser kind '{kind}' is none of {', '.join(_KINDS)}")
    return _KINDS[kind](**settings)


def load(path: str | Path) -> Tokenizer:
    """A tokeniser from a file that holds what `to_json` wrote."""
    return from_json(Path(path).read_text())
