import numpy as np
import polars as pl

from connectors import tables
from pipelines.forecasting import job
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.reading import read_table
from pipelines.forecasting.validation import Vocabulary


def test_codes_with_leading_zeros_stay_text(case):
    frame = tables.read(case / "train.csv")
    assert sorted(frame["zip"].unique().to_list()) == ["00123", "00124", "123"]


def test_missing_is_a_level_and_an_unseen_one_maps_to_unknown_once(case):
    frame, new = tables.read(case / "train.csv"), tables.read(case / "predict_new_id.csv")
    words = Vocabulary.of(frame["store"])
    codes, unknown = words.encode(frame["store"])
    assert unknown == () and {c for c, id in zip(codes, frame["unique_id"], strict=True) if id == "c"} == {1}
    codes, unknown = words.encode(new["store"])
    assert set(codes) == {0} and unknown == ("east",)
    shuffled = frame.sample(frame.height, shuffle=True, seed=3)
    assert Vocabulary.of(shuffled["store"]) == words == Vocabulary.from_json(words.to_json())


def test_a_forecaster_keeps_its_levels_and_forecasts_a_new_series(case, tmp_path, capsys):
    names = {"static": ("store", "zip"), "future": ("dow",)}
    table = read_table(str(case / "train.csv"), covariates=["store", "zip", "dow"]).panel
    model = TitansForecaster(horizon=6, look_back=12, hidden=0, epochs=1, **names).fit(table)
    store, code = model.encoder_.static
    assert (store.levels, code.levels) == (("north", "south"), ("00123", "00124", "123")), "texts, never standardised as numbers"
    model.save(tmp_path)
    loaded = TitansForecaster.load(tmp_path)
    assert loaded.encoder_ == model.encoder_

    new = tables.read(case / "predict_new_id.csv").with_columns(zip=pl.col("zip").cast(pl.String))
    last = pl.col("ds") > pl.col("ds").max() - pl.duration(hours=6)
    path = tmp_path / "new.parquet"
    new.with_columns(y=pl.when(last).then(None).otherwise("y")).write_parquet(path)
    found = read_table(str(path), covariates=["store", "zip", "dow"], ahead=["dow"])
    capsys.readouterr()
    job._tell_unknown(loaded, found)
    told = capsys.readouterr().err.splitlines()
    assert "covariate 'store' holds 1 levels that the model does not know, taken as unknown: 'east'" in told and len(told) == len(set(told))
    out = job.forecast_panel(loaded, found.panel, future=found.future)
    truth = new.filter(last)["y"].to_numpy()
    assert np.abs(out["mean"].to_numpy() - truth).mean() < np.abs(truth - truth.mean()).mean(), "better than a level, of a store never seen"
