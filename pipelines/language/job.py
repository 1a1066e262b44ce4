"""What the commands of `tethys lm` do: from files and names to models, figures and text. Mistakes come as UserError."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from connectors.errors import UserError
from pipelines.language import evaluation, training
from pipelines.language.completion import PARAMETERS, complete, rows, wanted
from pipelines.language.data import Corpus, documents, open_corpus, pack, text_files
from pipelines.language.training import Training
from titans_core import generation
from titans_core.config import ConfigError
from titans_core.generation import END, START, Conversation, Sampling
from titans_core.language_model import LanguageModel, configure, load
from titans_core.state import StateError
from titans_core.tokenizers import BpeTokenizer, ByteTokenizer, TokenError, Tokenizer

SPECIALS = (START, END)
MERGE_BYTES = 50_000_000  # of text, at most, that byte-pair merges are learned from


@contextmanager
def told() -> Iterator[None]:
    """A model's own kinds of mistakes become the user's."""
    try:
        yield
    except (ConfigError, StateError, TokenError) as error:
        raise UserError(str(error)) from None


def train(
    texts: Sequence[str], output: Path, *, valid: Sequence[str], column: str, vocabulary: int, size: str, layers: str, memory: str,
    model: dict[str, int], settings: Training, workers: int, executor: str, tracking_uri: str | None,
    model_name: str | None = None, alias: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Corpus, training, evaluation on held-out text, and the MLflow run; the corpus is made once and used again by a later start.

    With `model_name` the model is registered as its next version, and `alias` moves to it.
    """
    if model_name is not None:
        if tracking_uri is None:
            raise UserError("a model is registered in a tracking store: say --tracking-uri, for instance sqlite:///runs/tethys.db")
        from pipelines import tracking

        tracking.check_names(model_name, alias)
    elif alias is not None:
        raise UserError(f"the alias {alias!r} is one of a registered model: say --model-name too")
    if executor not in ("local", "ray"):
        raise UserError(f"executor '{executor}' is none of local, ray")
    with told():
        configure(size, 256 + len(SPECIALS), layers=layers, memory=memory, **model)  # a wrong name is told before any text is read
    texts, valid = text_files(texts), text_files(valid)
    corpus = _corpus(texts, output / "corpus", column=column, vocabulary=vocabulary, executor=executor)
    with told():
        config = configure(size, corpus.tokenizer.size, layers=layers, memory=memory, **model)
    history: list[tuple[int, dict[str, float]]] = []
    with _bar("training", settings.steps) as tell:

        def progress(step: int, loss: float) -> None:
            history.append((step, {"loss": loss, "rate": settings.rate_at(step - 1)}))
            tell(step, f"loss {loss:.3f}")

        if workers == 1:
            losses = training.train(config, corpus, settings, output, progress=progress)
        else:
            losses = training.train_on_ray(config, output / "corpus", settings, output, workers=workers, progress=progress)
    trained, _ = load(output / "model.safetensors")
    scored = None
    if valid:
        with TemporaryDirectory() as folder, _bar("evaluating", 1) as tell:
            held_out = pack(valid, Path(folder) / "valid", corpus.tokenizer, column=column)
            found = evaluation.score(
                trained, held_out, context=settings.context, carried=settings.stretch > 1, rows=settings.rows,
                progress=lambda done, of: tell(done / of, "valid"),
            )  # fmt: skip
            scored = {"bits_per_byte": found.bits_per_byte, "perplexity": found.perplexity}
    link = version = None
    if tracking_uri is not None:
        from pipelines import tracking

        params = {"size": size, "layers": layers, "memory": memory, "corpus": corpus.digest, "vocabulary": config.vocabulary}
        params |= {**model, **asdict(settings), "workers": workers}
        with tracking.run(tracking.open_store(tracking_uri), "lm train", params=params) as run:
            run.log_history(history or [(len(losses), {"loss": losses[-1]})])
            if scored is not None:
                run.log_metrics({f"valid_{name}": number for name, number in scored.items()}, len(losses))
            run.log_file(output / "model.safetensors")
            link = run.link
            if model_name is not None:
                version = _register(run, trained, output / "model.safetensors", model_name, alias, params, scored)
    return {
        "model": os.fspath(output / "model.safetensors"), "parameters": trained.parameters_count, "steps": len(losses),
        "loss": losses[-1], "tokens": len(losses) * settings.rows * settings.context, "valid": scored, "tracking": link,
        "version": version,
    }  # fmt: skip


def _register(
    run: Any, trained: LanguageModel, weights: Path, name: str, alias: str | None, about: dict[str, Any], scored: dict[str, float] | None
) -> str:
    """The next version of a model in the registry, as NAME/NUMBER."""
    from pipelines import tracking

    _, tokenizer = load(weights)
    prompts = pl.DataFrame({"prompt": ["The"]})
    example = pl.DataFrame(list(rows(complete(trained, tokenizer, ["The"], wanted({"max_tokens": 8})))))
    facts = "\n".join(f"- {key}: {value}" for key, value in {"parameters": trained.parameters_count, **about}.items())
    held_out = "not measured" if scored is None else f"{scored['bits_per_byte']:.4g} bits per byte, perplexity {scored['perplexity']:.4g}"
    card = (
        f"# {name}\n\nA language model with Titans memories: what it reads in a call is learnt for that call, and forgotten after it.\n\n"
        f"## Model and training\n{facts}\n\n## Accuracy\nOn held-out text: {held_out}. `tethys lm evaluate` sets the memory's modes side by side.\n\n"
        "## Intended use\nContinues text like that it was trained on. It knows nothing else, follows no instructions, and what it says may be "
        "untrue or offensive.\n"
    )
    number = tracking.register_language_model(
        run, weights, {"parameters": trained.parameters_count, "vocabulary": trained.config.vocabulary}, name=name, alias=alias, card=card,
        input_example=prompts, output_example=example, params=PARAMETERS, metrics=scored or {},
    )  # fmt: skip
    return f"{name}/{number}"


def _corpus(texts: Sequence[str], folder: Path, *, column: str, vocabulary: int, executor: str) -> Corpus:
    """The corpus of a training folder, made anew unless the same words made it."""
    made_of = folder.with_name("corpus.made-of")
    recipe = "\n".join([column, str(vocabulary), *(f"{os.path.abspath(path)} {_stamp(path)}" for path in texts)])
    if made_of.exists() and made_of.read_text() == recipe:
        return open_corpus(folder)
    tokenizer: Tokenizer = ByteTokenizer(SPECIALS)
    if vocabulary:
        with told():
            tokenizer = BpeTokenizer.train(_up_to(MERGE_BYTES, texts, column), vocabulary, specials=SPECIALS)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made_of.unlink(missing_ok=True)
    corpus = pack(texts, folder, tokenizer, column=column, executor=executor)  # type: ignore[arg-type]
    made_of.write_text(recipe)
    return corpus


def _stamp(path: str) -> str:
    try:
        facts = os.stat(path)
    except OSError:
        raise UserError(f"there is no file '{path}'") from None
    return f"{facts.st_size} {facts.st_mtime_ns}"


def _up_to(limit: int, texts: Sequence[str], column: str) -> Iterator[str]:
    used = 0
    for path in texts:
        for text in documents(path, column):
            yield text[: limit - used]
            used += len(text)
            if used >= limit:
                return


def evaluate(model: Path, texts: Sequence[str], *, column: str, context: int) -> dict[str, Any]:
    """The table of memory modes, and gate statistics."""
    with told():
        trained, tokenizer = load(model)
    with TemporaryDirectory() as folder, _bar("evaluating", 1) as tell:
        corpus = pack(text_files(texts), Path(folder) / "corpus", tokenizer, column=column)
        scores = evaluation.evaluate(trained, corpus, context=context, progress=lambda name, done, of: tell(done / of, name))
        return {"scores": scores, "gates": evaluation.gates(trained, corpus, context=context)}


def generate(model: Path, prompts: Sequence[str], *, sampling: Sampling, limit: int, stop: Sequence[str]) -> list[dict[str, Any]]:
    """Continue every prompt, in one batch."""
    with told():
        trained, tokenizer = load(model)
        found = generation.generate(trained, tokenizer, prompts, sampling=sampling, limit=limit, stop=stop)
    return [{"prompt": prompt, **asdict(each)} for prompt, each in zip(prompts, found, strict=True)]


def stream(model: Path, prompt: str, *, sampling: Sampling, limit: int, stop: Sequence[str]) -> Iterator[str]:
    """Continue one prompt, as it comes."""
    with told():
        trained, tokenizer = load(model)
        [(_, conversation)] = generation.read(trained, [generation.encode_prompt(tokenizer, prompt)])
        yield from generation.Writing(trained, tokenizer, conversation, sampling=sampling, limit=limit, stop=stop)


@dataclass
class Talk:
    """A conversation with a model, kept in a file where one is named."""

    model: LanguageModel
    tokenizer: Tokenizer
    conversation: Conversation | None
    session: Path | None

    @classmethod
    def open(cls, model: Path, session: Path | None) -> Talk:
        with told():
            trained, tokenizer = load(model)
            held = None
            if session is not None and session.exists():
                held = generation.from_bytes(session.read_bytes(), trained)
        return cls(trained, tokenizer, held, session)

    def answer(self, line: str, *, sampling: Sampling, limit: int, stop: Sequence[str]) -> Iterator[str]:
        """Read a line, write the answer, and keep the conversation when the answer is complete."""
        with told():
            ids = generation.encode_prompt(self.tokenizer, line, begins=self.conversation is None)
            [(_, held)] = generation.read(self.model, [ids], self.conversation)
            writing = generation.Writing(self.model, self.tokenizer, held, sampling=sampling, limit=limit, stop=stop)
            try:
                yield from writing
            finally:  # an answer that is broken off has been said as far as it went
                self.conversation = writing.conversation()
        if self.session is not None:
            training.write_whole(self.session, generation.to_bytes(self.conversation, self.model))


@contextmanager
def _bar(title: str, total: float) -> Iterator[Any]:
    """A progress bar on a terminal, and otherwise a line every tenth; called with what is done and a remark."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("{task.description}"), BarColumn(), *([MofNCompleteColumn()] if total > 1 else []), TimeRemainingColumn()]
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done, remark: bar.update(task, completed=done, description=f"{title} {remark}")
        return
    said = 0

    def tell(done: float, remark: str) -> None:
        nonlocal said
        if int(10 * done / total) > said:
            said = int(10 * done / total)
            print(f"{title} {remark} ({said * 10} %)", file=sys.stderr)
        elif done < total / 10:
            said = 0

    yield tell
