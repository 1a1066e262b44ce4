"""Batch tables by URI: read into, and write from, a long polars frame (`unique_id`, `ds`, `y`, covariates).

The form is chosen by the address:

    sales.csv  sales.csv.gz  sales.parquet       local files; a folder or a glob of Parquet files
    s3://BUCKET/sales.parquet                    an S3-compatible object store: .parquet, .csv, globs, a folder ending in /
    delta://FOLDER  delta+s3://BUCKET/FOLDER     a Delta table; ?version=3 reads an older one
    postgresql://HOST[:PORT]/DATABASE#TABLE      a PostgreSQL table, or #SELECT ... to read a query

Writes are atomic: local files by rename, object stores by the one request that ends an upload, Delta and PostgreSQL by a transaction.
No address holds a secret, because addresses end in logs, run records and process lists. PostgreSQL takes the password from
PGPASSWORD or ~/.pgpass, object stores from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and so on.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import polars as pl
from filelock import FileLock

from connectors.errors import UserError

CSV_SUFFIXES = (".csv", ".csv.gz")
SEPARATORS = (";", "\t", "|", ",")
POSTGRES = ("postgresql://", "postgres://")


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

    def __post_init__(self) -> None:
        if len(self.separator.encode()) != 1:
            raise UserError(f"separator {self.separator!r} is not one character: write it as ';' or ',' or '|' or \\t")


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
    refuse_secrets(text)
    try:
        frame = _scan(text, dict(storage_options or {}), csv)
    except UserError:
        raise
    except Exception as error:  # polars, deltalake and adbc each raise their own kinds
        hint = _hint(text, csv or CsvForm(), error) if text.endswith(CSV_SUFFIXES) else ""
        raise UserError(f"cannot read '{text}': {_first_line(error)}{hint}") from error
    if text.endswith(CSV_SUFFIXES):
        _require_columns(text, frame, csv or CsvForm())
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
    replacing: Mapping[str, str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Write a table, replacing what was there; a reader sees the old table or the new one, never a part.

    replacing: column and value, which all rows to be written have; only older rows that have them too are replaced, so that a run that is
    repeated replaces its own rows. (Not on an object store: there a Delta table can.) Many frames of one schema are one table; local
    Parquet files and PostgreSQL take them one after another, so that the table need not fit into memory. A PostgreSQL table that exists
    keeps its types, indexes and rights, and must have the columns to be written. Raises UserError for an address of unknown form.
    """
    text, options = os.fspath(uri), dict(storage_options or {})
    where = dict(replacing or {})
    refuse_secrets(text)
    try:
        if text.startswith(POSTGRES):
            _write_postgres(_frames(frame), *_postgres(text), where)
        elif text.startswith(("delta://", "delta+s3://")):
            _write_delta(_whole(frame), text, where, options)
        elif text.startswith("s3://"):
            _write_object(_whole(frame), text, where, options)
        elif text.endswith((*CSV_SUFFIXES, ".parquet")) and "://" not in text:
            _write_local(frame, Path(text), where)
        else:
            raise UserError(f"cannot write '{text}': use .csv, .csv.gz, .parquet, delta://, postgresql:// or s3://")
    except UserError:
        raise
    except Exception as error:
        if "://" not in text:
            raise
        raise UserError(f"cannot write '{text}': {_first_line(error)}") from error


def _frames(frame: pl.DataFrame | Iterable[pl.DataFrame]) -> Iterable[pl.DataFrame]:
    return [frame] if isinstance(frame, pl.DataFrame) else frame


def _whole(frame: pl.DataFrame | Iterable[pl.DataFrame]) -> pl.DataFrame:
    return frame if isinstance(frame, pl.DataFrame) else pl.concat(frame)


def _write_local(frame: pl.DataFrame | Iterable[pl.DataFrame], path: Path, where: Mapping[str, str]) -> None:
    if where:
        with FileLock(f"{path}.lock"):
            if path.exists():
                new = _whole(frame)
                old = read(path)
                if path.suffix != ".parquet":  # a date that a CSV file spells is compared as it is spelt
                    old = old.with_columns(pl.read_csv(path, columns=list(where), infer_schema=False))
                if set(old.columns) != set(new.columns):
                    raise UserError(_other_columns(str(path), old.columns, new.columns))
                mine = pl.all_horizontal(pl.col(column).cast(pl.String) == value for column, value in where.items())
                # Rows of other values first to last, whatever the order of the runs.
                old = old.with_columns(pl.col(column).cast(pl.String) for column in where).filter(~mine)
                frame = pl.concat([old, new.select(old.columns).cast(old.schema)]).sort(list(where), maintain_order=True)
            _write_local(frame, path, {})
        return
    if path.suffix == ".parquet":
        if isinstance(frame, pl.DataFrame):
            _write_file(path, frame.write_parquet)
        else:
            _write_file(path, lambda name: _row_groups(frame, name))
        return
    whole = _whole(frame)
    compression: Any = "gzip" if path.suffix == ".gz" else "uncompressed"
    _write_file(path, lambda name: whole.write_csv(name, compression=compression, check_extension=False))


def _write_object(frame: pl.DataFrame, text: str, where: Mapping[str, str], options: Mapping[str, str]) -> None:
    if where:
        raise UserError(f"'{text}' is one object, of which no part can be replaced: put {{as_of}} into the address, or use delta+s3://")
    settings = _object_options(options)
    if text.endswith(".parquet"):
        frame.write_parquet(text, storage_options=settings)
    elif text.endswith(".csv"):
        frame.lazy().sink_csv(text, storage_options=settings)
    else:
        raise UserError(f"cannot write '{text}': on object stores use a name that ends in .parquet or .csv")


def _write_delta(frame: pl.DataFrame, text: str, where: Mapping[str, str], options: Mapping[str, str]) -> None:
    place, version = _delta(text)
    if version is not None:
        raise UserError(f"cannot write '{text}': an older version of a table stays as it is; leave ?version out")
    more: dict[str, Any] = {}
    if where and _is_delta(place, options):
        quoted = (f"{column} = '{value.replace(chr(39), chr(39) * 2)}'" for column, value in where.items())
        more["delta_write_options"] = {"predicate": " AND ".join(quoted)}
    frame.write_delta(place, mode="overwrite", storage_options=_object_options(options) if "://" in place else None, **more)


def _is_delta(place: str, options: Mapping[str, str]) -> bool:
    from deltalake import DeltaTable

    return bool(DeltaTable.is_deltatable(place, _object_options(options) if "://" in place else None))


def _write_postgres(frames: Iterable[pl.DataFrame], address: str, table: str, where: Mapping[str, str]) -> None:
    """One transaction: readers see the old rows until it is over, and for ever where it fails."""
    if _is_query(table):
        raise UserError("a query can be read, not written: name a table after the '#'")
    schema, _, name = table.rpartition(".")
    with _connect(address) as connection, connection.cursor() as cursor:
        present = _columns(cursor, table)
        for number, frame in enumerate(frames):
            if present is not None and set(present) != set(frame.columns):
                raise UserError(_other_columns(f"table {table}", present, frame.columns))
            if number == 0 and present is not None:
                # Two runs at once would both delete, and then both insert. Whoever reads the table goes on reading the old rows.
                cursor.execute(f"LOCK TABLE {_quoted(table)} IN SHARE ROW EXCLUSIVE MODE")
                clause = " AND ".join(f"{_quoted(column)}::text = ${i}" for i, column in enumerate(where, start=1))
                cursor.execute(f"DELETE FROM {_quoted(table)}" + (f" WHERE {clause}" if where else ""), list(where.values()) or None)
            cursor.adbc_ingest(
                name, frame.to_arrow(), mode="create" if present is None and number == 0 else "append", db_schema_name=schema or None
            )
        connection.commit()


def _read_postgres(address: str, table: str) -> pl.DataFrame:
    query = table if _is_query(table) else f"SELECT * FROM {_quoted(table)}"
    with _connect(address) as connection, connection.cursor() as cursor:
        cursor.execute(query)
        found = pl.from_arrow(cursor.fetch_arrow_table())
    assert isinstance(found, pl.DataFrame)
    return found


def _connect(address: str) -> Any:
    try:
        from adbc_driver_postgresql import dbapi
    except ModuleNotFoundError:
        raise UserError("PostgreSQL needs its driver: pip install 'tethys-streams[postgres]'") from None
    return dbapi.connect(address)


def _columns(cursor: Any, table: str) -> list[str] | None:
    """Names of the columns of a table; None where there is none."""
    cursor.execute("SELECT attname FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped", [_quoted(table)])
    return [name for (name,) in cursor.fetchall()] or None


def _quoted(table: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in table.split("."))


def _is_query(table: str) -> bool:
    return table.lstrip().lower().startswith(("select ", "with "))


def _other_columns(what: str, present: Iterable[str], wanted: Iterable[str]) -> str:
    here, there = sorted(set(present) - set(wanted)), sorted(set(wanted) - set(present))
    told = [f"it has {_names(here)} beside" if here else "", f"it lacks {_names(there)}" if there else ""]
    return f"{what} has other columns ({'; '.join(t for t in told if t)}): write to another one, or remove it first"


def refuse_secrets(uri: str) -> None:
    """Raises UserError, which does not show it, for an address with a password: it would end in logs and run records."""
    try:
        parts = urlsplit(uri.partition("#")[0])
        secret = parts.password is not None or any("pass" in name.lower() or "secret" in name.lower() for name, _ in parse_qsl(parts.query))
    except ValueError:
        raise UserError("the address of a table cannot be read: write SCHEME://[USER@]HOST[:PORT]/PATH, with a number for the port") from None
    if "://" in uri and secret:
        raise UserError(
            f"the address {parts.scheme}://... must not hold a password, because addresses end in logs: set PGPASSWORD or use ~/.pgpass for "
            "PostgreSQL, and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for an object store"
        )


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
    if text.startswith(POSTGRES):
        return _read_postgres(*_postgres(text))
    if text.startswith(("delta://", "delta+s3://")):
        place, version = _delta(text)
        return pl.read_delta(place, version=version, storage_options=_object_options(options) if "://" in place else None)
    if text.startswith("s3://"):
        settings = _object_options(options)
        if text.endswith(CSV_SUFFIXES):
            scan = pl.scan_csv(text, infer_schema=False, storage_options=settings, **_dialect(csv))
            return _typed(scan.collect(engine="in-memory"), csv or CsvForm())
        return pl.scan_parquet(text, storage_options=settings, hive_partitioning=text.endswith("/") or None).collect(engine="in-memory")
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
        return _as_spelt(frame, path)
    if text.endswith(".parquet"):
        return pl.read_parquet(path)
    raise UserError(f"cannot tell the form of '{text}': use .csv, .csv.gz or .parquet")


def _hint(text: str, form: CsvForm, error: Exception) -> str:
    """What a person may try on a CSV file that cannot be read."""
    if _begins_as_utf16(Path(text), form):
        return "; it is UTF-16: say --encoding utf-16"
    if "utf-8" in str(error).lower() or "utf8" in str(error).lower():
        return "; it is not UTF-8: say --encoding latin-1 (csv: {encoding: latin-1} in a job file), or whatever it was written in"
    other = _other_separator(Path(text), form)
    return f"; its first line is cut by {other!r}: say --separator {other!r} (csv: {{separator: {other!r}}} in a job file)" if other else ""


def _require_columns(text: str, frame: pl.DataFrame, form: CsvForm) -> None:
    """Raises UserError where the first line was not understood: one column that holds others, or two of one name."""
    if _begins_as_utf16(Path(text), form):
        raise UserError(f"'{text}' is UTF-16: say --encoding utf-16")
    if frame.width == 1 and (found := [mark for mark in SEPARATORS if mark in frame.columns[0] and mark != form.separator]):
        raise UserError(f"'{text}' has one column, {frame.columns[0]!r}: it is cut by {found[0]!r}, so say --separator {found[0]!r}")
    for name in frame.columns:
        if (twice := re.fullmatch(r"(.+)_duplicated_\d+", name)) and twice[1] in frame.columns:
            raise UserError(f"'{text}' has two columns named {twice[1]!r}: rename one, or take it out")


def _other_separator(path: Path, form: CsvForm) -> str | None:
    """What the first line of a file looks to be cut by, where that is not what it is said to be."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            line = file.readline(65_536).decode("utf-8", "replace")
    except OSError:
        return None
    return next((mark for mark in SEPARATORS if mark != form.separator and mark in line and form.separator not in line), None)


def _begins_as_utf16(path: Path, form: CsvForm) -> bool:
    if form.encoding != "utf8" or not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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


def _as_spelt(frame: pl.DataFrame, path: Path) -> pl.DataFrame:
    """The text of columns that Polars takes for more than they say: codes with leading zeros, of which numbers would make one of `00123` and
    `123`, and dates that do not begin with the year, whose day and month it would guess."""
    odd = {name: r"^\s*0\d" for name, kind in frame.schema.items() if kind.is_integer()}
    odd |= {name: r"^\s*\d{1,2}\D" for name, kind in frame.schema.items() if kind in (pl.Date, pl.Datetime)}
    if not odd:
        return frame
    texts = pl.read_csv(path, columns=list(odd), infer_schema=False)
    return frame.with_columns(texts[name] for name, spelt in odd.items() if texts[name].str.contains(spelt).any())


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
    """Address and table (or query)."""
    address, mark, table = text.partition("#")
    if not mark or not table.strip():
        raise UserError(f"name the table after a '#': {address}#my_table")
    return address, table


def _delta(text: str) -> tuple[str, int | None]:
    """Folder or s3:// address, and the version asked for."""
    place, _, query = text.removeprefix("delta+").removeprefix("delta://").partition("?")
    if not query:
        return place, None
    name, _, version = query.partition("=")
    if name != "version" or not version.isdigit():
        raise UserError(f"cannot read '{text}': write ?version=N after the address of a Delta table, or nothing")
    return place, int(version)


def _object_options(given: Mapping[str, str]) -> dict[str, str]:
    """What an object store is to be told beside the environment, which its client reads itself."""
    plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    return {**({"aws_allow_http": "true"} if plain else {}), **given}


def _names(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
