"""The report on a table: each kind of trouble is found with its series, stamp and count, and each rule does what it says."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.validation import Rules, Vocabulary, check, validate
from pipelines.windows import panel

START = datetime(2026, 1, 1)


def hourly(name="a", rows=48, start=START, step=timedelta(hours=1)):
    stamps = [start + i * step for i in range(rows)]
    y = 10 + np.sin(np.arange(rows) / 3.8) + np.random.default_rng(0).normal(0, 0.1, rows)
    return pl.DataFrame({"unique_id": [name] * rows, "ds": stamps, "y": y})


def kinds(report, level=None):
    return {f.kind for f in report.findings if level is None or f.level == level}


def test_a_clean_table_has_no_finding_and_the_callers_frame_stays():
    frame = pl.concat([hourly("b"), hourly("a")])
    before = frame.clone()
    checked = check(frame)
    assert checked.report.findings == () and checked.report.ok
    assert checked.report.frequencies == {"1h": 2} and checked.report.series == 2
    assert checked.frame.equals(frame.sort("unique_id", "ds")) and frame.equals(before)


def test_strict_by_default_and_every_error_at_once():
    frame = hourly().with_row_index()
    frame = frame.with_columns(pl.when(pl.col("index") == 5).then(None).otherwise(pl.col("y")).alias("y"))
    frame = pl.concat([frame.filter(pl.col("index") != 9), frame[20:21], frame[30:31].with_columns(y=pl.lit(float("inf")))])
    report = validate(frame.drop("index"))
    assert kinds(report, "error") == {"missing", "gaps", "duplicates", "infinite"}
    with pytest.raises(UserError, match=r"1 missing steps .*'a' 1 \(first 2026-01-01 09:00:00, 1 runs, longest 1"):
        report.require()
    assert report.failed == {"a"}


@pytest.mark.parametrize(
    ("rule", "expected"), [("first", 1.0), ("last", 9.0), ("mean", 5.0), ("sum", 10.0)]
)
def test_duplicates(rule, expected):
    frame = pl.concat([hourly(), hourly()[3:4].with_columns(y=pl.lit(9.0))])
    frame = frame.with_columns(y=pl.when((pl.col("ds") == START + timedelta(hours=3)) & (pl.col("y") != 9)).then(1.0).otherwise("y"))
    frame = pl.concat([frame, hourly("b")])
    got = check(frame, Rules(duplicates=rule))
    assert got.report.ok and got.report.of_kind("duplicates").series == ("a",)
    a = got.frame.filter(unique_id="a")
    assert a.height == 48 and a["y"][3] == expected
    assert got.frame.filter(unique_id="b").height == 48


def test_gaps_are_masked_by_absence_or_filled_looking_back_only():
    frame = hourly()[[i for i in range(48) if i not in (10, 11, 30)]]
    masked = check(frame, Rules(gaps="mask"))
    assert masked.frame.height == 45 and masked.report.ok
    p = panel(masked.frame)
    assert p.observed.sum() == 45 and len(p.y) == 48
    filled = check(frame, Rules(gaps="fill"))
    assert filled.frame.height == 48 and filled.frame["y"][10] == filled.frame["y"][11] == frame["y"][9]
    assert filled.report.of_kind("gaps").counts == (3,)


def test_missing_values_masked_filled_and_a_series_without_any():
    frame = hourly(rows=24).with_columns(y=pl.when(pl.int_range(pl.len()) < 2).then(float("nan")).otherwise("y"))
    frame = frame.with_columns(y=pl.when(pl.int_range(pl.len()) == 23).then(None).otherwise("y"))
    empty = hourly("e", 24).with_columns(y=pl.lit(None, pl.Float64))
    report = validate(pl.concat([frame, empty]))
    assert report.of_kind("missing").counts == (3, 24) and "the last 1 rows" in report.of_kind("missing").message
    assert report.of_kind("empty_series").series == ("e",) and not report.ok
    got = check(pl.concat([frame, empty]), Rules(missing="fill", empty="skip"))
    assert got.report.ok and got.frame["unique_id"].unique().to_list() == ["a"]
    assert got.frame["y"].null_count() == 2, "nothing lies before the first value to fill it with"
    assert got.frame["y"][23] == got.frame["y"][22]


def test_sentinels_are_asked_about_and_become_missing_only_when_listed():
    frame = hourly().with_columns(y=pl.when(pl.int_range(pl.len()) == 7).then(-9999.0).otherwise("y"))
    report = validate(frame)
    (found,) = report.findings
    assert found.kind == "sentinel" and found.level == "warning" and "-9999" in found.message and "median" in found.message
    listed = check(frame, Rules(na_values=(-9999.0,), missing="mask"))
    assert listed.frame["y"][7] is None and kinds(listed.report) == {"na_values", "missing"}


def test_unsorted_rows_are_sorted_and_told_or_refused():
    frame = hourly().sample(48, shuffle=True, seed=1)
    got = check(frame)
    assert got.report.of_kind("unsorted").level == "note" and got.frame.equals(hourly())
    assert not validate(frame, Rules(unsorted="error")).ok


def test_mixed_steps_are_an_error_that_lists_them_or_each_its_own():
    frame = pl.concat([hourly("h1"), hourly("h2"), hourly("d", 20, step=timedelta(days=1))])
    report = validate(frame)
    assert report.of_kind("frequencies").series == ("d",) and "1d: 'd'; 1h: 'h1', 'h2'" in report.of_kind("frequencies").message
    parts = check(frame, Rules(frequencies="split")).split()
    assert {step: part["unique_id"].n_unique() for step, part in parts.items()} == {"1d": 1, "1h": 2}
    stated = validate(frame, Rules(frequency="1h", gaps="mask"))
    assert stated.failed == {"d"}, "daily rows in an hourly table are no hourly series with gaps"


def test_rows_between_the_steps():
    odd = hourly().with_columns(ds=pl.when(pl.int_range(pl.len()) == 4).then(START + timedelta(hours=4, minutes=7)).otherwise("ds"))
    report = validate(odd, Rules(frequency="1h"))
    assert report.of_kind("off_grid").counts == (1,) and "2026-01-01 04:07:00" in report.of_kind("off_grid").message
    got = check(odd, Rules(frequency="1h", off_grid="drop", gaps="mask"))
    assert got.report.ok and got.frame.height == 47


def test_constant_and_short_series_are_notes_and_no_long_one_an_error():
    frame = pl.concat([hourly("long", 60), hourly("short", 10).with_columns(y=pl.lit(3.0))])
    report = validate(frame, Rules(look_back=36, horizon=12))
    assert report.ok and report.of_kind("constant").series == ("short",)
    assert "'short' 1 (first 2026-01-01 00:00:00, 10 rows)" in report.of_kind("short").message
    report = validate(frame, Rules(look_back=100, horizon=12))
    with pytest.raises(UserError, match=r"shorter than the 112 rows .*the longest, 'long', has 60"):
        report.require()


BERLIN = ZoneInfo("Europe/Berlin")


def wall(start, hours):
    """Wall-clock times of Berlin, hour after hour."""
    first = start.replace(tzinfo=BERLIN).astimezone(UTC)
    return [(first + timedelta(hours=i)).astimezone(BERLIN).replace(tzinfo=None) for i in range(hours)]


@pytest.mark.parametrize(("start", "note"), [(datetime(2026, 3, 28), None), (datetime(2026, 10, 24), "ambiguous")])
def test_wall_clock_through_both_changes(start, note):
    frame = pl.DataFrame({"unique_id": "a", "ds": wall(start, 72), "y": np.arange(72.0)})
    strict = validate(frame, Rules(zone="Europe/Berlin"))
    assert kinds(strict, "error") == ({note} if note else set())
    got = check(frame, Rules(zone="Europe/Berlin", ambiguous="order"))
    assert got.report.ok and kinds(got.report) == ({note} if note else set())
    utc = got.frame["ds"].to_list()
    assert utc == [utc[0] + timedelta(hours=i) for i in range(72)] and got.frame["y"].to_list() == list(range(72))
    assert utc[0].replace(tzinfo=UTC) == start.replace(tzinfo=BERLIN).astimezone(UTC)
    if note:
        assert strict.of_kind("ambiguous").counts == (2,) and "2026-10-25 02:00:00" in strict.of_kind("ambiguous").message


def test_an_hour_that_never_was():
    stamps = [datetime(2026, 3, 29, h) for h in range(6)]
    frame = pl.DataFrame({"unique_id": "a", "ds": stamps, "y": np.arange(6.0)})
    report = validate(frame, Rules(zone="Europe/Berlin"))
    assert report.of_kind("nonexistent").stamps == ("2026-03-29 02:00:00",)
    got = check(frame, Rules(zone="Europe/Berlin", nonexistent="drop"))
    assert got.report.ok and got.frame["y"].to_list() == [0, 1, 3, 4, 5]


def test_aware_stamps_daily_rows_keep_the_wall_clock():
    days = [datetime(2026, 3, 25, tzinfo=BERLIN) + timedelta(days=i) for i in range(10)]
    frame = pl.DataFrame({"unique_id": "a", "ds": pl.Series(days).cast(pl.Datetime("us", "Europe/Berlin")), "y": np.arange(10.0)})
    got = check(frame)
    assert got.report.findings == () and got.report.zone == "Europe/Berlin" and got.report.frequencies == {"1d": 1}
    assert got.frame["ds"].to_list() == [d.replace(tzinfo=None) for d in days]


def test_texts_with_the_two_offsets_of_one_zone():
    aware = [d.replace(tzinfo=UTC).astimezone(BERLIN) for d in (datetime(2026, 3, 28, 22) + timedelta(hours=i) for i in range(6))]
    frame = pl.DataFrame({"unique_id": "a", "ds": [d.isoformat() for d in aware], "y": np.arange(6.0)})
    got = check(frame, Rules(zone="Europe/Berlin"))
    assert got.report.ok and got.report.findings == ()
    assert [d.replace(tzinfo=UTC) for d in got.frame["ds"]] == aware


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin"])
def test_stamps_that_are_somebodys_wall_clock_are_recognised(zone):
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    local = [(begin + timedelta(hours=i)).astimezone(ZoneInfo(zone)).replace(tzinfo=None) for i in range(24 * 330)]
    frame = pl.DataFrame({"unique_id": "a", "ds": local, "y": np.random.default_rng(0).normal(size=len(local))})
    report = validate(frame)
    assert kinds(report, "error") == {"gaps", "duplicates"}
    assert f"state the zone (zone: {zone})" in report.of_kind("calendar").remedy
    assert validate(frame, Rules(zone=zone, ambiguous="order")).ok


def test_business_days_numbered_as_if_every_day_were_one():
    rows = 400
    shape = np.array([5.0, 1, 0, 1, 3])[np.arange(rows) % 5] + np.random.default_rng(0).normal(0, 0.5, rows)
    false = hourly(rows=rows, step=timedelta(days=1)).with_columns(y=pl.Series(shape))
    assert validate(false).of_kind("calendar").level == "warning"
    week = np.array([5.0, 1, 0, 1, 3, 9, 9])[np.arange(rows) % 7]
    true = false.with_columns(y=pl.Series(week))
    walk = false.with_columns(y=pl.Series(np.random.default_rng(1).normal(size=rows).cumsum()))
    assert validate(true).ok and "calendar" not in kinds(validate(true)) | kinds(validate(walk))


def test_rows_without_a_key_and_rows_without_anything():
    frame = pl.concat([hourly(), pl.DataFrame({"unique_id": [None, None], "ds": [None, START], "y": [None, 1.0]}, schema=hourly().schema)])
    report = validate(frame.with_columns(note=pl.lit(None)))
    assert report.of_kind("empty_rows").total == 1 and report.of_kind("empty_columns").total == 1
    assert report.of_kind("no_key").level == "error"


def test_what_cannot_be_looked_at_is_refused_with_its_reason():
    with pytest.raises(UserError, match="no column 'y'; it has"):
        validate(hourly().drop("y"))
    with pytest.raises(UserError, match="not a number .*'M'"):
        validate(hourly().with_columns(y=pl.lit("M")))
    with pytest.raises(UserError, match="unknown zone 'Europe/Atlantis'"):
        validate(hourly(), Rules(zone="Europe/Atlantis"))


def test_a_vocabulary_has_codes_for_unknown_and_missing_and_does_not_see_the_order():
    words = Vocabulary.of(["south", "north", None, "south"])
    assert words == Vocabulary.of(["north", "south"]) == Vocabulary.from_json(words.to_json())
    codes, unknown = words.encode(pl.Series(["north", None, "east", "east"]))
    assert codes.tolist() == [2, 1, 0, 0] and unknown == ("east",) and len(words) == 4


def test_the_command_prints_the_report_and_its_status_tells(tmp_path):
    import typer

    from pipelines.forecasting import commands

    app = typer.Typer()
    app.command()(commands.validate)
    tables.write(hourly(), tmp_path / "good.parquet")
    tables.write(hourly()[[0, 1, 2, 5, 6, 7]], tmp_path / "bad.parquet")
    good, bad = (CliRunner().invoke(app, [str(tmp_path / name)]) for name in ("good.parquet", "bad.parquet"))
    assert good.exit_code == 0 and "48 rows, 1 series (1 at 1h)" in good.output
    assert bad.exit_code == 2 and "2 missing steps" in bad.output
    assert CliRunner().invoke(app, [str(tmp_path / "bad.parquet"), "--gaps", "mask"]).exit_code == 0
