"""What a language model says of prompts, in the one form that the served model and the live service share: checked first, then bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from connectors.errors import UserError
from titans_core import generation
from titans_core.config import ConfigError
from titans_core.generation import Generation, Sampling
from titans_core.language_model import LanguageModel
from titans_core.tokenizers import TokenError, Tokenizer

PROMPT_CHARACTERS = 32_768
MOST_PROMPTS = 64
MOST_TOKENS = 1024
"""That one answer may have."""
STOPS, STOP_CHARACTERS = 8, 128


@dataclass(frozen=True)
class Wanted:
    """How prompts are to be continued."""

    limit: int
    sampling: Sampling
    stop: tuple[str, ...]


# What a registered model's signature names, with what holds where nothing is said.
PARAMETERS: dict[str, Any] = {"max_tokens": 128, **{field.name: field.default for field in fields(Sampling)}}


def wanted(given: Mapping[str, Any], stop: Sequence[str] = ()) -> Wanted:
    """Parameters by the names of `PARAMETERS`; UserError for what is out of bounds."""
    said = {**PARAMETERS, **given}
    limit = said.pop("max_tokens")
    if not 1 <= limit <= MOST_TOKENS:
        raise UserError(f"max_tokens must be 1 to {MOST_TOKENS}, not {limit}")
    if not (said["temperature"] == 0 or 1e-3 <= said["temperature"] <= 100) or not 0.01 <= said["repetition_penalty"] <= 100:
        raise UserError("temperature must be 0 or 0.001 to 100, and repetition_penalty 0.01 to 100")
    if len(stop) > STOPS or not all(0 < len(each) <= STOP_CHARACTERS for each in stop):
        raise UserError(f"stop may hold {STOPS} texts of 1 to {STOP_CHARACTERS} characters")
    try:
        return Wanted(limit, Sampling(**said), tuple(stop))
    except ConfigError as error:
        raise UserError(str(error)) from None


def checked(prompts: Iterable[Any]) -> list[str]:
    """Rows of an untrusted request as prompts; UserError names the first row (from 1) that is none."""
    found = list(prompts)
    if not 1 <= len(found) <= MOST_PROMPTS:
        raise UserError(f"the request has {len(found)} prompts: 1 to {MOST_PROMPTS} can be continued at once")
    for number, prompt in enumerate(found, 1):
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"row {number}: the prompt must be a text of at least one character")
        if len(prompt) > PROMPT_CHARACTERS:
            raise UserError(f"row {number}: the prompt has {len(prompt)} characters: {PROMPT_CHARACTERS} are read at most")
    return found


def complete(model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], how: Wanted) -> list[Generation]:
    """Continue every prompt; row i draws with seed + i."""
    try:
        return generation.generate(model, tokenizer, prompts, sampling=how.sampling, limit=how.limit, stop=how.stop)
    except TokenError as error:
        raise UserError(str(error)) from None


def begin(model: LanguageModel, tokenizer: Tokenizer, prompt: str, how: Wanted) -> generation.Writing:
    """Read one prompt; the text comes piece by piece from what is returned."""
    try:
        [(_, conversation)] = generation.read(model, [generation.encode_prompt(tokenizer, prompt)])
    except TokenError as error:
        raise UserError(str(error)) from None
    return generation.Writing(model, tokenizer, conversation, sampling=how.sampling, limit=how.limit, stop=how.stop)


def rows(found: Sequence[Generation]) -> Iterator[dict[str, Any]]:
    """text, tokens (how many) and reason: `end`, `stop` or `limit`."""
    for each in found:
        yield {"text": each.text, "tokens": len(each.ids), "reason": each.reason}
