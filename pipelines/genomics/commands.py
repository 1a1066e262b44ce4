"""`tethys genomics`: audit, train, classify, score-variants, pretrain, embed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="DNA: audit datasets, train classifiers, classify files, score variants.", no_args_is_help=True)

Table = Annotated[Path, typer.Argument(help="Table with sequence and label columns (TSV or CSV, plain or compressed).")]
Dev = Annotated[Path | None, typer.Option(help="Table of held-out rows that choices are made on.")]
Test = Annotated[Path | None, typer.Option(help="Table of rows that are scored once, at the end.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")]


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


@app.command(epilog="Example: tethys genomics train train.tsv --dev dev.tsv --test test.tsv --output model.safetensors")
def train(
    table: Table,
    dev: Annotated[Path, typer.Option(help="Table of held-out rows that the branches are weighed on.")],
    test: Annotated[Path, typer.Option(help="Table of rows that are scored once, at the end.")],
    output: Annotated[Path, typer.Option(help="File for the weights, the classes and the scores.")],
    strands: Annotated[str, typer.Option(help="'both' for binding sites, 'forward' for promoters and splice sites.")] = "forward",
    row_passes: Annotated[int, typer.Option(min=1, help="Rows shown in training, over all epochs.")] = 60_000,
    balanced: Annotated[bool, typer.Option(help="Give every class the same weight in the loss.")] = False,
    accept_leaks: Annotated[bool, typer.Option(help="Train although the audit refuses the data.")] = False,
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow store that the run is logged to.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Audit, train, and score a classifier beside a k-mer regression, on all rows and on the clean ones."""
    from pipelines.genomics.datasets import read_labelled
    from pipelines.genomics.report import train_and_report
    from pipelines.genomics.training import Settings
    from titans_core.classifier import Card, save

    def progress(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            print(f"step {step} of {steps}, loss {loss:.3f}", file=sys.stderr)

    settings = Settings(row_passes=row_passes, batch=64, rate=2e-3, weights="balanced" if balanced else None, seed=seed)
    splits = [read_labelled(path) for path in (table, dev, test)]
    trained = train_and_report(*splits, strands=strands, settings=settings, accept_leaks=accept_leaks, progress=progress)
    flat = {
        f"{model}.{rows}.{name}": score.value
        for model, parts in trained.scores.items()
        for rows, found in parts.items()
        for name, score in found.items()
    }
    save(trained.model, output, Card(data=trained.digests, scores=flat))
    if tracking_uri is not None:
        from pipelines import tracking

        params = {"strands": strands, "row_passes": row_passes, "seed": seed, "classes": ",".join(trained.model.config.classes)}
        params |= {f"data_{name}": value[:16] for name, value in trained.digests.items()}
        with tracking.run(tracking.open_store(tracking_uri), "genomics train", params=params) as run:
            run.log_metrics(flat)
            run.log_json(trained.to_json(), "report.json")
            run.log_file(output)
    print(json.dumps(trained.to_json()) if as_json else trained.text())


@app.command(epilog="Example: tethys genomics classify job.yaml")
def classify(
    job: Annotated[Path, typer.Argument(help="YAML: model, inputs, output and options (pipelines/genomics/job.py).")],
    tracking_uri: Annotated[str | None, typer.Option(help="MLflow store that the run is logged to.")] = None,
    as_json: Json = False,
) -> None:
    """Score files with a classifier; safe to kill and to run again. Exit status 3 when a record was bad or none was found."""
    from dataclasses import asdict

    from pipelines.genomics.job import classify as run_job
    from pipelines.genomics.job import read_job

    summary = run_job(read_job(job))
    if tracking_uri is not None:
        from pipelines import tracking

        params = {"run_key": summary.run_key, "classes": ",".join(summary.classes)}
        with tracking.run(tracking.open_store(tracking_uri), "genomics classify", params=params) as run:
            numbers = ("records", "bad_records", "empty", "padded", "cropped", "bases", "ambiguous", "seconds")
            run.log_metrics({name: float(getattr(summary, name)) for name in numbers})
    print(json.dumps(asdict(summary)) if as_json else summary.line())
    if summary.status:
        raise typer.Exit(summary.status)


@app.command(
    name="score-variants", epilog="Example: tethys genomics score-variants model.safetensors calls.vcf --genome hg38.fa --output scores.tsv"
)
def score_variants_command(
    model: Annotated[Path, typer.Argument(help="Weights that `train` wrote.")],
    vcf: Annotated[str, typer.Argument(help="VCF, plain or compressed; '-' for standard input.")],
    genome: Annotated[Path, typer.Option(help="FASTA that the positions lie on.")],
    output: Annotated[Path, typer.Option(help="TSV, one line an ALT allele.")],
) -> None:
    """What each allele does to each class, on both strands. Exit status 3 when an allele could not be scored."""
    from collections import Counter

    from pipelines.genomics.variants import score_variants
    from titans_core.classifier import load

    status: Counter[str] = Counter()
    part = output.with_name("." + output.name)
    with open(part, "w") as file:
        for frame in score_variants(load(model)[0], vcf, genome):
            frame.write_csv(file, separator="\t", include_header=not status)
            status.update(frame["status"].to_list())
    part.replace(output)
    print(", ".join(f"{name} {count}" for name, count in status.items()) or "no allele")
    if set(status) != {"ok"}:
        raise typer.Exit(3)


@app.command(epilog="Example: tethys genomics pretrain ecoli.fa.gz --output ecoli.safetensors")
def pretrain(
    genomes: Annotated[list[str], typer.Argument(help="Sequence files that the model is made from.")],
    output: Annotated[Path, typer.Option(help="File for counts and weights.")],
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 16,384 bases.")] = 120,
    measure: Annotated[str | None, typer.Option(help="Sequence file to report bits per base on.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    as_json: Json = False,
) -> None:
    """Make a DNA language model of genomes, and say how well it foretells another one with its memory on and off."""
    import torch

    from connectors.sequences import read
    from titans_core.dna_model import ContextCounts, DnaModel, DnaModelConfig, bits_per_base, save, without_writes
    from titans_core.dna_model import train as train_model
    from titans_core.tokenizers import encode_bases

    contigs = [encode_bases(record.sequence) for path in genomes for record in read(path)]
    config = DnaModelConfig()
    counts = ContextCounts.of(contigs, config.orders)
    torch.manual_seed(seed)
    model = DnaModel(config)
    history = train_model(model, counts, contigs, steps=steps, seed=seed)
    save(model, counts, output)
    last = history[-20:]
    found = {"bases": float(sum(map(len, contigs))), "train_bits_per_base": sum(last) / len(last)}
    if measure is not None:
        rows = [encode_bases(record.sequence) for record in read(measure)]
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
    from titans_core.dna_model import embed as embed_codes
    from titans_core.dna_model import load
    from titans_core.tokenizers import encode_bases

    network, counts = load(model)
    rows = [
        {"id": record.id, "length": len(record.sequence), "vector": embed_codes(network, counts, encode_bases(record.sequence))}
        for record in read(source)
    ]
    part = output.with_name("." + output.name)
    vector = pl.Array(pl.Float32, network.config.dim)
    pl.DataFrame(rows, schema={"id": pl.String(), "length": pl.Int64(), "vector": vector}).write_parquet(part)
    part.replace(output)
    print(f"{len(rows)} vectors of {network.config.dim} numbers")
