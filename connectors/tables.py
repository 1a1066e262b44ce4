"""Batch tables by URI: read into, and write from, a long polars frame (`unique_id`, `ds`, `y`, covariates).

The form is chosen by the address: `.csv`, `.csv.gz`, `.parquet`, a folder or glob of Parquet files,
`delta://PATH` (or a folder with `_delta_log`), `postgresql://...#TABLE`, and `s3://...` for Parquet and CSV.
Writes to local files are atomic: a temporary file in the same folder, fsync, rename.
"""

from __future__ import annotations

import glob
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from connectors.errors import UserError

CSV_SUFFIXES = (".csv", ".csv.gz")


def read(
    uri: str | os.PathLike[str],
    columns: Mapping[str, str] | None = None,
    *,
    required: tuple[str, ...] = (),
    storage_options: Mapping[str, str] | None = None,
) -> pl.DataFrame:
    """Read a table.

    `columns` maps the name wanted to the name in the table (`{"ds": "date", "y": "OT"}`); other columns keep their
    names. `required` names (after mapping) must be there. `storage_options` go to the object store (S3 endpoint, keys).
    Raises UserError for a missing file, a missing column (it names those that exist), no rows, or an unreadable file.
    """
    text = os.fspath(uri)
    try:
        frame = _scan(text, dict(storage_options or {}))
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
    frame: pl.DataFrame, uri: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None
) -> None:
    """Write a table, replacing what was there; on local files a reader sees the old table or the new one, never a part.

    PostgreSQL tables are replaced in one transaction. Raises UserError for an address of unknown form.
    """
    text, options = os.fspath(uri), dict(storage_options or {})
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


def _scan(text: str, options: dict[str, str]) -> pl.DataFrame:
    if text.startswith(("postgresql://", "postgres://")):
        address, table = _postgres(text)
        quoted = ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))
        return pl.read_database_uri(f"SELECT * FROM {quoted}", address, engine="adbc")
    if text.startswith("delta://"):
        return pl.read_delta(text.removeprefix("delta://"), storage_options=options or None)
    if text.startswith("s3://"):
        if text.endswith(CSV_SUFFIXES):
            return pl.scan_csv(text, try_parse_dates=True, storage_options=options).collect()
        return pl.scan_parquet(text, storage_options=options).collect()
    path = Path(text)
    if path.is_dir():
        if (path / "_delta_log").is_dir():
            return pl.read_delta(text)
        files = sorted(str(p) for p in path.rglob("*.parquet"))
        if not files:
            raise UserError(f"the folder '{text}' holds no .parquet file")
        return pl.read_parquet(files, hive_partitioning=True)
    if glob.has_magic(text):
        files = sorted(glob.glob(text, recursive=True))
        if not files:
            raise UserError(f"no file matches '{text}'")
        return pl.concat([_scan(name, options) for name in files])
    if not path.exists():
        raise UserError(f"'{text}' does not exist")
    if path.stat().st_size == 0:
        raise UserError(f"'{text}' is empty")
    if text.endswith(CSV_SUFFIXES):
        # The whole file decides a column's type: a first hundred integers must not turn later decimals into an error.
        return pl.read_csv(path, try_parse_dates=True, infer_schema_length=None)
    if text.endswith(".parquet"):
        return pl.read_parquet(path)
    raise UserError(f"cannot tell the form of '{text}': use .csv, .csv.gz or .parquet")


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
