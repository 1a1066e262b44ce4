from datetime import datetime

import numpy as np
import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting.validation import Rules, validate
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
