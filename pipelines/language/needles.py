"""Needle tasks (S-NIAH of RULER, Hsieh et al. 2024): a sentence that tells a value under a key, far back in filler, and at the end the key again.

    pk      noise that repeats, a word as key, seven digits as value (S-NIAH-1, "pass-key")
    number  running text, a word as key, seven digits (S-NIAH-2)
    word    running text, a word as key, a UUID, which is 36 bytes (S-NIAH-3)

A test row has one needle and one question; a row for training may have several, each asked once at some place after it. A token is a
byte. Keys are words that do not exist, and those of training and of tests are disjoint; no key and no value stands in the filler.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from titans_core.generation import READ_AT_ONCE
from titans_core.language_model import LanguageModel

Task = Literal["pk", "number", "word"]
Part = Literal["train", "test"]
TASKS: tuple[Task, ...] = ("pk", "number", "word")
ANSWER = {"pk": 7, "number": 7, "word": 36}  # bytes of a value
KEY = b"bakilo"  # every key is as long
NOISE = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "  # RULER's


@dataclass(frozen=True)
class Row:
    """tokens (T,) uint8: the bytes of filler, needles, questions and answers; answers (T,) bool: true at every byte of an answer. The last byte
    is an answer's last."""

    tokens: NDArray[np.uint8]
    answers: NDArray[np.bool_]


def told(key: bytes, value: bytes) -> bytes:
    """The needle."""
    return b"The magic code of " + key + b" is: " + value + b". "


def asked(key: bytes) -> bytes:
    """The question, which the value follows."""
    return b"\nWhat was it? The magic code of " + key + b" is: "


def draw_key(rng: random.Random, part: Part) -> bytes:
    """Three syllables, as `KEY`: a fifth of such words is for tests and the others for training."""
    while True:
        key = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).encode()
        if (zlib.crc32(key) % 5 == 0) == (part == "test"):
            return key


def draw_value(task: Task, rng: random.Random) -> bytes:
    if task != "word":
        return b"%07d" % rng.randrange(10**7)
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))).encode()


def draw(task: Task, length: int, needles: int, text: bytes, part: Part, rng: random.Random) -> Row:
    """One row of `length` bytes with `needles` needles at random places, cut between words of the filler.

    text: what the filler is taken from, a span that begins anywhere and, where the text is shorter, begins again. Raises ValueError where needles
    and questions do not fit.
    """
    order = [i for i in range(needles) for _ in range(2)]
    rng.shuffle(order)
    last = [i in order[:place] for place, i in enumerate(order)]  # a key's second place is its question
    # A line ends after every answer but the last, or the filler's first letters would go on with it.
    after = [b"\n" * asks for asks in last[:-1]] + [b""]
    room = length - needles * (len(told(KEY, b"")) + len(asked(KEY)) + 2 * ANSWER[task] + 1) + 1
    if room < 0:
        raise ValueError(f"{needles} needles and their questions take {length - room} bytes, the row has {length}")
    source = NOISE if task == "pk" else text
    start = rng.randrange(len(source))
    filler = (source * ((start + room) // len(source) + 1))[start : start + room]

    def fresh(make: Callable[[], bytes], count: int) -> list[bytes]:
        """Different words that the filler does not hold ("before" could be a key)."""
        found: list[bytes] = []
        while len(found) < count:
            if (word := make()) not in found and word not in filler:
                found.append(word)
        return found

    keys, values = fresh(lambda: draw_key(rng, part), needles), fresh(lambda: draw_value(task, rng), needles)
    pieces = [(asked(keys[i]), values[i]) if asks else (told(keys[i], values[i]), b"") for i, asks in zip(order, last, strict=True)]
    cuts = sorted(filler.rfind(b" ", 0, rng.randint(0, room)) + 1 for _ in pieces[1:])
    tokens, answers = b"", b""
    for begin, end, (said, answer), more in zip([0, *cuts], [*cuts, room], pieces, after, strict=True):
        tokens += filler[begin:end] + said + answer + more
        answers += bytes(end - begin + len(said)) + b"\1" * len(answer) + bytes(len(more))
    return Row(np.frombuffer(tokens, np.uint8), np.frombuffer(answers, np.bool_))


def stack(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Rows of one length -> tokens (B, T) int64 and answers (B, T) bool."""
    return torch.from_numpy(np.stack([row.tokens for row in rows])).long(), torch.from_numpy(np.stack([row.answers for row in rows]))


@torch.inference_mode()
def right(model: LanguageModel, tokens: Tensor, answer: int) -> Tensor:
    """Which of the last `answer` tokens of each row (B, T) the model takes for the most likely, those before them being given: (B, answer) bool.

    A row of which all are right is what greedy decoding writes, and the other way round. Pieces of READ_AT_ONCE tokens
    with the state carried: where the state has a fixed size, what is held does not grow with T.
    """
    state, tail = model.initial_state(len(tokens)), None
    for piece in tokens[:, :-1].split(READ_AT_ONCE, dim=1):
        hidden, state = model.hidden(piece, state)
        tail = hidden[:, -answer:] if tail is None else torch.cat((tail, hidden), dim=1)[:, -answer:]
    assert tail is not None
    return model.head(tail).argmax(-1) == tokens[:, -answer:]
