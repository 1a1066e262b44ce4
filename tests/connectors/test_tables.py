import gzip
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError

FRAME = pl.DataFrame(
    {"unique_id": ["a", "a", "b"], "ds": [datetime(2024, 1, 1, h) for h in (0, 1, 0)], "y": [1.0, 2.5, None]}
)


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    tables.write(FRAME, tmp_path / name)
    assert tables.read(tmp_path / name).equals(FRAME)
    assert [p.name for p in tmp_path.iterdir()] == [name], "no temporary file stays"


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_many_frames_are_one_table(tmp_path: Path, name: str) -> None:
    tables.write((FRAME[i : i + 1] for i in range(3)), tmp_path / name)
    assert tables.read(tmp_path / name).equals(FRAME)

    def torn():
        yield FRAME
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError):
        tables.write(torn(), tmp_path / name)
    assert tables.read(tmp_path / name).equals(FRAME) and [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
def test_a_run_that_is_repeated_replaces_its_own_rows(tmp_path: Path, name: str) -> None:
    for as_of, value in (("2024-01-02T06:00", 1.0), ("2024-01-01", 2.0), ("2024-01-02T06:00", 3.0)):
        frame = FRAME.with_columns(y=pl.lit(value), as_of=pl.lit(as_of))
        tables.write(iter([frame[:1], frame[1:]]), tmp_path / name, replacing={"as_of": as_of})
    found = tables.read(tmp_path / name)
    assert found["y"].to_list() == [2.0] * 3 + [3.0] * 3 and found.columns == [*FRAME.columns, "as_of"]
    with pytest.raises(UserError, match=r"has other columns \(it lacks 'z'\)"):
        tables.write(frame.with_columns(z=1), tmp_path / name, replacing={"as_of": "2024-01-01"})


def test_gzip_is_really_gzip(tmp_path: Path) -> None:
    tables.write(FRAME, tmp_path / "t.csv.gz")
    assert gzip.decompress((tmp_path / "t.csv.gz").read_bytes()).startswith(b"unique_id,ds,y\n")


def test_folder_and_glob_of_parquet(tmp_path: Path) -> None:
    tables.write(FRAME.head(2), tmp_path / "part-0.parquet")
    tables.write(FRAME.tail(1), tmp_path / "part-1.parquet")
    assert tables.read(tmp_path).equals(FRAME)
    assert tables.read(str(tmp_path / "part-*.parquet")).equals(FRAME)


def test_columns_are_renamed_and_a_shadowed_one_gives_way(tmp_path: Path) -> None:
    frame = pl.DataFrame({"date": ["2024-01-01 00:00:00"], "OT": [3.0], "y": [9.0]})
    tables.write(frame, tmp_path / "t.csv")
    read = tables.read(tmp_path / "t.csv", {"ds": "date", "y": "OT"})
    assert read["y"].to_list() == [3.0] and read["ds"].dtype == pl.Datetime


def test_a_failed_write_leaves_the_old_table(tmp_path: Path) -> None:
    tables.write(FRAME, tmp_path / "t.csv")
    nested = pl.DataFrame({"x": [[1, 2]]})  # CSV cannot hold lists
    with pytest.raises(pl.exceptions.ComputeError):
        tables.write(nested, tmp_path / "t.csv")
    assert tables.read(tmp_path / "t.csv").equals(FRAME)
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]


def test_integers_then_decimals_in_one_column(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("y\n" + "1\n" * 500 + "1.5\n")
    assert tables.read(tmp_path / "t.csv")["y"].dtype == pl.Float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text(""), "is empty"),
        (lambda p: p.write_text("unique_id,ds\n"), "no column 'y'; it has 'unique_id', 'ds'"),
        (lambda p: p.write_text("unique_id,ds,y\n"), "has no rows"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "t.csv")
    with pytest.raises(UserError, match=message) as caught:
        tables.read(tmp_path / "t.csv", required=("unique_id", "ds", "y"))
    assert "\n" not in str(caught.value)


def test_unknown_forms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_text("x")
    with pytest.raises(UserError, match="cannot tell the form"):
        tables.read(tmp_path / "t.xlsx")
    with pytest.raises(UserError, match="cannot write"):
        tables.write(FRAME, tmp_path / "t.xlsx")
    with pytest.raises(UserError, match=r"folder .* does not exist"):
        tables.write(FRAME, tmp_path / "nowhere" / "t.csv")
    with pytest.raises(UserError, match="cannot read"):
        tables.read("postgresql://127.0.0.1:1/db#t")
    with pytest.raises(UserError, match="name the table"):
        tables.read("postgresql://127.0.0.1:1/db")


def test_a_folder_with_a_file_that_is_no_parquet_names_the_file(tmp_path: Path) -> None:
    pl.DataFrame({"y": [1.0]}).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("unique_id,ds,y\n")
    with pytest.raises(UserError, match=r"b\.parquet' is no Parquet file"):
        tables.read(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"unique_id;ds;y\na;2024-01-01;1\n", "it is cut by ';', so say --separator ';'"),
        (b"unique_id;ds;y\na;2024-01-01;1,5\n", "its first line is cut by ';': say --separator ';'"),
        (b"unique_id\tds\ty\na\t2024-01-01\t1\n", r"say --separator '\\t'"),
        (b"unique_id,ds,y\nK\xf6ln,2024-01-01,1\n", "it is not UTF-8: say --encoding latin-1"),
        (b"unique_id,ds,y,y\na,2024-01-01,1,2\n", "has two columns named 'y': rename one, or take it out"),
    ],
    ids=["semicolons", "decimal commas", "tabs", "latin-1", "twice"],
)
def test_a_csv_file_of_another_dialect_is_told_with_what_to_say(tmp_path: Path, data: bytes, message: str, suffix: str) -> None:
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(gzip.compress(data) if suffix == "csv.gz" else data)
    with pytest.raises(UserError, match=message):
        tables.read(path)


def test_a_file_in_another_encoding_is_read_when_it_is_named(tmp_path: Path) -> None:
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "t.csv").write_bytes("unique_id,ds,y\nKöln,2024-01-01,1.5\n".encode(encoding))
        with pytest.raises(UserError, match=f"say --encoding {encoding}"):
            tables.read(tmp_path / "t.csv")
        assert tables.read(tmp_path / "t.csv", csv=tables.CsvForm(encoding=encoding))["unique_id"].to_list() == ["Köln"]
    with pytest.raises(UserError, match="unknown encoding: klingon"):
        tables.read(tmp_path / "t.csv", csv=tables.CsvForm(encoding="klingon"))
    with pytest.raises(UserError, match="separator ';;' is not one character"):
        tables.CsvForm(separator=";;")


def test_day_and_month_are_never_guessed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("unique_id,ds,when\na,01/02/2024,2024/02/01\na,02/02/2024,2024/02/02\n")
    frame = tables.read(tmp_path / "t.csv")
    assert frame.schema["ds"] == pl.String and frame["ds"][0] == "01/02/2024"
    assert frame.schema["when"] == pl.Date, "a year in front leaves nothing to guess"
