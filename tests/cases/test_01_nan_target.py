from datetime import datetime

import numpy as np
import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.validation import Rules, check, validate
from tests.cases import forecasting


@pytest.fixture
def frame(case):
    return tables.read(case / "train.csv")


def test_one_error_names_every_series_with_count_and_stamp(frame):
    report = validate(frame)
    missing = report.of_kind("missing")
    assert dict(zip(missing.series, missing.counts, strict=True)) == {"mid": 5, "tail": 3, "allnan": 240, "lead": 10}
    with pytest.raises(UserError, match="missing values in y .*'mid' 5 .first 2024-01-05 04:00:00.*'tail' 3 .first 2024-01-10 21:00:00"):
        report.require()


def test_masked_values_give_finite_forecasts_and_nothing_is_made_up(frame, tmp_path):
    model = forecasting.model(tmp_path, frame)
    out, failed = forecasting.forecast(frame, model, missing="mask")
    assert set(out["unique_id"]) == {"mid", "tail", "clean", "lead"} and out.height == 4 * 12
    assert np.isfinite(forecasting.quantiles(out)).all()
    assert out.filter(unique_id="tail")["ds"].min() == datetime(2024, 1, 11), "after the last row"
    assert "last 3 rows" in validate(frame, Rules(missing="mask", empty="skip")).of_kind("missing").message
    assert failed["unique_id"].to_list() == ["allnan"], "skipped by name, never forecast as zeros"
    alone, _ = forecasting.forecast(frame.filter(pl.col("unique_id") == "clean"), model)
    np.testing.assert_allclose(forecasting.quantiles(alone), forecasting.quantiles(out.filter(unique_id="clean")), rtol=1e-6)


def test_filled_values_are_the_last_ones_and_only_the_error_stays_strict(frame, tmp_path):
    filled = check(frame, Rules(missing="fill", empty="skip")).frame
    mid = filled.filter(unique_id="mid")["y"].to_numpy()
    assert (mid[100:105] == mid[99]).all() and filled.filter(unique_id="lead")["y"][:10].null_count() == 10, "nothing before them to carry on"
    out, _ = forecasting.forecast(frame, forecasting.model(tmp_path, frame), missing="fill")
    assert set(out["unique_id"]) == {"mid", "tail", "clean", "lead"} and np.isfinite(forecasting.quantiles(out)).all()
    assert out.filter(unique_id="tail")["ds"].min() == datetime(2024, 1, 11)


def test_what_is_no_number_stops_the_training_by_name(frame):
    model = TitansForecaster(horizon=12, look_back=36, hidden=0, epochs=1)
    clean = frame.filter(unique_id="clean")
    with pytest.raises(UserError, match="series 'clean' at 2024-01-01 05:00:00 has the target inf"):
        model.fit(clean.with_columns(y=pl.when(pl.int_range(pl.len()) == 5).then(float("inf")).otherwise("y")))
    # Every value is one, and what the series shows in its own unit is not.
    row = pl.int_range(pl.len())
    wild = clean.with_columns(unique_id=pl.lit("wild"), y=pl.col("y") * pl.when(row < 150).then(1e-20).otherwise(1e25))
    with pytest.raises(UserError, match=r"windows of 1 series are no numbers in float32 \('wild'\)"):
        model.fit(pl.concat([clean, wild]))
