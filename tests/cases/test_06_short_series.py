import numpy as np
import polars as pl
import pytest

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting import job
from pipelines.forecasting.validation import Rules, validate
from tests.cases import forecasting


def test_short_series_are_counted_listed_and_forecast_with_a_flag(case, tmp_path):
    frame = tables.read(case / "train.csv")
    short = validate(frame, Rules(look_back=36, horizon=12)).of_kind("short")
    assert short.level == "note" and len(short.series) == 8 and "the 48 rows of a training window" in short.message
    model = forecasting.model(tmp_path, frame)
    out, failed = forecasting.forecast(frame, model)
    assert failed.height == 0 and out["unique_id"].n_unique() == 10 and out.height == 120
    assert np.isfinite(forecasting.quantiles(out)).all() and np.isfinite(out["mean"].to_numpy()).all()
    flagged = set(out.filter("short_history")["unique_id"])
    assert flagged == {"n1", "n2", "n5", "n11", "n12", "n13", "n24"}, "fewer rows than the look-back of 36"
    alone, _ = forecasting.forecast(frame.filter(pl.col("unique_id") == "n200"), model)
    np.testing.assert_allclose(forecasting.quantiles(alone), forecasting.quantiles(out.filter(unique_id="n200")), rtol=1e-6)


def test_no_series_long_enough_is_an_error_with_both_lengths(case):
    frame = tables.read(case / "train.csv").filter(pl.col("unique_id") != "n200").filter(pl.col("unique_id") != "n48")
    with pytest.raises(UserError, match=r"shorter than the 48 rows .*the longest, 'n47', has 47"):
        validate(frame, Rules(look_back=36, horizon=12)).require()


def test_training_says_which_series_gave_it_no_window(case, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def stop(*_):
        raise InterruptedError

    monkeypatch.setattr(job, "_border", stop)
    with pytest.raises(InterruptedError):
        job.train(str(case / "train.csv"), look_back=36, horizon=12, tracking_uri="sqlite:///t.db")
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("note: short: 8 series shorter than the 48 rows of a training window") and "'n47' 1 (first" in told
    assert told.endswith("they give no training window; they are forecast all the same")
    with pytest.raises(UserError, match=r"the longest, 'n200', has 200 .*: shorten the look-back or the horizon"):
        job.train(str(case / "train.csv"), look_back=300, horizon=12, tracking_uri="sqlite:///t.db")
