"""Models of sequences beside the streams: a classifier of DNA and a language model, read-only, each from a file or from the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from connectors.errors import UserError
from pipelines.genomics.answers import answer, checked, load_classifier
from pipelines.genomics.job import model_at
from pipelines.language import completion
from pipelines.language.completion import Wanted
from pipelines.language.job import told
from pipelines.serving.live import Busy
from titans_core import language_model

T = TypeVar("T")

THREADS = 2
# Completions that may be under way or wait; beyond this one is refused, and the client comes back.
MOST_COMPLETIONS = 16
# In which an answer must have ended; the guard gives it a little longer.
COMPLETION_SECONDS = 25.0


def _weights(text: str, kind: str, tracking_uri: str) -> tuple[Any, str]:
    """The weights of `models:/NAME@ALIAS`, or of a file, on this machine, and what to call the model."""
    found = model_at(text)
    if hasattr(found, "version"):
        from pipelines import tracking

        registered = tracking.load_model(found.name, found.version, tracking_uri, kind=kind)
        return registered.weights, f"{registered.name}/{registered.version}"
    return found, str(found)


class SequenceClassifier:
    """Answers as the registered model does (`mlflow/models/classifier.py`)."""

    def __init__(self, text: str, tracking_uri: str):
        path, self.name = _weights(text, "classifier", tracking_uri)
        self._model = load_classifier(path)

    def classify(self, sequences: list[str]) -> list[dict[str, Any]]:
        return answer(self._model, checked(sequences)).to_dicts()


class Completer:
    """Continues prompts, as the registered model does (`mlflow/models/language_model.py`), whole or piece by piece; nothing is kept."""

    def __init__(self, text: str, tracking_uri: str):
        path, self.name = _weights(text, "language_model", tracking_uri)
        with told():
            try:
                self._model, self._tokenizer = language_model.load(path)
            except OSError as error:
                raise UserError(f"the model {path} cannot be read ({error.strerror or error})") from None
        self._pool = ThreadPoolExecutor(THREADS, "completion")
        self._under_way = 0

    async def _do(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, do)

    async def complete(self, prompt: str, how: Wanted) -> AsyncGenerator[dict[str, Any], None]:
        """`{text}` for each piece that is certain, then `{tokens, reason}`: `end`, `stop`, `limit`, or `time`. Raises Busy, UserError."""
        if self._under_way >= MOST_COMPLETIONS:
            raise Busy(f"{self._under_way} completions are under way: send again in a moment")
        self._under_way += 1
        try:
            deadline = time.monotonic() + COMPLETION_SECONDS
            [prompt] = completion.checked([prompt])
            writing = await self._do(lambda: completion.begin(self._model, self._tokenizer, prompt, how))
            pieces = iter(writing)
            yield {"text": ""}  # it has begun: what can be refused has been
            while (text := await self._do(lambda: next(pieces, None))) is not None:
                yield {"text": text}
                if time.monotonic() > deadline:
                    yield {"tokens": writing.count, "reason": "time"}
                    return
            yield {"tokens": writing.count, "reason": writing.reason}
        finally:
            self._under_way -= 1

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
