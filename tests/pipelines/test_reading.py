"""The door that every job reads its table through: strict unless told otherwise, in any dialect, long or wide."""

from __future__ import annotations

import dataclasses
import warnings
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from connectors import tables
from connectors.errors import UserError
from pipelines import cli
from pipelines.forecasting import job
from pipelines.forecasting.reading import Reading, read_table
from pipelines.forecasting.validation import Rules, check, validate
from pipelines.windows import panel

START = datetime(2024, 1, 1)


def hourly(rows: int = 200, name: str = "a") -> pl.DataFrame:
    y = 10 + np.sin(np.arange(rows) * 2 * np.pi / 24) + np.random.default_rng(0).normal(0, 0.1, rows)
    return pl.DataFrame({"unique_id": name, "ds": [START + timedelta(hours=h) for h in range(rows)], "y": y})


def test_wide_tables_in_another_dialect_are_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("tag;a;b\n01.01.2024;1,5;-\n02.01.2024;2,5;4\n04.01.2024;3,5;5\n")
    form = tables.CsvForm(separator=";", decimal_comma=True, missing=("", "-"), time_format="%d.%m.%Y")
    reading = Reading(csv=form, wide=True)
    with pytest.raises(UserError, match=r"missing values in y .*missing steps"):
        read_table(str(path), reading, time_column="tag", frequency="1d")
    masked = dataclasses.replace(reading, rules=Rules(missing="mask", gaps="mask"))
    table = read_table(str(path), masked, time_column="tag", frequency="1d").panel
    assert table.ids == ("a", "b")
    np.testing.assert_array_equal(table.y, [1.5, 2.5, np.nan, 3.5, np.nan, 4, np.nan, 5])
    hourly().write_parquet(tmp_path / "long.parquet")
    with pytest.raises(UserError, match="a column a series, and column 'unique_id' is no number"):
        read_table(str(tmp_path / "long.parquet"), Reading(wide=True))
    with pytest.raises(UserError, match="a wide table has no room for the covariates 'promo'"):
        read_table(str(path), masked, time_column="tag", covariates=["promo"])


@pytest.mark.parametrize(
    ("spoil", "option", "message"),
    [
        (lambda f: f.filter(pl.col("ds") != START + timedelta(hours=30)), ["--gaps", "mask"], "1 missing steps in 1 of 1 series: 'a' 1"),
        (lambda f: f.with_columns(y=pl.when(pl.col("ds") == START).then(None).otherwise("y")), ["--missing", "mask"], "1 missing values in y"),
        (lambda f: pl.concat([f, f.tail(1)]), ["--duplicates", "last"], "1 duplicate rows"),
        (lambda f: f.with_columns(y=pl.when(pl.col("ds") == START).then(float("inf")).otherwise("y")), ["--infinite", "mask"], "1 infinite values"),
        (lambda f: f.with_columns(y=pl.when(pl.col("ds") == START).then(-999.0).otherwise("y")), ["--na-value", "-999", "--missing", "fill"], None),
    ],
    ids=["gap", "missing", "duplicate", "infinite", "sentinel"],
)  # fmt: skip
def test_the_commands_refuse_what_validate_refuses_and_take_the_same_options(spoil, option, message, tmp_path, monkeypatch) -> None:
    """As far as the table: what the jobs do with it has its own tests."""

    class Read(Exception):
        pass

    def stop(*_: object) -> None:
        raise Read

    data = tmp_path / "t.parquet"
    spoil(hourly()).write_parquet(data)
    monkeypatch.setattr(job, "_border", stop)
    monkeypatch.setattr(job, "_registered", stop)
    train = ["train", str(data), "--frequency", "1h", "--tracking-uri", f"sqlite:///{tmp_path}/t.db"]
    shown = CliRunner().invoke(cli.app, ["validate", str(data), *option])
    assert shown.exit_code == 0, shown.output
    assert isinstance(CliRunner().invoke(cli.app, [*train, *option]).exception, Read)
    if message is not None:
        refused = CliRunner().invoke(cli.app, train)
        assert isinstance(refused.exception, UserError) and message in str(refused.exception)
    for command in ("backtest", "forecast", "forecast missing-future"):
        done = CliRunner().invoke(cli.app, [*command.split(), str(data), *option, "--separator", ";", "--decimal-comma", "--missing-text", "-"])
        assert isinstance(done.exception, Read), f"{command} takes them too"


def test_infinity_is_told_once() -> None:
    frame = hourly().with_columns(y=pl.when(pl.col("ds") == START).then(float("inf")).otherwise("y"))
    report = validate(frame)
    assert [f.kind for f in report.findings] == ["infinite"]
    both = frame.with_columns(y=pl.when(pl.col("ds") == START + timedelta(hours=1)).then(None).otherwise("y"))
    assert {f.kind: f.total for f in validate(both).findings} == {"infinite": 1, "missing": 1}


def test_values_that_float32_cannot_hold_are_told_with_id_and_time_or_masked() -> None:
    frame = hourly().with_columns(y=pl.when(pl.col("ds") == START + timedelta(hours=7)).then(-1e300).otherwise("y"))
    report = validate(frame)
    with pytest.raises(UserError, match=r"1 values beyond 1e\+30, .*'a' 1 \(first 2024-01-01 07:00:00\): correct them"):
        report.require()
    assert [f.kind for f in report.findings] == ["out_of_range"]
    masked = check(frame, Rules(infinite="mask"))
    assert masked.report.ok and masked.frame["y"].null_count() == 1
    assert validate(hourly().with_columns(pl.col("y") * 1e28)).ok


def test_stamps_with_the_day_in_front_are_no_stamps_until_their_form_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("unique_id,ds,y\na,01/02/2024,1\na,02/02/2024,2\na,03/02/2024,3\n")
    with pytest.raises(UserError, match=r"holds '01/02/2024', not a time stamp .*--time-format %d/%m/%Y"):
        read_table(str(tmp_path / "t.csv"))
    with pytest.raises(UserError, match="holds '01/02/2024', not a time stamp"):
        panel(pl.read_csv(tmp_path / "t.csv"))
    for form, step in (("%d/%m/%Y", "1d"), ("%m/%d/%Y", "1mo")):
        assert read_table(str(tmp_path / "t.csv"), Reading(csv=tables.CsvForm(time_format=form))).panel.frequency == step


def test_a_table_of_the_future_that_nothing_reads_is_a_mistake(tmp_path: Path) -> None:
    data = tmp_path / "t.parquet"
    hourly().write_parquet(data)
    with pytest.raises(UserError, match=r"no covariate is to be known ahead here, and .*f\.csv is given"):
        read_table(str(data), Reading(future=str(tmp_path / "f.csv")))
    shown = CliRunner().invoke(cli.app, ["validate", str(data), "--future-table", "f.csv"])
    assert isinstance(shown.exception, UserError) and "leave --future-table out" in str(shown.exception)


def test_a_plot_of_names_in_any_script_warns_of_nothing(tmp_path: Path) -> None:
    frame = hourly(60, "\u5e97\u8217 caf\u00e9 \U0001f600")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forecast = frame.tail(12).select("unique_id", "ds", mean="y")
        job._plot(panel(frame), forecast, 12, 24).savefig(tmp_path / "p.png")


def test_one_alias_serves_all_commands() -> None:
    """Every command that takes a registered version takes the same one, unless told otherwise."""
    from typer.main import get_command

    from pipelines import DEFAULT_VERSION

    group = get_command(cli.app)
    forecast = group.commands["forecast"].commands  # type: ignore[attr-defined]
    asked = [*(group.commands[name] for name in ("backtest", "stream")), forecast["table"], forecast["missing-future"]]  # type: ignore[attr-defined]
    assert {option.default for command in asked for option in command.params if option.name == "version"} == {DEFAULT_VERSION}


@pytest.mark.parametrize(("names", "said"), [(("y",), "'y' is the id, the time or the target"), (("p", "p"), "'p' is named twice")])
def test_a_covariate_that_is_the_target_or_named_twice_is_a_mistake(tmp_path, names, said):
    path = tmp_path / "t.parquet"
    hourly().with_columns(p=1.0).write_parquet(path)
    with pytest.raises(UserError, match=said):
        read_table(str(path), covariates=names)


def test_an_output_folder_that_is_a_file_is_said_before_the_work(tmp_path):
    (taken := tmp_path / "t.csv").touch()
    with pytest.raises(UserError, match="is a file: name a folder"):
        job.train("nothing.csv", output=taken)
    with pytest.raises(UserError, match="is a file: name a folder"):
        job.backtest("nothing.csv", output=taken)
