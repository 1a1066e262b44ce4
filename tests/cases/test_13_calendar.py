import numpy as np
import pytest

from connectors import tables
from pipelines.forecasting.validation import Rules, check
from pipelines.windows import panel

NEXT = {
    "month_end": ("1mo", ["2024-02-29", "2024-03-31", "2024-04-30"]),
    "week_mon": ("1w", ["2024-02-26", "2024-03-04", "2024-03-11"]),
    "business": ("1b", ["2024-04-23", "2024-04-24", "2024-04-25"]),
    "quarter": ("1q", ["2024-01-01", "2024-04-01", "2024-07-01"]),
}


def test_mixed_steps_are_an_error_that_lists_them(case):
    finding = check(tables.read(case / "train.csv")).report.of_kind("frequencies")
    assert finding.level == "error" and all(name in finding.message for name in NEXT)


@pytest.mark.parametrize("name", NEXT)
def test_each_series_goes_on_in_its_own_calendar(case, name):
    step, following = NEXT[name]
    checked = check(tables.read(case / "train.csv"), Rules(frequencies="split"))
    part = panel(checked.split()[step], frequency=step)
    assert checked.report.ok and part.ids == (name,) and part.observed.all(), "no step is taken for a gap"
    assert part.future(0, 3).astype("datetime64[D]").tolist() == np.array(following, "datetime64[D]").tolist()


def test_business_days_are_never_a_weekend(case):
    part = panel(check(tables.read(case / "train.csv"), Rules(frequencies="split")).split()["1b"], frequency="1b")
    assert np.is_busday(part.future(0, 300).astype("datetime64[D]")).all()
