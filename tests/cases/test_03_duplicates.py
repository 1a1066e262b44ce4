from datetime import datetime

import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.validation import Rules, check

CONFLICT = datetime(2024, 3, 2, 16)


def test_the_default_is_an_error_that_tells_all(case):
    report = check(tables.read(case / "train.csv")).report
    with pytest.raises(UserError, match=r"'A' 3 .*3 timestamps, 1 of them with conflicting values \(2024-03-02 16:00"):
        report.require()
    assert report.of_kind("duplicates").series == ("A",)


@pytest.mark.parametrize(("rule", "more"), [("first", 0.0), ("last", 7.0), ("mean", 3.5)])
def test_first_last_and_mean(case, rule, more):
    frame = tables.read(case / "train.csv")
    first = frame.filter((pl.col("unique_id") == "A") & (pl.col("ds") == CONFLICT))["y"][0]
    got = check(frame, Rules(duplicates=rule))
    a = got.frame.filter(pl.col("unique_id") == "A")
    assert got.report.ok and a.height == 96 and got.frame.filter(pl.col("unique_id") == "B").height == 96
    assert a.filter(pl.col("ds") == CONFLICT)["y"][0] == pytest.approx(first + more)
    if rule == "mean":
        assert check(frame.reverse(), Rules(duplicates=rule)).frame.equals(got.frame)
