"""Batch tables by URI: read into, and write from, a long polars frame (`unique_id`, `ds`, `y`, covariates).

The form is chosen by the address: `.csv`, `.csv.gz`, `.parquet`, a folder or glob of Parquet files,
`delta://PATH` (or a folder with `_delta_log`), `postgresql://...#TABLE`, and `s3://...` for Parquet and CSV.
Writes to local files are atomic: a temporary file in the same folder, fsync, rename.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from connectors.errors import UserError

CSV_SUFFIXES = (".csv", ".csv.gz")


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written. The default is what a program writes: commas, points, ISO stamps, UTF-8.

    missing: texts that stand for a missing value, in every column. decimal_comma: `1.234,5` is 1234.5.
    time_format: of the stamps, in strftime's letters (`%d/%m/%Y %H.%M.%S`); where it is not given stamps are ISO, and
    day and month are never guessed. time_columns: text columns that joined by a space make the stamp, which becomes
    the column `ds`.
    """

    separator: str = ","
    decimal_comma: bool = False
    missing: tuple[str, ...] = ("", "NA", "NaN", "nan", "None", "null", "NULL")
    time_format: str | None = None
    time_columns: tuple[str, ...] = ()
    encoding: str = "utf8"


def read(
    uri: str | os.PathLike[str],
    columns: Mapping[str, str] | None = None,
    *,
    required: tuple[str, ...] = (),
    storage_options: Mapping[str, str] | None = None,
    csv: CsvForm | None = None,
) -> pl.DataFrame:
    """Read a table.

    `columns` maps the name wanted to the name in the table (`{"ds": "date", "y": "OT"}`); other columns keep their
    names. `required` names (after mapping) must be there. `storage_options` go to the object store (S3 endpoint, keys).
    `csv` is how CSV files are written. In a CSV file a column of codes with leading zeros (`00123`) stays text, so that
    `00123` and `123` are two.
    Raises UserError for a missing file, a missing column (it names those that exist), no rows, or an unreadable file.
    """
    text = os.fspath(uri)
    try:
        frame = _scan(text, dict(storage_options or {}), csv)
    except UserError:
        raise
    except Exception as error:  # polars, deltalake and adbc each raise their own kinds
        raise UserError(f"cannot read '{text}': {_first_line(error)}") from error
    wanted = dict(columns or {})
    missing = [name for name in wanted.values() if name not in frame.columns]
    if missing:
        raise UserError(f"'{text}' has no column {_names(missing)}; it has {_names(frame.columns)}")
    # A column that stood under a wanted name but was not chosen would collide with the renamed one.
    frame = frame.drop([new for new, old in wanted.items() if new != old and new in frame.columns])
    frame = frame.rename({old: new for new, old in wanted.items()})
    missing = [name for name in required if name not in frame.columns]
    if missing:
        raise UserError(f"'{text}' has no column {_names(missing)}; it has {_names(frame.columns)}")
    if frame.height == 0:
        raise UserError(f"'{text}' has no rows")
    return frame


def write(
    frame: pl.DataFrame | Iterable[pl.DataFrame],
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Write a table, replacing what was there; on local files a reader sees the old table or the new one, never a part.

    Many frames of one schema are one table. A local Parquet file takes them one after another, a row group each, so that
    the table need not fit into memory; any other form is put together first. PostgreSQL tables are replaced in one
    transaction. Raises UserError for an address of unknown form.
    """
    text, options = os.fspath(uri), dict(storage_options or {})
    if not isinstance(frame, pl.DataFrame):
        if "://" not in text and text.endswith(".parquet"):
            _write_file(Path(text), lambda path: _row_groups(frame, path))
            return
        frame = pl.concat(frame)
    if text.startswith(("postgresql://", "postgres://")):
        address, table = _postgres(text)
        frame.write_database(table, address, engine="adbc", if_table_exists="replace")
    elif text.startswith("delta://"):
        frame.write_delta(text.removeprefix("delta://"), mode="overwrite", storage_options=options or None)
    elif text.startswith("s3://"):
        if not text.endswith(".parquet"):
            raise UserError(f"cannot write '{text}': on object stores use a name that ends in .parquet")
        frame.write_parquet(text, storage_options=options)
    elif text.endswith(CSV_SUFFIXES):
        compression: Any = "gzip" if text.endswith(".gz") else "uncompressed"
        _write_file(Path(text), lambda path: frame.write_csv(path, compression=compression, check_extension=False))
    elif text.endswith(".parquet"):
        _write_file(Path(text), frame.write_parquet)
    else:
        raise UserError(f"cannot write '{text}': use .csv, .csv.gz, .parquet, delta://, postgresql:// or s3://")


def write_text(text: str, path: Path) -> None:
    """A text file as `write` writes tables: the old one or the new one, never a part."""
    _write_file(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def _row_groups(frames: Iterable[pl.DataFrame], path: str) -> None:
    """pyarrow's writer, because the bytes of polars' streaming one depend on how many threads the machine has."""
    from pyarrow import parquet

    writer = None
    try:
        for frame in frames:
            rows = frame.to_arrow()
            writer = writer or parquet.ParquetWriter(path, rows.schema, compression="zstd")
            writer.write_table(rows, row_group_size=max(1, len(rows)))
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise ValueError("no frame to write")


def _scan(text: str, options: dict[str, str], csv: CsvForm | None = None) -> pl.DataFrame:
    if text.startswith(("postgresql://", "postgres://")):
        address, table = _postgres(text)
        quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))
        return pl.read_database_uri(f"SELECT * FROM {quoted}", address, engine="adbc")
    if text.startswith("delta://"):
        return pl.read_delta(text.removeprefix("delta://"), storage_options=options or None)
    if text.startswith("s3://"):
        if text.endswith(CSV_SUFFIXES):
            scan = pl.scan_csv(text, infer_schema=False, storage_options=options, **_dialect(csv))
            return _typed(scan.collect(), csv or CsvForm())
        return pl.scan_parquet(text, storage_options=options).collect()
    path = Path(text)
    if path.is_dir():
        if (path / "_delta_log").is_dir():
            return pl.read_delta(text)
        files = sorted(str(p) for p in path.rglob("*.parquet"))
        if not files:
            raise UserError(f"the folder '{text}' holds no .parquet file")
        for name in files:
            _require_parquet(name)
        return pl.read_parquet(files, hive_partitioning=True)
    if glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True))
        if not files:
            raise UserError(f"no file matches '{text}'")
        return pl.concat([_scan(name, options, csv) for name in files])
    if not path.exists():
        raise UserError(f"'{text}' does not exist")
    if path.stat().st_size == 0:
        raise UserError(f"'{text}' is empty")
    if text.endswith(CSV_SUFFIXES):
        if csv is not None:
            return _typed(pl.read_csv(path, infer_schema=False, **_dialect(csv)), csv)
        # The whole file decides a column's type: a first hundred integers must not turn later decimals into an error.
        frame = pl.read_csv(path, try_parse_dates=True, infer_schema_length=None)
        return _with_codes(frame, path)
    if text.endswith(".parquet"):
        return pl.read_parquet(path)
    raise UserError(f"cannot tell the form of '{text}': use .csv, .csv.gz or .parquet")


def _require_parquet(name: str) -> None:
    """Polars tells that a folder cannot be read, and not which file of it."""
    with open(name, "rb") as file:
        if file.read(4) != b"PAR1":
            raise UserError(f"'{name}' is no Parquet file: take it out of the folder, or write it anew")


def _dialect(csv: CsvForm | None) -> dict[str, Any]:
    form = csv or CsvForm()
    return {
        "separator": form.separator,
        "null_values": list(form.missing),
        "encoding": form.encoding,
    }


def _with_codes(frame: pl.DataFrame, path: Path) -> pl.DataFrame:
    """Codes with leading zeros as the text they are: numbers would make one of `00123` and `123`."""
    whole = [name for name, kind in frame.schema.items() if kind.is_integer()]
    if not whole:
        return frame
    texts = pl.read_csv(path, columns=whole, infer_schema=False)
    codes = [name for name in whole if texts[name].str.contains(r"^\s*0\d").any()]
    return frame.with_columns(texts[name] for name in codes)


def _typed(frame: pl.DataFrame, form: CsvForm) -> pl.DataFrame:
    """Columns of text as numbers and stamps, where every value of a column is one."""
    if form.time_columns:
        absent = [name for name in form.time_columns if name not in frame.columns]
        if absent:
            raise UserError(f"there is no column {_names(absent)} to make the stamp from; there are {_names(frame.columns)}")
        stamp = pl.concat_str(list(form.time_columns), separator=" ").alias("ds")
        frame = frame.select(stamp, pl.exclude(*form.time_columns, "ds"))
    return frame.select(_column(frame[name], form) for name in frame.columns)


def _column(text: pl.Series, form: CsvForm) -> pl.Series:
    given = text.drop_nulls()
    if not len(given):
        return text
    if form.time_format is not None:
        stamps = text.str.to_datetime(form.time_format, strict=False, time_unit="us")
        if stamps.null_count() == text.null_count():
            return stamps
    elif given.str.contains(r"^\d{4}-\d\d-\d\d").all():
        try:
            return text.str.to_datetime(strict=True, time_unit="us")
        except pl.exceptions.PolarsError:
            return text
    if given.str.contains(r"^\s*0\d").any() and not given.str.contains(r"[.,]").any():
        return text  # codes
    plain = text.str.strip_chars()
    if form.decimal_comma:
        plain = plain.str.replace_all(".", "", literal=True).str.replace(",", ".", literal=True)
    for kind in (pl.Int64, pl.Float64):
        numbers = plain.cast(kind, strict=False)
        if numbers.null_count() == text.null_count():
            return numbers
    return text


def _write_file(path: Path, write_to: Any) -> None:
    if not path.parent.is_dir():
        raise UserError(f"cannot write '{path}': the folder '{path.parent}' does not exist")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write_to(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes private files; a table has the usual rights
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _postgres(text: str) -> tuple[str, str]:
    address, mark, table = text.rpartition("#")
    if not mark or not table:
        raise UserError(f"name the table after a '#': {text}#my_table")
    return address, table


def _names(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
