"""A classification job: files in, a table of class probabilities out, the same however often it is broken off and run again.

    # job.yaml
    model: {name: enhancers, version: champion}   # a registered model by number or alias; or a file that `train --output` wrote
    tracking_uri: sqlite:///runs/tethys.db        # where it is registered
    inputs: [reads/*.fq.gz, regions.bed]
    output: scores/
    genome: hg38.fa          # for BED and VCF inputs
    window: 200              # bases around each VCF allele
    labels: [enhancer, none] # optional: stop unless the model has exactly these classes, in this order
    format: parquet          # or tsv, or bed (BED inputs only: the score of the first class times 1000)
    shard_records: 20000
    on_bad_record: skip      # or stop
    executor: local          # or ray: one task an input

The run key is a digest of the model, the inputs and every setting that changes a row. Each shard (so many records of one
input) is written to a hidden file and renamed when whole; a second run with the same key scores only the shards that are
missing, one with another key replaces the output. A bad record costs only itself: it goes to dead_letter.jsonl and the job
ends with status 3. run.json, written last, says that the output is complete.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import polars as pl
import yaml

from connectors.errors import UserError
from connectors.sequences import AnyRecord, Genome, Reader, read
from pipelines import DEFAULT_TRACKING_URI
from pipelines.genomics.answers import AND, answer, load_classifier
from titans_core.classifier import Classifier

DONE, WITH_BAD_RECORDS = 0, 3  # exit statuses; 2 is a mistake of the user and 1 a failure of the program


@dataclass(frozen=True)
class ModelVersion:
    """A model of the registry; version is a number or an alias."""

    name: str
    version: str = "champion"


@dataclass(frozen=True)
class ClassifyJob:
    """What a job.yaml says; paths are relative to the folder of the file."""

    model: Path | ModelVersion
    inputs: tuple[Path, ...]
    output: Path
    tracking_uri: str | None = None
    genome: Path | None = None
    window: int = 0
    pad: bool = False
    labels: tuple[str, ...] | None = None
    format: Literal["parquet", "tsv", "bed"] = "parquet"
    shard_records: int = 20_000
    on_bad_record: Literal["skip", "stop"] = "skip"
    executor: Literal["local", "ray"] = "local"


@dataclass
class Summary:
    """What a job did; one line for a scheduler's log."""

    run_key: str
    model: str = ""
    records: int = 0
    shards: int = 0
    shards_scored: int = 0
    bad_records: int = 0
    empty: int = 0
    padded: int = 0
    cropped: int = 0
    bases: int = 0
    ambiguous: int = 0
    shortest: int = 0
    longest: int = 0
    seconds: float = 0.0
    classes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0, or 3 where a record was bad or there was nothing to score."""
        return WITH_BAD_RECORDS if self.bad_records or not self.records else DONE

    def line(self) -> str:
        found = ", ".join(f"{name} {count}" for name, count in self.classes.items())
        return (
            f"classified {self.records} records in {self.seconds:.1f} s ({found}); {self.bad_records} bad, "
            f"{self.empty} empty, {self.shards_scored} of {self.shards} shards scored now, run {self.run_key[:12]}"
        )


def read_job(path: str | Path) -> ClassifyJob:
    """A job from YAML; unknown keys, missing keys and patterns that match nothing are errors."""
    path = Path(path)
    try:
        settings = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is no YAML ({error})") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path}: must be a mapping with model, inputs and output")
    known = set(ClassifyJob.__dataclass_fields__)
    if unknown := sorted(set(settings) - known):
        raise UserError(f"{path}: unknown key {', '.join(unknown)} (known: {', '.join(sorted(known))})")
    if missing := [key for key in ("model", "inputs", "output") if key not in settings]:
        raise UserError(f"{path}: needs {', '.join(missing)}")
    here = path.parent
    patterns = settings["inputs"] if isinstance(settings["inputs"], list) else [settings["inputs"]]
    inputs: list[Path] = []
    for pattern in patterns:
        found = sorted(glob.glob(str(here / str(pattern))))
        if not found:
            raise UserError(f"{path}: no file matches '{pattern}'")
        inputs += [Path(name) for name in found if Path(name) not in inputs]
    settings |= {"inputs": tuple(inputs), "model": _model(path, settings["model"]), "output": here / settings["output"]}
    if settings.get("genome") is not None:
        settings["genome"] = here / settings["genome"]
    if settings.get("labels") is not None:
        settings["labels"] = tuple(map(str, settings["labels"]))
    job = ClassifyJob(**settings)
    for name, value, allowed in (
        ("format", job.format, ("parquet", "tsv", "bed")),
        ("on_bad_record", job.on_bad_record, ("skip", "stop")),
        ("executor", job.executor, ("local", "ray")),
    ):
        if value not in allowed:
            raise UserError(f"{path}: {name} '{value}' is none of {', '.join(allowed)}")
    if not isinstance(job.shard_records, int) or job.shard_records < 1:
        raise UserError(f"{path}: shard_records must be a whole number from 1")
    return job


def _model(path: Path, said: Any) -> Path | ModelVersion:
    """What a job says of its model: a file, an address models:/NAME@ALIAS, or {name, version}."""
    if isinstance(said, str):
        found = model_at(said)
        return path.parent / found if isinstance(found, Path) else found
    if isinstance(said, dict) and isinstance(said.get("name"), str) and set(said) <= {"name", "version"}:
        return ModelVersion(said["name"], str(said.get("version", "champion")))
    raise UserError(f"{path}: model must be a file, or {{name: NAME, version: NUMBER_OR_ALIAS}}")


def model_at(text: str) -> Path | ModelVersion:
    """A registered model by MLflow's address (models:/NAME@ALIAS or models:/NAME/NUMBER), or else a file."""
    if not text.startswith("models:/"):
        return Path(text)
    name, _, version = text.removeprefix("models:/").replace("@", "/").partition("/")
    if not name or not version:
        raise UserError(f"'{text}' names no version: write models:/NAME@ALIAS or models:/NAME/NUMBER")
    return ModelVersion(name, version)


def weights_of(model: Path | ModelVersion, tracking_uri: str | None) -> tuple[Path, str]:
    """The weights of a file or of a registered classifier on this machine, and what to call the model: its path or NAME/VERSION."""
    if isinstance(model, Path):
        return model, str(model)
    from pipelines import tracking

    found = tracking.load_model(model.name, model.version, tracking_uri or DEFAULT_TRACKING_URI, kind="classifier")
    return found.weights, f"{found.name}/{found.version}"


def run_key(job: ClassifyJob) -> str:
    """Digest of everything that decides a row: contents of model, genome and inputs, and the settings."""
    assert isinstance(job.model, Path)
    digest = hashlib.sha256(b"classify 1\n")
    for path in (job.model, job.genome, *job.inputs):
        if path is not None:
            digest.update(f"{path.name}\n".encode())
            try:
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    settings = (job.window, job.pad, job.format, job.shard_records, job.on_bad_record)
    digest.update(json.dumps(settings).encode())
    return digest.hexdigest()


def classify(job: ClassifyJob) -> Summary:
    """Run a job to its end; raises UserError for what the user can put right (a bad record among it, with "stop")."""
    start = time.monotonic()
    weights, name = weights_of(job.model, job.tracking_uri)
    job = replace(job, model=weights)
    key = run_key(job)
    model = load_classifier(weights)
    classes = model.config.classes
    if job.labels is not None and job.labels != classes:
        raise UserError(f"the job expects the classes {list(job.labels)}, the model has {list(classes)}")
    if job.format == "bed" and any(_kind(path, job) != "bed" for path in job.inputs):
        raise UserError("format bed needs BED inputs: other records have no interval")
    output = job.output
    state = output / "run.json"
    if state.exists() and json.loads(state.read_text()).get("run_key") != key:
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    begun = output / ".run_key"
    if begun.exists() and begun.read_text() != key:
        shutil.rmtree(output)
        output.mkdir(parents=True)
    begun.write_text(key)
    parts = [(job, number, path) for number, path in enumerate(job.inputs)]
    summary = Summary(key, name, classes=dict.fromkeys(classes, 0))
    for part in _on_ray(parts) if job.executor == "ray" else (classify_input(*part) for part in parts):
        _add(summary, part)
    with open(output / ".dead_letter.jsonl", "w") as merged:
        for number in range(len(job.inputs)):
            letter = _dead(output, number)
            if letter.exists():
                merged.write(letter.read_text())
                letter.unlink()
    if summary.bad_records:
        (output / ".dead_letter.jsonl").replace(output / "dead_letter.jsonl")
    else:
        (output / ".dead_letter.jsonl").unlink()
    summary.seconds = round(time.monotonic() - start, 3)
    fresh = output / ".run.json"
    fresh.write_text(json.dumps({**asdict(summary), "classes_order": list(classes)}, indent=1))
    fresh.replace(state)
    return summary


def track(job: ClassifyJob, summary: Summary) -> None:
    """Log what a job did as an MLflow run, where it names a store or a registered model."""
    if job.tracking_uri is None and isinstance(job.model, Path):
        return
    from pipelines import tracking

    params = {"run_key": summary.run_key, "model": summary.model, "classes": ",".join(summary.classes), "inputs": len(job.inputs)}
    with tracking.run(tracking.open_store(job.tracking_uri or DEFAULT_TRACKING_URI), "genomics classify", params=params) as run:
        numbers = ("records", "bad_records", "empty", "padded", "cropped", "bases", "ambiguous", "seconds")
        run.log_metrics({name: float(getattr(summary, name)) for name in numbers})
        run.log_json(asdict(summary), "run.json")


def classify_input(job: ClassifyJob, number: int, path: Path) -> Summary:
    """Every missing shard of one input; what was counted in all of it."""
    assert isinstance(job.model, Path)
    model = load_classifier(job.model)
    classes = model.config.classes
    dead = _dead(job.output, number)
    dead.unlink(missing_ok=True)
    summary = Summary("", classes=dict.fromkeys(classes, 0), shortest=-1)
    reader = read(
        path,
        genome=Genome(job.genome) if job.genome is not None else None,
        window=job.window,
        pad=job.pad,
        on_bad_record=job.on_bad_record,
        dead_letter=dead if job.on_bad_record == "skip" else None,
    )
    for shard, records in enumerate(_shards(reader, job.shard_records)):
        file = job.output / f"part-{number:04d}-{shard:06d}.{job.format}"
        lengths = [len(record.sequence) for record in records]
        if not file.exists():
            _score(model, path, records, file, job)
            summary.shards_scored += 1
        for said in _predictions(file, job.format):
            for name in said.split(AND) if model.config.task == "multi" else (said,):
                if name:
                    summary.classes[name] += 1
        summary.shards += 1
        summary.records += len(records)
        summary.shortest = min(lengths) if summary.shortest < 0 else min(summary.shortest, *lengths)
        summary.longest = max(summary.longest, *lengths)
        summary.padded += sum(length < model.config.length for length in lengths)
        summary.cropped += sum(length > model.config.length for length in lengths)
    report = reader.report
    summary.bad_records, summary.empty, summary.bases = report.bad_records, report.empty, report.bases
    summary.ambiguous = sum(report.ambiguous.values())
    summary.warnings = [f"{path.name}: {warning}" for warning in report.warnings]
    return summary


def _on_ray(parts: Sequence[tuple[ClassifyJob, int, Path]]) -> Iterator[Summary]:
    """One task an input, as many at once as the cluster has cores; the output folder must be one that all nodes see."""
    from pipelines.windows import ray_cluster

    ray_cluster()
    import ray

    task = ray.remote(num_cpus=1)(classify_input)
    try:
        yield from ray.get([task.remote(*part) for part in parts])
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None


def _add(total: Summary, part: Summary) -> None:
    for name in ("records", "shards", "shards_scored", "bad_records", "empty", "padded", "cropped", "bases", "ambiguous"):
        setattr(total, name, getattr(total, name) + getattr(part, name))
    for name, count in part.classes.items():
        total.classes[name] += count
    if part.records:
        total.shortest = min(total.shortest or part.shortest, part.shortest)
    total.longest = max(total.longest, part.longest)
    total.warnings += part.warnings


def _dead(output: Path, number: int) -> Path:
    return output / f".dead-{number:04d}.jsonl"


def _kind(path: Path, job: ClassifyJob) -> str:
    with read(path, genome=job.genome, window=max(job.window, 1)) as reader:
        return reader.report.format


def _shards(reader: Reader, size: int) -> Iterator[list[AnyRecord]]:
    """Records in lists of `size`; those of no base are counted by the report and not scored."""
    records = (record for record in reader if record.sequence)
    while shard := list(islice(records, size)):
        yield shard


def _score(model: Classifier, path: Path, records: Sequence[AnyRecord], file: Path, job: ClassifyJob) -> None:
    """One shard to one file, whole or not at all."""
    answers = answer(model, [record.sequence for record in records])
    frame = answers.insert_column(0, pl.Series("id", [record.id for record in records], pl.String))
    frame.insert_column(0, pl.Series("file", [path.name] * len(records)))
    if job.genome is not None:  # where an interval lies; null for the records of other inputs
        places = [getattr(record, "place", None) or (None,) * 4 for record in records]
        kinds = {"contig": pl.String, "start": pl.Int64, "end": pl.Int64, "strand": pl.String}
        frame = pl.concat([frame, pl.DataFrame(places, schema=kinds, orient="row")], how="horizontal")
    part = file.with_name("." + file.name)
    if job.format == "parquet":
        frame.write_parquet(part, metadata={"classes": json.dumps(model.config.classes)})
    elif job.format == "tsv":
        frame.write_csv(part, separator="\t")
    else:
        rows = []
        first = f"prob_{model.config.classes[0]}"
        for record, said, score in zip(records, answers["prediction"], answers[first], strict=True):
            contig, start, end, strand = record.place  # type: ignore[union-attr, misc]
            rows.append(f"{contig}\t{start}\t{end}\t{record.id}|{said}\t{round(1000 * score)}\t{strand}\n")
        part.write_text("".join(rows))
    part.replace(file)


def _predictions(file: Path, kind: str) -> list[str]:
    if kind == "parquet":
        return pl.read_parquet(file, columns=["prediction"])["prediction"].to_list()
    if kind == "tsv":
        return pl.read_csv(file, separator="\t", columns=["prediction"], schema_overrides={"prediction": pl.String})["prediction"].to_list()
    return [line.split("\t")[3].rpartition("|")[2] for line in file.read_text().splitlines()]
