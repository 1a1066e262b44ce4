"""`tethys lm`: train, evaluate, generate, chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Language models: train on text files, evaluate, generate, chat.", no_args_is_help=True)

Texts = Annotated[
    list[str], typer.Argument(help="Text files, or folders of them: .txt, .md (a document each), .jsonl, .parquet (one a row), or the same and .gz.")
]
Model = Annotated[Path, typer.Argument(help="A trained model: model.safetensors of an output or checkpoint folder.")]
Column = Annotated[str, typer.Option(help="Column of the text in JSONL and Parquet files.")]
Context = Annotated[int, typer.Option(min=32, help="Tokens of a row, a multiple of 32.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Limit = Annotated[int, typer.Option(min=1, help="Tokens to write at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token; 1 draws from the model's probabilities.")]
TopK = Annotated[int, typer.Option(help="Draw from the so many most likely tokens; 0: from all.")]
TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens that hold this much probability.")]
MinP = Annotated[float, typer.Option(help="Draw from tokens at least this likely, relative to the most likely.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens that were there before become less likely.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer and is left out; repeatable.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]


@app.command(epilog="Example: tethys lm train books/*.txt --valid held-out.txt --output runs/lm --size small --layers mag --steps 500")
def train(
    texts: Texts,
    output: Annotated[Path, typer.Option(help="Folder for the corpus, checkpoints and the model; a second start goes on from the newest.")],
    valid: Annotated[list[str] | None, typer.Option(help="Text file to evaluate on at the end; repeatable.")] = None,
    column: Column = "text",
    vocabulary: Annotated[int, typer.Option(help="Byte-pair merges up to so many tokens, learned from the texts; 0: bytes.")] = 0,
    size: Annotated[str, typer.Option(help="tiny, small or base (for a CPU), or the papers' 170M, 340M, 760M, 1.3B.")] = "small",
    layers: Annotated[
        str, typer.Option(help="lmm, mac, mag, mal, attention, window, deep_transformer, swdt, dot; several joined by + alternate.")
    ] = "mag",
    memory: Annotated[
        str, typer.Option(help="exact, titans, atlas, atlas++, omega_net, delta_net, gated_delta_net, ttt_linear, ttt_mlp, dla or swla.")
    ] = "exact",
    chunk: Annotated[int | None, typer.Option(min=1, help="Tokens that a memory's gradient serves; the size's own when not given.")] = None,
    attention_window: Annotated[int | None, typer.Option(min=1, help="Tokens that window attention sees.")] = None,
    persistent: Annotated[int | None, typer.Option(min=0, help="Learned tokens before every document.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the weights.")] = 500,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a step, over all workers.")] = 16,
    context: Context = 512,
    stretch: Annotated[int, typer.Option(min=1, help="Contexts that a memory is carried over in training; 1: none.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Parts that a step's rows are worked through in.")] = 1,
    rate: Annotated[float, typer.Option(help="Learning rate at its highest.")] = 3e-3,
    schedule: Annotated[str, typer.Option(help="cosine, or wsd: warm-up, stable, decay.")] = "cosine",
    precision: Annotated[str, typer.Option(help="float32, or bfloat16 under autocast.")] = "float32",
    workers: Annotated[int, typer.Option(min=1, help="Processes of Ray Train that share the rows.")] = 1,
    executor: Annotated[str, typer.Option(help="Where texts are tokenised: local, or ray (a task a file).")] = "local",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    tracking_uri: Annotated[str | None, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store that the run is logged to.")] = None,
    model_name: Annotated[str | None, typer.Option(help="Register the model under this name.")] = None,
    alias: Annotated[str | None, typer.Option(help="Alias that moves to the registered version, for instance champion.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Tokenise, pack and train. Safe to kill: started again with the same words, it goes on to the same result."""
    from pipelines.language import job
    from pipelines.language.training import Training

    given = {"chunk": chunk, "attention_window": attention_window, "persistent": persistent}
    result = job.train(
        texts, output, valid=valid or [], column=column, vocabulary=vocabulary, size=size, layers=layers, memory=memory,
        model={name: number for name, number in given.items() if number is not None},
        settings=Training(
            steps=steps, rows=rows, context=context, stretch=stretch, accumulate=accumulate, rate=rate, schedule=schedule,  # type: ignore[arg-type]
            precision=precision, seed=seed, save_every=save_every,  # type: ignore[arg-type]
        ),
        workers=workers, executor=executor, tracking_uri=tracking_uri, model_name=model_name, alias=alias,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{result['parameters']:,} parameters, {result['steps']} steps, loss {result['loss']:.4f} nats a token")
    if result["valid"] is not None:
        typer.echo(f"valid {result['valid']['bits_per_byte']:.4f} bits a byte, perplexity {result['valid']['perplexity']:.2f}")
    if result["tracking"] is not None:
        typer.echo(f"run   {result['tracking']}")
    typer.echo(f"model {result['model']}")


@app.command(epilog="Example: tethys lm evaluate runs/lm/model.safetensors held-out.txt")
def evaluate(
    model: Model,
    texts: Texts,
    column: Column = "text",
    context: Annotated[int, typer.Option(min=32, help="Tokens that a fresh memory reads, and that one call reads; any number.")] = 512,
    as_json: Json = False,
) -> None:
    """Bits a byte and perplexity with the memory on, frozen and zeroed, fresh each context and carried; and what the gates do."""
    from pipelines.language import job

    result = job.evaluate(model, texts, column=column, context=context)
    if as_json:
        typer.echo(json.dumps(result))
        return
    _table(result["scores"])
    if result["gates"]:
        typer.echo("")
        _table([{"gate": name, "mean": mean} for name, mean in result["gates"].items()])


@app.command(epilog='Example: tethys lm generate runs/lm/model.safetensors --prompt "In the beginning" --temperature 0.8 --top-p 0.95')
def generate(
    model: Model,
    prompt: Annotated[list[str], typer.Option(help="Text to continue; repeatable, all in one batch.")],
    limit: Limit = 200,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Continue prompts. One prompt is written as it comes."""
    from pipelines.language import job
    from titans_core.generation import Sampling

    with job.told():
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
    if as_json or len(prompt) > 1:
        texts = job.generate(model, prompt, sampling=sampling, limit=limit, stop=stop or [])
        if as_json:
            typer.echo(json.dumps(texts))
        else:
            for each in texts:
                typer.echo(each["prompt"] + each["text"])
        return
    for number, piece in enumerate(job.stream(model, prompt[0], sampling=sampling, limit=limit, stop=stop or [])):
        typer.echo((prompt[0] if number == 0 else "") + piece, nl=False)
        sys.stdout.flush()
    typer.echo("")


@app.command(epilog="Example: tethys lm chat runs/lm/model.safetensors --session talk.safetensors")
def chat(
    model: Model,
    session: Annotated[Path | None, typer.Option(help="File of the conversation: read when it is there, written after every answer.")] = None,
    limit: Limit = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Stop = None,
    seed: Seed = 0,
) -> None:
    """Talk, a line at a time from standard input; the memory keeps learning. A copy of the session file is a branch."""
    from pipelines.language import job
    from titans_core.generation import Sampling

    with job.told():
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty, seed=seed
        )
    talk = job.Talk.open(model, session)
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        for piece in talk.answer(line, sampling=sampling, limit=limit, stop=stop or ["\n"]):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        typer.echo("")


def _table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(f"{each:.4f}" if isinstance(each, float) else str(each) for each in row.values()))
    console = Console()
    console.print(table, width=None if console.is_terminal else 200, crop=False)
