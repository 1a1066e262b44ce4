"""Estimator, backtest and jobs: memories that go on learning, nothing seen too early, honest baselines in every table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.base import clone

from connectors.errors import UserError
from pipelines import tracking
from pipelines.forecasting import backtest as rolling
from pipelines.forecasting import job
from pipelines.forecasting.baselines import Ets, LastValue, Ridge, RidgeCarried, SeasonalNaive, profile
from pipelines.forecasting.calendar import default_seasons, phases, steps
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.forecasting.sample import hourly_load
from pipelines.windows import panel
from titans_core.state import leaves

LOOK_BACK, HORIZON = 24, 12


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return hourly_load(series=3, days=40)


@pytest.fixture(scope="module")
def fitted(frame: pl.DataFrame) -> TitansForecaster:
    return small().fit(frame)


def small(**options: object) -> TitansForecaster:
    return TitansForecaster(**{"horizon": HORIZON, "look_back": LOOK_BACK, "hidden": 16, "epochs": 2, **options})  # type: ignore[arg-type]


def test_follows_the_conventions_of_scikit_learn(fitted: TitansForecaster) -> None:
    fresh = clone(fitted)
    assert fresh.get_params() == fitted.get_params()
    assert not hasattr(fresh, "forecaster_")
    assert fresh.set_params(horizon=5).horizon == 5
    with pytest.raises(UserError, match="not fitted"):
        fresh.predict()


def test_predict_continues_every_series(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    out = fitted.predict()
    assert out.height == 3 * HORIZON
    assert out["ds"].min() == frame["ds"].max() + (frame["ds"][1] - frame["ds"][0])
    levels = out.select(pl.col("^q.*$")).to_numpy()
    assert np.isfinite(levels).all() and (np.diff(levels, axis=1) >= 0).all()
    # A frame read by fresh memories ends where fit left the memories of the same rows.
    again = fitted.predict(frame)
    np.testing.assert_allclose(again["mean"], out["mean"], rtol=1e-5)


def test_update_equals_one_pass_and_trains_nothing(
    fitted: TitansForecaster, frame: pl.DataFrame, tmp_path: Path
) -> None:
    border = frame["ds"].unique().sort()[700]
    fitted.save(tmp_path)
    streamed = TitansForecaster.load(tmp_path)
    weights = {k: v.clone() for k, v in streamed.forecaster_.state_dict().items()}
    streamed.ids_, streamed.last_ds_, streamed.state_ = (), np.array([]), streamed.forecaster_.initial_state(0)
    streamed.update(frame.filter(pl.col("ds") < border)).update(frame.filter(pl.col("ds") >= border))
    for (path, a), (_, b) in zip(leaves(streamed.state_), leaves(fitted.state_), strict=True):
        np.testing.assert_allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5, err_msg=path)
    assert all((weights[k] == v).all() for k, v in streamed.forecaster_.state_dict().items())
    with pytest.raises(UserError, match="later rows"):
        streamed.update(frame.tail(1))


def test_save_and_load_give_the_same_forecasts(fitted: TitansForecaster, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    assert TitansForecaster.load(tmp_path).predict().equals(fitted.predict())
    with pytest.raises(UserError, match=r"config\.json|weights"):
        TitansForecaster.load(tmp_path / "nowhere")


def test_the_backtest_knows_nothing_later_than_its_origin(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    out = fitted.backtest(frame, origins=3)
    origin = out["origin"].min()
    spoilt = frame.with_columns(pl.when(pl.col("ds") > origin).then(1e6).otherwise(pl.col("y")).alias("y"))
    a = out.filter(pl.col("origin") == origin)["mean"]
    b = fitted.backtest(spoilt, origins=3).filter(pl.col("origin") == origin)["mean"]
    np.testing.assert_allclose(a, b, rtol=1e-9)
    # And it is what predict says for the rows up to the origin.
    direct = fitted.predict(frame.filter(pl.col("ds") <= origin))
    np.testing.assert_allclose(direct["mean"], a, rtol=1e-4)


def test_missing_values_are_learnt_around(frame: pl.DataFrame) -> None:
    rng = np.random.default_rng(0)
    holes = frame.with_columns(pl.Series("y", np.where(rng.random(frame.height) < 0.2, np.nan, frame["y"].to_numpy())))
    out = small().fit(holes).predict()
    assert np.isfinite(out["mean"].to_numpy()).all()
    assert abs(out["mean"].mean() - frame["y"].mean()) < 3 * frame["y"].std()


def test_too_short_series_are_told(frame: pl.DataFrame) -> None:
    with pytest.raises(UserError, match="shorten the look-back"):
        small().fit(frame.group_by("unique_id", maintain_order=True).head(30))


def test_models_of_before_there_were_covariates_are_loaded(fitted: TitansForecaster, frame: pl.DataFrame, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("covariates", "outcome"):
        del config[name]
    for name in ("future", "historic", "static", "calendar", "outcomes"):
        del config["parameters"][name]
    config["forecaster"].pop("covariates", None)
    old = TitansForecaster.from_weights(tmp_path / "weights.safetensors", config)
    assert old.predict(frame).equals(fitted.predict(frame))
    del config["frequency"]
    with pytest.raises(UserError, match="do not fit this program .'frequency'.: train the model anew"):
        TitansForecaster.from_weights(tmp_path / "weights.safetensors", config)


def test_baselines_by_hand() -> None:
    y = np.arange(12.0)
    origins = np.array([8])
    assert LastValue(3).forecast(y, origins).tolist() == [[7, 7, 7]]
    assert SeasonalNaive(3, 4).forecast(y, origins).tolist() == [[4, 5, 6]]
    np.testing.assert_allclose(Ridge(2, 4, penalty=1e-6).fit([y]).forecast(y, origins), [[8, 9]], atol=1e-3)
    assert profile(np.array([1.0, 5.0, 3.0, 5.0], np.float32), 2, 0.5).tolist() == [1, 5, 2, 5]
    with pytest.raises(ValueError, match="whole window"):
        Ridge(2, 40).fit([y])


def test_ets_sees_the_season_knows_no_future_and_leaves_out_what_it_cannot_fit() -> None:
    rng = np.random.default_rng(2)
    y = 1e6 + np.array([0.0, 3, 1, -2, -4, 2, 5])[np.arange(200) % 7] + 0.1 * rng.normal(size=200)
    y[40:44] = np.nan
    origins = np.array([150, 160, 171])
    ets = Ets(7, 7, known=150).fit([y])
    found = ets.forecast(y, origins)
    assert np.abs(found - np.lib.stride_tricks.sliding_window_view(y, 7)[origins]).max() < 1.0, "of a season of nine"
    later = y.copy()
    later[160:] = 0.0  # after the second origin
    np.testing.assert_array_equal(ets.forecast(later, origins)[:2], found[:2])
    assert (Ets(3, 7, 50).forecast(np.full(60, 1e9), np.array([50, 55])) == 1e9).all()
    for short in (np.arange(4.0), np.full(20, np.nan)):
        assert np.isnan(Ets(3, 7, len(short)).forecast(short, np.array([len(short)]))).all()


def test_carried_state_helps_where_the_past_is_longer_than_the_look_back() -> None:
    rng = np.random.default_rng(1)
    shape = rng.normal(size=24).cumsum()
    y = shape[np.arange(3000) % 24] + rng.normal(size=3000)
    origins = np.arange(2500, 2960)
    future = np.lib.stride_tricks.sliding_window_view(y, 24)[origins]
    errors = {
        type(m).__name__: np.mean((m.fit([y[:2500]]).forecast(y, origins) - future) ** 2)
        for m in (Ridge(24, 12), RidgeCarried(24, 12))
    }
    assert errors["RidgeCarried"] < 0.9 * errors["Ridge"]


def test_slots_follow_the_calendar() -> None:
    seasons = default_seasons("15m", 10_000)
    assert [(s.rows, s.slots) for s in seasons] == [(1, 1), (96, 96), (672, 168)]
    stamps = np.array(
        ["2024-01-01T00:00", "2024-01-01T00:45", "2024-01-07T23:45", "2024-01-08T00:00"], "datetime64[us]"
    )
    slots = phases("15m", seasons)(stamps)
    assert slots.tolist() == [[0, 0, 0], [0, 3, 0], [0, 95, 167], [0, 0, 0]]  # 2024-01-01 is a Monday
    assert (phases("15m", seasons)(stamps.astype(np.int64)) == slots).all()
    assert (
        np.diff(steps(np.array(["2024-01", "2024-02", "2024-04"], "datetime64[M]").astype("datetime64[us]"), "1mo"))
        == [1, 2]
    ).all()


def test_metrics_by_hand(frame: pl.DataFrame) -> None:
    table = panel(frame)
    origins = rolling.rolling_origins(table, HORIZON, 2, LOOK_BACK)
    real = rolling.truth(table.aligned()[1], origins, HORIZON, 24, 600)
    scores = rolling.Scores(("tethys", "off"), (0.1, 0.5, 0.9), 2, HORIZON)
    quantile = np.stack([real.y - 1, real.y, real.y + 1], axis=-1)
    scores.add(table.ids, {"tethys": real.y, "off": real.y + 2.0}, quantile, real)
    exact, off = scores.leaderboard()
    assert exact["model"] == "tethys" and exact["mase"] == exact["mse"] == 0 and exact["coverage80"] == 1.0
    # Pinball: (0.1 + 0 + 0.1) / 3 levels, twice, over the mean |y|.
    assert exact["wql"] == pytest.approx(2 * 0.2 / 3 / np.abs(real.y).mean())
    assert off["mae"] == pytest.approx(2.0) and off["mse"] == pytest.approx(4.0)
    assert off["mase"] == pytest.approx(np.mean(2.0 / real.scale)) and "wql" not in off
    np.testing.assert_allclose(scores.error_by_step()[1], np.mean(2.0 / real.scale))
    assert scores.coverage_by_step().tolist() == [[1.0] * HORIZON] and scores.reliability().tolist() == [0.0, 1.0, 1.0]
    with pytest.raises(UserError, match="at most"):
        rolling.rolling_origins(table, HORIZON, 10_000, LOOK_BACK)


def test_train_backtest_and_forecast_by_name(frame: pl.DataFrame, tmp_path: Path) -> None:
    data, store = tmp_path / "load.csv", f"sqlite:///{tmp_path}/t.db"
    frame.write_csv(data)
    result = job.train(
        str(data),
        look_back=LOOK_BACK,
        horizon=HORIZON,
        tracking_uri=store,
        model_name="load",
        output=tmp_path / "out",
        epochs=2,
        alias="champion",
    )
    names = {row["model"] for row in result.leaderboard}
    assert names == {"tethys", "last_value", "seasonal_naive", "ridge", "ridge_carried", "ets"}
    assert result.leaderboard[0]["mase"] <= result.leaderboard[-1]["mase"]
    for path in (result.forecasts, result.plot, result.backtest):
        assert Path(path).stat().st_size > 0
    again = job.backtest(str(data), model_name="load", tracking_uri=store, output=tmp_path / "bt", origins=3)
    assert again.origins == 3
    store_runs = tracking.open_store(store).client.search_runs([tracking.open_store(store).experiment_id])
    logged = next(run for run in store_runs if run.info.run_name == "backtest load/1")
    assert logged.data.metrics["tethys.mase"] == pytest.approx(next(r["mase"] for r in again.leaderboard if r["model"] == "tethys"))
    kept = {f.path for f in tracking.open_store(store).client.list_artifacts(logged.info.run_id)}
    assert kept == {"report.html", "leaderboard.json", "series.parquet", "environment.json"}
    assert logged.info.run_id in Path(again.report).read_text()
    written = job.forecast(
        str(data), model_name="load", tracking_uri=store, output=str(tmp_path / "f.parquet"), horizon=5
    )
    assert written.rows == 3 * 5
    first = pl.read_parquet(result.forecasts).group_by("unique_id", maintain_order=True).head(5)
    np.testing.assert_allclose(pl.read_parquet(tmp_path / "f.parquet")["mean"], first["mean"], rtol=1e-6)
    with pytest.raises(UserError, match="up to 12"):
        job.forecast(str(data), model_name="load", tracking_uri=store, output=str(tmp_path / "g.parquet"), horizon=50)


@pytest.mark.parametrize("block", ["lmm", "mac"])
def test_blocks_over_patches_stream_as_they_replay_and_survive_saving(block: str, tmp_path: Path) -> None:
    """A future set by a sign given 40 rows before, out of reach of look-back and profiles: the blocks learn it, and serve what they learnt."""
    rng = np.random.default_rng(0)
    frames = []
    for name in ("a", "b", "c", "d", "e", "f"):
        y, sign = rng.normal(0, 0.1, 80 * 30), rng.choice([-1.0, 1.0], 30)
        y[::80] += 4 * sign
        for k in range(30):
            y[80 * k + 41 : 80 * k + 53] += 3 * sign[k]
        frames.append(pl.DataFrame({"unique_id": name, "ds": np.arange(len(y)), "y": y}))
    frame = pl.concat(frames)
    options = {"horizon": 12, "look_back": 16, "hidden": 0, "epochs": 10, "frequency": "1i"}
    line = TitansForecaster(**options).fit(frame)
    model = TitansForecaster(**options, blocks=(block,)).fit(frame)
    assert model.valid_error_ < 0.97 * line.valid_error_
    table = panel(frame, frequency="1i")
    origins = np.array([2100, 2203, 2207])
    points, _ = model.quantiles_at(table, origins)
    for place, origin in enumerate(origins):
        streamed = model.predict(frame.filter(pl.col("ds") < origin))["mean"].to_numpy().reshape(6, 12)
        np.testing.assert_allclose(streamed, points[:, place], atol=1e-4)
    model.save(tmp_path)
    assert TitansForecaster.load(tmp_path).predict().equals(model.predict())
