from datetime import datetime

import polars as pl

from connectors import tables
from pipelines.forecasting.validation import Rules, check

FORM = tables.CsvForm(
    separator=";",
    decimal_comma=True,
    time_columns=("Date", "Time"),
    time_format="%d/%m/%Y %H.%M.%S",
    missing=("", "NA", "None", "null", "M"),
)


def test_european_file(case):
    frame = tables.read(case / "train.csv", csv=FORM)
    checked = check(frame, Rules(missing="mask", infinite="mask"), id_column=None)
    report, rows = checked.report, checked.frame
    assert rows.height == 48 and report.of_kind("empty_rows").total == 2 and report.of_kind("empty_columns").total == 2
    assert rows["ds"][0] == datetime(2004, 3, 10, 18), "10/03/2004 is the tenth of March"
    assert report.of_kind("missing").total == 5 and rows["y"].null_count() == 6, "M, NA, None, empty and null"
    assert report.of_kind("infinite").total == 1, "told once, and not as missing again"
    assert 1234.5 in rows["y"].to_list()
    sentinel = report.of_kind("sentinel")
    assert sentinel.level == "warning" and "-9999" in sentinel.message and "-200" in sentinel.message
    assert {-200.0, -9999.0} < set(rows["y"]), "nobody said that they stand for missing values"


def test_codes_are_missing_when_listed_and_infinity_is_an_error_unless_masked(case):
    frame = tables.read(case / "train.csv", csv=FORM)
    listed = check(frame, Rules(missing="mask", infinite="mask", na_values=(-200, -9999)), id_column=None)
    assert listed.report.ok and listed.report.of_kind("sentinel") is None and listed.frame["y"].null_count() == 8
    strict = check(frame, id_column=None).report
    assert strict.of_kind("infinite").level == "error"
    assert check(frame, Rules(infinite="mask"), id_column=None).frame.filter(pl.col("y").is_infinite()).height == 0
