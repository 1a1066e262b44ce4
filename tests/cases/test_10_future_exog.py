import numpy as np
import pytest

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.job import forecast_panel
from pipelines.forecasting.reading import Reading, read_table
from pipelines.forecasting.validation import check, check_future


def aligned(case, name):
    history = check(tables.read(case / "train.csv")).frame
    return check_future(history, tables.read(case / name), ["promo"], frequency="1h", horizon=6)


def forecast(case, name):
    train = tables.read(case / "train.csv")
    slope, level = np.polyfit(train["promo"].to_numpy(), train["y"].to_numpy(), 1)
    future, report = aligned(case, name)
    report.require()
    return slope * future["promo"].to_numpy() + level, future


def test_the_order_of_the_future_rows_does_not_matter(case):
    expected, future = forecast(case, "future_ok.csv")
    assert np.abs(expected - (3 * future["promo"].to_numpy() + 1)).mean() < 1e-3 and len(expected) == 6
    reversed_, _ = forecast(case, "future_reversed.csv")
    assert np.array_equal(expected, reversed_)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("future_missing_row.csv", r"1 rows of the next 6 steps .*'A' 1 \(first 2024-06-05 02:00:00\)"),
        ("future_nan.csv", r"covariate 'promo' are missing .*'A' 1 \(first 2024-06-05 03:00:00\)"),
        ("future_shifted.csv", r"1 rows of the next 6 steps .*'A' 1 \(first 2024-06-05 00:00:00\)"),
        ("future_renamed.csv", r"lacks the covariates 'promo' and has the unexpected 'Promo'"),
    ],
)
def test_what_does_not_line_up_is_an_error_with_its_place(case, name, message):
    _, report = aligned(case, name)
    with pytest.raises(UserError, match=message):
        report.require()


def test_a_series_without_history_is_ignored_with_a_warning(case):
    future, report = aligned(case, "future_extra_id.csv")
    assert report.ok and report.of_kind("unknown_series").series == ("Z",)
    assert future["unique_id"].unique().to_list() == ["A"] and future.height == 6


@pytest.fixture
def promoted(case):
    """A forecaster that was trained on the table, and the forecast that a file of the future gives on the way of `tethys forecast`."""
    table = read_table(str(case / "train.csv"), covariates=["promo"]).panel
    fitted = TitansForecaster(horizon=6, look_back=6, hidden=0, epochs=1, future=("promo",)).fit(table)

    def forecast_with(name):
        found = read_table(str(case / "train.csv"), Reading(future=str(case / name)), covariates=["promo"], ahead=["promo"])
        return forecast_panel(fitted, found.panel, future=found.future)

    return forecast_with


def test_a_forecaster_takes_the_future_by_id_and_stamp(promoted, case):
    expected = promoted("future_ok.csv")
    truth = 3 * tables.read(case / "future_ok.csv")["promo"].to_numpy() + 1
    # 0.012 of values between 2.3 and 4.0: what the penalties of line and effect cost where there is no noise at all.
    assert np.abs(expected["mean"].to_numpy() - truth).mean() < 0.02
    for name in ("future_reversed.csv", "future_extra_id.csv"):
        assert promoted(name).equals(expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("future_missing_row.csv", r"'A' 1 \(first 2024-06-05 02:00:00\)"),
        ("future_nan.csv", r"covariate 'promo' are missing .*'A' 1 \(first 2024-06-05 03:00:00\)"),
        ("future_shifted.csv", r"'A' 1 \(first 2024-06-05 00:00:00\)"),
        ("future_renamed.csv", r"lacks the covariates 'promo'"),
    ],
)
def test_a_forecaster_refuses_what_does_not_line_up(promoted, name, message):
    with pytest.raises(UserError, match=message):
        promoted(name)
