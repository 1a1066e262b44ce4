"""`tethys genomics`: audit, train, classify, score-variants, pretrain, embed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from connectors.errors import UserError
from pipelines import DEFAULT_TRACKING_URI

app = typer.Typer(help="DNA: audit datasets, train classifiers, classify files, score variants.", no_args_is_help=True)

Table = Annotated[Path, typer.Argument(help="Table with sequence and label columns (TSV or CSV, plain or compressed).")]
Dev = Annotated[Path | None, typer.Option(help="Table of held-out rows that choices are made on.")]
Test = Annotated[Path | None, typer.Option(help="Table of rows that are scored once, at the end.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]
Model = Annotated[str, typer.Argument(help="A registered classifier, models:/NAME@ALIAS, or a file that `train --output` wrote.")]
TrackingUri = Annotated[
    str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store: a SQLite file, or the address of a tracking server.")
]


class Executor(StrEnum):
    local = "local"
    ray = "ray"


class Strands(StrEnum):
    forward = "forward"
    both = "both"
    equivariant = "equivariant"


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int, float], None]]:
    """A bar on standard error: call it with the steps done, all steps and the loss. Only a line at the end where no terminal is."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, loss="")

        def step(done: int, of: int, loss: float) -> None:
            bar.update(task, completed=done, total=of, loss=f"{loss:.3f}")

        yield step


@app.command(name="audit", epilog="Example: tethys genomics audit train.tsv --dev dev.tsv --test test.tsv")
def audit_command(
    train: Table,
    dev: Dev = None,
    test: Test = None,
    intervals: Annotated[bool, typer.Option(help="TRAIN is a folder SPLIT/CLASS.csv.gz of intervals.")] = False,
    as_json: Json = False,
) -> None:
    """What a dataset gives away before any model is trained. Exit status 3 when it should be refused."""
    from dataclasses import asdict

    from pipelines.genomics.audit import audit, audit_intervals
    from pipelines.genomics.datasets import read_folder, read_interval_folder, read_labelled

    if intervals:
        report = audit_intervals(read_interval_folder(train))
    elif train.is_dir():
        report = audit(read_folder(train))
    else:
        splits = {"train": train, "dev": dev, "test": test}
        report = audit({name: read_labelled(path) for name, path in splits.items() if path is not None})
    if as_json:
        print(json.dumps({"verdict": report.verdict, "findings": [asdict(each) for each in report.findings]}))
    else:
        print(report.text())
    if report.verdict == "refuse":
        raise typer.Exit(3)


@app.command(epilog="Example: tethys genomics train train.tsv --dev dev.tsv --test test.tsv --model-name enhancers --alias champion")
def train(
    table: Annotated[Path, typer.Argument(help="Table of training rows, or a folder SPLIT/CLASS/*.txt as GenomicBenchmarks lays out.")],
    dev: Annotated[Path | None, typer.Option(help="Held-out rows that the branches are weighed on; a tenth of TABLE when not given.")] = None,
    test: Annotated[Path | None, typer.Option(help="Rows that are scored once, at the end; needed unless TABLE is a folder.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to keep the weights in, beside the registry.")] = None,
    strands: Annotated[
        Strands, typer.Option(help="'both' or 'equivariant' for binding sites, 'forward' for promoters and splice sites.")
    ] = Strands.forward,
    length: Annotated[int | None, typer.Option(min=1, help="Bases the model looks at; the longest training row when not given.")] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="File that `pretrain` wrote: its language model is fine-tuned instead of a new network.")
    ] = None,
    row_passes: Annotated[int, typer.Option(min=1, help="Rows shown in training, over all epochs.")] = 60_000,
    balanced: Annotated[bool, typer.Option(help="Give every class the same weight in the loss.")] = False,
    accept_leaks: Annotated[bool, typer.Option(help="Train although the audit refuses the data.")] = False,
    model_name: Annotated[str, typer.Option(help="Name of the model in the registry.")] = "classifier",
    alias: Annotated[str, typer.Option(help="Alias that the new version gets.")] = "challenger",
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Audit, train, score beside a k-mer regression on all rows and on the clean ones, log the run and register the model."""
    from pipelines.genomics.answers import load_language_model
    from pipelines.genomics.datasets import read_splits
    from pipelines.genomics.report import register, train_and_report
    from pipelines.genomics.training import Settings
    from pipelines.tracking import check_names

    check_names(model_name, alias)
    settings = Settings(row_passes=row_passes, batch=64, rate=2e-3, weights="balanced" if balanced else None, seed=seed)
    language_model = None if pretrained is None else load_language_model(pretrained)
    splits = read_splits(table, dev, test, seed=seed)
    with progress_bar("training") as progress:
        trained = train_and_report(
            *(rows for _, rows in splits.values()),
            strands=strands.value, length=length, settings=settings, accept_leaks=accept_leaks,
            pretrained=language_model, progress=progress,
        )  # fmt: skip
    if output is not None:
        part = output.with_name("." + output.name)
        trained.save(part)
        part.replace(output)
    params = {"pretrained": pretrained, "row_passes": row_passes, "balanced": balanced, "seed": seed}
    version = register(trained, splits, tracking_uri=tracking_uri, name=model_name, alias=alias, params=params)
    shown = {**trained.to_json(), "version": version, "alias": alias}
    print(json.dumps(shown) if as_json else f"{trained.text()}\nmodel    {version}@{alias}")


@app.command(epilog="Example: tethys genomics classify job.yaml")
def classify(
    job: Annotated[Path, typer.Argument(help="YAML: model, inputs, output and options (pipelines/genomics/job.py).")],
    tracking_uri: Annotated[
        str | None, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow store instead of the job's: of the model, and for the run.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Score files with a classifier; safe to kill and to run again. Exit status 3 when a record was bad or none was found."""
    from dataclasses import asdict, replace

    from pipelines.genomics.job import classify as run_job
    from pipelines.genomics.job import read_job, track

    what = read_job(job)
    if tracking_uri is not None:
        what = replace(what, tracking_uri=tracking_uri)
    summary = run_job(what)
    track(what, summary)
    print(json.dumps(asdict(summary)) if as_json else summary.line())
    if summary.status:
        raise typer.Exit(summary.status)


@app.command(epilog="Example: tethys genomics track scores/ --genome hg38.fa --label enhancer --output enhancer.bw")
def track(
    scores: Annotated[Path, typer.Argument(help="Output folder of a classification job over BED intervals.")],
    genome: Annotated[Path, typer.Option(help="FASTA that the intervals lie on.")],
    label: Annotated[str, typer.Option(help="Class whose probability is drawn.")],
    output: Annotated[Path, typer.Option(help="bigWig (.bw) or bedGraph (.bedgraph).")],
) -> None:
    """The probability of a class along a genome, for a genome browser; overlapping intervals are averaged base by base."""
    from pipelines.genomics.tracks import write_track

    print(f"{write_track(scores, genome, label, output)} stretches in {output}")


@app.command(epilog="Example: tethys genomics stream run.fastq --follow --model models:/taxa@champion --output taxa.ndjson --checkpoint taxa.db")
def stream(
    source: Annotated[str, typer.Argument(help="FASTQ: a file (plain or compressed), a pipe, or '-' for standard input.")],
    model: Annotated[str, typer.Option(help="A registered classifier, models:/NAME@ALIAS, or a file that `train --output` wrote.")],
    output: Annotated[str, typer.Option(help="Where rows go: .ndjson, .csv, a folder .parquet, or kafka://HOST:PORT/TOPIC.")],
    checkpoint: Annotated[Path, typer.Option(help="File that keeps the place; begin again with it after a crash or a stop.")],
    follow: Annotated[bool, typer.Option(help="Wait for more at the end of a growing file.")] = False,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Classify reads as they come, in order and each exactly once, in bounded memory. Exit status 3 when a read was refused."""
    from dataclasses import asdict

    from pipelines.genomics.stream import run

    summary = run(source, model, checkpoint=checkpoint, output=output, follow=follow, tracking_uri=tracking_uri)
    print(json.dumps(asdict(summary)) if as_json else summary.line())
    if summary.dead:
        raise typer.Exit(3)


@app.command(
    name="score-variants", epilog="Example: tethys genomics score-variants models:/enhancers@champion calls.vcf --genome hg38.fa --output scores.tsv"
)
def score_variants_command(
    model: Model,
    vcf: Annotated[str, typer.Argument(help="VCF, plain or compressed; '-' for standard input.")],
    genome: Annotated[Path, typer.Option(help="FASTA that the positions lie on.")],
    output: Annotated[Path, typer.Option(help="TSV, one line an ALT allele.")],
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
) -> None:
    """What each allele does to each class, on both strands. Exit status 3 when an allele could not be scored."""
    from collections import Counter

    from pipelines.genomics.answers import load_classifier
    from pipelines.genomics.job import model_at, weights_of
    from pipelines.genomics.variants import score_variants

    network = load_classifier(weights_of(model_at(model), tracking_uri)[0])
    status: Counter[str] = Counter()
    part = output.with_name("." + output.name)
    try:
        with open(part, "w") as file:
            for frame in score_variants(network, vcf, genome):
                frame.write_csv(file, separator="\t", include_header=not status)
                status.update(frame["status"].to_list())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)
    print(", ".join(f"{name} {count}" for name, count in status.items()) or "no allele")
    if set(status) != {"ok"}:
        raise typer.Exit(3)


@app.command(epilog="Example: tethys genomics explain models:/enhancers@champion peaks.fa --label enhancer --output explained/")
def explain(
    model: Model,
    source: Annotated[str, typer.Argument(help="Sequence file; '-' for standard input.")],
    label: Annotated[str, typer.Option(help="Class whose answer is explained.")],
    output: Annotated[Path, typer.Option(help="Folder for bases.tsv (a row a base) and a plot a record, NNNN.png.")],
    records: Annotated[int, typer.Option(min=1, help="Records to explain, from the first on: each costs 3 answers a base.")] = 20,
    tracking_uri: TrackingUri = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """Which bases an answer hangs on: the effect of every substitution, and the gradient, as a table and as plots."""
    from itertools import islice

    import polars as pl

    from connectors.sequences import read
    from pipelines.genomics import variants
    from pipelines.genomics.answers import load_classifier
    from pipelines.genomics.job import model_at, weights_of

    network = load_classifier(weights_of(model_at(model), tracking_uri)[0])
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {output} ({error.strerror}): name another --output") from None
    frames = []
    for number, record in enumerate(islice((each for each in read(source) if each.sequence), records)):
        table = variants.explain(network, record.sequence, label)
        # Ids are data and no file names: the plot is named by the record's number, the table tells which id that is.
        variants.plot(table, f"{record.id}: {label}").savefig(output / f"{number:04d}.png", dpi=120)
        frames.append(table.select(pl.lit(number).alias("record"), pl.lit(record.id).alias("id"), pl.all()))
    part, table_file = output / ".bases.tsv", output / "bases.tsv"
    (pl.concat(frames) if frames else pl.DataFrame()).write_csv(part, separator="\t")
    if table_file.exists():  # plots of records that are no more; a picture that no table tells of is not ours
        for line in table_file.read_text().splitlines()[1:]:
            before = line.partition("\t")[0]
            if before.isdigit() and int(before) >= len(frames):
                (output / f"{int(before):04d}.png").unlink(missing_ok=True)
    part.replace(table_file)
    found = {"records": len(frames), "bases": sum(map(len, frames)), "output": str(output)}
    print(json.dumps(found) if as_json else f"explained {found['records']} records, {found['bases']} bases, in {output}")
    if not frames:
        raise typer.Exit(3)


@app.command(epilog="Example: tethys genomics pretrain ecoli.fa.gz --output ecoli.safetensors")
def pretrain(
    genomes: Annotated[list[str], typer.Argument(help="Sequence files that the model is made from.")],
    output: Annotated[Path, typer.Option(help="File for counts and weights.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 16,384 bases.")] = 120,
    measure: Annotated[str | None, typer.Option(help="Sequence file to report bits per base on.")] = None,
    executor: Annotated[Executor, typer.Option(help="Count and train in this process, or on Ray.")] = Executor.local,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share each step, on Ray.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a DNA language model of genomes, and say how well it foretells another one with its memory on and off."""
    from pipelines.genomics.pretraining import pretrain as make
    from pipelines.genomics.pretraining import read_contigs
    from titans_core.dna_model import DnaModelConfig, Training, bits_per_base, save, without_writes

    contigs = read_contigs(genomes)
    rows = None if measure is None else read_contigs([measure])
    with progress_bar("pretraining") as progress:
        training = Training(steps=steps, seed=seed)
        model, counts, history = make(contigs, DnaModelConfig(), training, executor=executor.value, workers=workers, progress=progress)
    part = output.with_name("." + output.name)
    save(model, counts, part)
    part.replace(output)
    last = history[-20:]
    found = {"bases": float(sum(map(len, contigs))), "train_bits_per_base": sum(last) / len(last)}
    if rows is not None:
        total = sum(map(len, rows))
        found["carried_bits_per_base"] = sum(bits_per_base(model, counts, row)[0] * len(row) for row in rows) / total
        with without_writes(model):
            found["frozen_bits_per_base"] = sum(bits_per_base(model, counts, row)[0] * len(row) for row in rows) / total
    print(json.dumps(found) if as_json else ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


@app.command(epilog="Example: tethys genomics embed ecoli.safetensors contigs.fa --output vectors.parquet")
def embed(
    model: Annotated[Path, typer.Argument(help="File that `pretrain` wrote.")],
    source: Annotated[str, typer.Argument(help="Sequence file; '-' for standard input.")],
    output: Annotated[Path, typer.Option(help="Parquet: id, length, and the vector of each record.")],
) -> None:
    """One vector a record: the mean of what the language model reads at each base."""
    import polars as pl

    from connectors.sequences import read
    from pipelines.genomics.answers import load_language_model
    from titans_core.dna_model import embed as embed_codes
    from titans_core.tokenizers import encode_bases

    network, counts = load_language_model(model)
    rows = [
        {"id": record.id, "length": len(record.sequence), "vector": embed_codes(network, counts, encode_bases(record.sequence))}
        for record in read(source)
    ]
    part = output.with_name("." + output.name)
    vector = pl.Array(pl.Float32, network.config.dim)
    pl.DataFrame(rows, schema={"id": pl.String(), "length": pl.Int64(), "vector": vector}).write_parquet(part)
    part.replace(output)
    print(f"{len(rows)} vectors of {network.config.dim} numbers")
