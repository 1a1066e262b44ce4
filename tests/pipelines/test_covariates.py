"""Covariates on the whole path: they help where they act and do no harm where they do not, leak nothing, and stream as in batch."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from connectors import tables
from connectors.checkpoints import CheckpointStore
from connectors.errors import UserError
from connectors.streams.base import Record
from pipelines.forecasting import job
from pipelines.forecasting.batch import Job, Loaded, forecast_rows, run_shards
from pipelines.forecasting.calendar import default_seasons, phases
from pipelines.forecasting.covariates import Column, CovariateTable, Encoder
from pipelines.forecasting.estimator import TitansForecaster, save_weights
from pipelines.forecasting.reading import Reading
from pipelines.streaming.engine import Engine
from pipelines.streaming.event_time import EventTime, Frequency
from pipelines.streaming.journal import Arrivals
from pipelines.streaming.worker import stream_model
from pipelines.windows import panel

LOOK_BACK, HORIZON, ROWS, SERIES = 24, 12, 900, 3
START = datetime(2024, 1, 1)
COVARIATES = {"future": ("promo", "kind"), "historic": ("lead",), "static": ("region",)}
NAMES = ("promo", "kind", "lead", "region")


def made(acts: bool = True, rows: int = ROWS, seed: int = 0) -> pl.DataFrame:
    """Hourly series: a day's shape, noise, promotions, a category that matters, and a reading that leads the value by twelve hours."""
    rng = np.random.default_rng(seed)
    frames = []
    for i in range(SERIES):
        promo = np.repeat(rng.random(rows // 6 + 1) < 0.2, 6)[:rows].astype(float)
        kind = rng.choice(["plain", "high", "low"], rows)
        lead = rng.normal(size=rows + HORIZON)
        y = 20 * (i + 1) + 3 * np.sin(np.arange(rows) * 2 * np.pi / 24) + rng.normal(0, 0.5, rows)
        if acts:
            y = y + 8 * promo + np.select([kind == "high", kind == "low"], [4.0, -4.0]) + 2 * lead[:rows]
        frames.append(
            pl.DataFrame(
                {
                    "unique_id": f"s{i}", "ds": [START + timedelta(hours=h) for h in range(rows)], "y": y, "promo": promo,
                    "kind": kind, "lead": lead[HORIZON:], "region": "north" if i else "south",
                }
            )
        )  # fmt: skip
    return pl.concat(frames)


def estimator(**options: object) -> TitansForecaster:
    return TitansForecaster(**{"horizon": HORIZON, "look_back": LOOK_BACK, "hidden": 8, "epochs": 2, **options})  # type: ignore[arg-type]


def error(model: TitansForecaster, frame: pl.DataFrame, known: int) -> float:
    """Mean squared error at origins after the rows that it was trained on."""
    table = panel(frame, covariates=model.encoder_.names)
    origins = np.arange(known, ROWS - HORIZON, 5)
    point, _ = model.quantiles_at(table, origins)
    _, y, _ = table.aligned()
    return float(np.mean((point - np.lib.stride_tricks.sliding_window_view(y, HORIZON, axis=1)[:, origins]) ** 2))


def head(frame: pl.DataFrame, rows: int) -> pl.DataFrame:
    return frame.group_by("unique_id", maintain_order=True).head(rows)


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return made()


@pytest.fixture(scope="module")
def fitted(frame: pl.DataFrame) -> TitansForecaster:
    return estimator(**COVARIATES, calendar=("weekday",)).fit(head(frame, 700))


@pytest.fixture(scope="module")
def loaded(fitted: TitansForecaster, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("model")
    save_weights(fitted.forecaster_, folder / "w.safetensors")
    return Loaded("sales/1", folder / "w.safetensors", json.loads(json.dumps(fitted.describe())))


def test_known_promotions_and_a_leading_reading_take_most_of_the_error(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    without = error(estimator().fit(head(frame, 700).select("unique_id", "ds", "y")), frame, 700)
    ahead = error(estimator(future=("promo", "kind")).fit(head(frame, 700)), frame, 700)
    everything = error(fitted, frame, 700)
    assert ahead < 0.35 * without, (ahead, without)
    assert everything < 0.5 * ahead, "and the leading reading most of the rest"


def test_covariates_that_are_noise_do_no_harm() -> None:
    frame = made(acts=False)
    without = error(estimator().fit(head(frame, 700)), frame, 700)
    assert error(estimator(**COVARIATES).fit(head(frame, 700)), frame, 700) < 1.03 * without


def test_nothing_later_than_the_origin_is_seen(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    """Of later rows only covariates known ahead, and those only up to the horizon."""
    row = pl.int_range(pl.len()).over("unique_id")
    spoilt = frame.with_columns(
        y=pl.when(row >= 800).then(1e6).otherwise("y"), lead=pl.when(row >= 800).then(99.0).otherwise("lead"),
        promo=pl.when(row >= 800 + HORIZON).then(99.0).otherwise("promo"),
    )  # fmt: skip
    a, b = (fitted.quantiles_at(panel(f, covariates=NAMES), np.array([800]))[0] for f in (frame, spoilt))
    np.testing.assert_array_equal(a, b)
    direct = fitted.predict(head(frame, 800), future=frame)["mean"].to_numpy().reshape(SERIES, HORIZON)
    np.testing.assert_allclose(direct, a[:, 0], rtol=1e-5)
    other = frame.with_columns(promo=pl.when(row == 805).then(1 - pl.col("promo")).otherwise("promo"))
    moved = fitted.predict(head(frame, 800), future=other)["mean"].to_numpy().reshape(SERIES, HORIZON) - direct
    assert (np.abs(moved).argmax(axis=1) == 5).all(), "a promotion acts on its own row"
    # Scales and levels are those of the rows of training.
    border = np.sort(frame["ds"].unique().to_numpy())[500]
    table, late = (panel(f, covariates=NAMES) for f in (frame, frame.with_columns(lead=pl.when(pl.col("ds") > border).then(1e9).otherwise("lead"))))
    encoders = [Encoder.fit(t, border, **COVARIATES, calendar=(), zone=None) for t in (table, late)]
    assert encoders[0] == encoders[1]


def test_updates_saves_and_streams_tell_what_one_pass_tells(fitted: TitansForecaster, frame: pl.DataFrame, tmp_path: Path) -> None:
    past = head(frame, 850)
    expected = fitted.predict(past, future=frame)
    fitted.save(tmp_path / "m")
    loaded = TitansForecaster.load(tmp_path / "m")
    assert loaded.predict(future=frame).equals(fitted.predict(future=frame))
    row = pl.int_range(pl.len()).over("unique_id")
    loaded.update(past.filter(row >= 700))
    np.testing.assert_allclose(loaded.predict(future=frame)["mean"], expected["mean"], rtol=1e-4)

    frame.write_parquet(tmp_path / "covariates.parquet")
    model = stream_model(fitted, "sales/1", str(tmp_path / "covariates.parquet"))
    engine = Engine(model, EventTime(Frequency.parse("1h")), CheckpointStore(tmp_path / "c.db"))
    records = [
        Record(name, int(ds.timestamp()) * 1_000_000, y, None, "p", i)
        for i, (name, ds, y) in enumerate(past.sort("ds", "unique_id").with_columns(pl.col("ds").dt.replace_time_zone("UTC"))
                                         .select("unique_id", "ds", "y").iter_rows())
    ]  # fmt: skip
    for batch, at in enumerate(range(0, len(records), 700), start=1):
        out = engine.step(Arrivals(records[at : at + 700]), batch).forecasts
    found = out.filter(pl.col("origin") == past["ds"].max()).sort("unique_id")
    np.testing.assert_allclose(np.stack(found["q0.5"].to_numpy()).ravel(), expected.sort("unique_id", "ds")["q0.5"], rtol=1e-4)


def test_a_stream_whose_future_is_not_known_gives_no_number(fitted: TitansForecaster, frame: pl.DataFrame, tmp_path: Path) -> None:
    short = head(frame, 60)
    short.write_parquet(tmp_path / "t.parquet")
    table = CovariateTable(fitted.encoder_, str(tmp_path / "t.parquet"))
    times = short["ds"].unique().sort().cast(pl.Int64).to_numpy()
    given = table.at(["s1", "nobody"], np.stack([times[[0, 59]], times[[0, 59]]]))
    expected = fitted.encoder_.of_panel(panel(short, covariates=NAMES))[0]
    np.testing.assert_array_equal(given[0], expected[[60, 119]])
    assert np.isnan(given[1][:, :4]).all()
    engine = Engine(stream_model(fitted, "sales/1", str(tmp_path / "t.parquet")), EventTime(Frequency.parse("1h")), CheckpointStore(tmp_path / "c"))
    made_ = [engine.step(Arrivals([Record("s1", int(times[i]), 1.0, None, "p", i)]), b).forecasts for b, i in enumerate((40, 58), start=1)]
    assert made_[0]["q0.5"].explode().null_count() == 0 and made_[1]["q0.5"].explode().null_count() == HORIZON
    # The file grows, and what was not known is.
    head(frame, 90).write_parquet(tmp_path / "t.parquet")
    engine.model.beside.__self__._looked = -1e9  # type: ignore[union-attr]
    later = engine.step(Arrivals([Record("s1", int(times[59]), 1.0, None, "p", 59)]), 3).forecasts
    assert later["q0.5"].explode().null_count() == 0
    nobody = Record("nobody", int(times[59]), 1.0, None, "p", 60)
    assert "without_covariates" not in engine.step(Arrivals([Record("s1", int(times[59]) + 3_600_000_000, 1.0, None, "p", 59)]), 4).counters
    assert engine.step(Arrivals([nobody]), 5).counters["without_covariates"] == 1
    with pytest.raises(UserError, match="give a table of these covariates"):
        stream_model(fitted, "sales/1")
    for options in ({}, {"calendar": ("hour",)}):
        plain = estimator(hidden=0, epochs=1, **options).fit(head(frame, 200))
        with pytest.raises(UserError, match=r"sales/2 was trained without covariates, and a table of them is given"):
            stream_model(plain, "sales/2", str(tmp_path / "t.parquet"))


def test_categories_have_a_place_for_what_was_never_seen(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    kind = Column.of(pl.Series("kind", ["a", "b", None, "a"]))
    assert kind.levels == ("a", "b") and kind.width == 3
    codes = kind.encode(pl.Series(["a", "b", None, "new"]))
    np.testing.assert_allclose(codes.mean(0), (codes[[0, 1, 2, 0]].sum(0) - codes[0]) / 4, atol=1e-6)
    np.testing.assert_allclose(codes[[0, 1, 2, 0]].mean(0), 0, atol=1e-6)
    assert (codes[3] == 0).all() and kind.unknown(pl.Series(["a", "new", "new"])) == ("new",)
    new = frame.with_columns(kind=pl.when(pl.col("ds") >= frame["ds"].unique().sort()[800]).then(pl.lit("festive")).otherwise("kind"))
    out = fitted.predict(head(new, 800), future=new)
    assert np.isfinite(out["mean"].to_numpy()).all()
    assert fitted.encoder_.unknown(new) == {"kind": ("festive",)}
    with pytest.raises(UserError, match="'promo' was a number in training and now holds 'much'"):
        fitted.predict(head(frame, 800).with_columns(promo=pl.lit("much")), future=frame)
    with pytest.raises(UserError, match="static covariate 'region' changes within"):
        fitted.predict(head(frame, 800).with_columns(region=pl.col("kind")), future=frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.filter(pl.col("ds") != START + timedelta(hours=803)), r"3 rows of the next 12 steps .*'s0' 1 \(first 2024-02-03 11:00:00\)"),
        (lambda f: f.with_columns(promo=pl.lit(None, pl.Float64)), r"values of covariate 'promo' are missing in the future frame"),
        (lambda f: f.rename({"promo": "Promo"}), r"lacks the covariates 'promo' and has the unexpected .*'Promo'"),
        (lambda f: None, r"the model needs 'promo', 'kind' at the 12 rows of the horizon"),
    ],
    ids=["row", "value", "column", "table"],
)
def test_what_the_future_lacks_is_one_line(fitted: TitansForecaster, frame: pl.DataFrame, change, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fitted.predict(head(frame, 800), future=change(frame))


def test_the_wall_clock_of_the_zone_moves_slots_and_calendar_in_both_directions() -> None:
    """A rise at seven o'clock in Berlin, before and after both changes of the clock: right in training as in forecasting."""
    hours = pl.datetime_range(datetime(2023, 1, 2), datetime(2024, 1, 20, 23), "1h", eager=True)
    local = hours.dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin").dt.hour()
    rng = np.random.default_rng(0)
    y = 10 + 5 * (local == 7).cast(pl.Float64).to_numpy() + rng.normal(0, 0.1, len(hours))
    frame = pl.DataFrame({"unique_id": "a", "ds": hours, "y": y})
    known = frame.filter(pl.col("ds") < datetime(2023, 12, 1))
    options = {"horizon": 24, "look_back": 6, "hidden": 0}
    berlin = TitansForecaster(**options, zone="Europe/Berlin").fit(known)
    assert berlin.valid_error_ < 0.2 * TitansForecaster(**options).fit(known).valid_error_, "the change in October lies in validation"
    for midnight in (datetime(2023, 3, 28, 22), datetime(2023, 6, 1, 22), datetime(2023, 10, 30, 23)):
        out = berlin.predict(frame.filter(pl.col("ds") < midnight))
        rises = out["ds"].dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin")[int(out["mean"].arg_max())]
        assert rises.hour == 7, midnight
    encoder = Encoder("1h", "Europe/Berlin", ("hour",), (), (), ())
    for day in (datetime(2023, 3, 26), datetime(2023, 10, 29)):
        stamps = pl.datetime_range(day, day + timedelta(hours=3), "1h", eager=True)
        shown = stamps.dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin").dt.hour()
        assert encoder.of_calendar(stamps.to_numpy()).argmax(1).tolist() == shown.to_list()


def settings(folder: Path, **options: object) -> Job:
    return Job.model_validate(
        {
            "name": "nightly", "input": {"uri": str(folder / "t.parquet")}, "output": {"uri": str(folder / "out.parquet")},
            "model": {"name": "sales"}, "work": folder / "work", "series_per_shard": 2, **options,
        }
    )  # fmt: skip


def test_the_nightly_job_reads_the_future_from_its_own_rows_or_from_a_table(
    fitted: TitansForecaster, loaded: Loaded, frame: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_of = START + timedelta(hours=800)
    tables.write(frame, tmp_path / "t.parquet")
    expected = fitted.predict(head(frame, 800), future=frame)
    own = run_shards(settings(tmp_path), loaded, as_of.isoformat())
    assert own.failed == 0
    np.testing.assert_allclose(tables.read(own.output)["mean"], expected["mean"], rtol=1e-5)
    tables.write(head(frame, 800), tmp_path / "t.parquet")
    ahead = frame.filter(pl.col("ds") >= as_of).select("unique_id", "ds", "promo", "kind")
    tables.write(ahead, tmp_path / "future.csv")
    beside = settings(tmp_path, future={"uri": str(tmp_path / "future.csv")})
    first = run_shards(beside, loaded, as_of.isoformat())
    np.testing.assert_allclose(tables.read(first.output)["mean"], expected["mean"], rtol=1e-5)
    # Another future is another forecast, for the series that it is another for.
    tables.write(ahead.with_columns(promo=pl.when(pl.col("unique_id") == "s2").then(1 - pl.col("promo")).otherwise("promo")), tmp_path / "future.csv")
    second = run_shards(beside, loaded, as_of.isoformat())
    assert second.resumed == 1
    # A series whose future lacks a row costs only itself.
    lacking = ahead.filter((pl.col("unique_id") != "s1") | (pl.col("ds") != as_of))
    made_, failed = forecast_rows(head(frame, 800), settings(tmp_path), loaded, as_of.isoformat(), lacking)
    assert set(made_["unique_id"]) == {"s0", "s2"} and failed["unique_id"].to_list() == ["s1"]
    assert "missing_rows: 1 rows (first 2024-02-03 08:00:00)" in failed["reason"][0]
    # A model that knows nothing ahead says that it does not read the table of it.
    plain = estimator(hidden=0, epochs=1).fit(head(frame, 200))
    save_weights(plain.forecaster_, tmp_path / "w.safetensors")
    capsys.readouterr()
    assert run_shards(beside, Loaded("sales/2", tmp_path / "w.safetensors", plain.describe()), as_of.isoformat()).failed == 0
    assert f"sales/2 knows no covariate ahead, and reads nothing of the future {tmp_path}/future.csv" in capsys.readouterr().err


def test_the_commands_train_list_what_lacks_backtest_and_forecast(frame: pl.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the registered model serves: the rows after the last value hold the future."""
    import mlflow

    past, future, store = tmp_path / "past.csv", tmp_path / "future.csv", f"sqlite:///{tmp_path}/t.db"
    head(frame, 600).write_csv(past)
    options = {"tracking_uri": store, "model_name": "sales"}
    result = job.train(
        str(past), look_back=LOOK_BACK, horizon=HORIZON, output=tmp_path / "out", epochs=1, **COVARIATES, calendar=("weekday",),
        alias="champion", **options,
    )  # fmt: skip
    assert "no future of 'promo', 'kind' is given" in capsys.readouterr().err
    assert result.leaderboard[0]["model"] == "tethys"
    assert job.backtest(str(past), origins=2, output=tmp_path / "bt", **options).origins == 2
    assert job.missing_future(str(past), **options).height == SERIES * HORIZON
    ahead = frame.filter(pl.col("ds") >= START + timedelta(hours=600)).select("unique_id", "ds", "promo", "kind")
    ahead.filter(pl.col("ds") != START + timedelta(hours=602)).write_csv(future)
    reading = Reading(future=str(future))
    lacking = job.missing_future(str(past), reading=reading, **options)
    assert lacking["unique_id"].to_list() == ["s0", "s1", "s2"] and lacking["ds"].unique().to_list() == [START + timedelta(hours=602)]
    with pytest.raises(UserError, match=r"3 rows of the next 12 steps are not in the future frame"):
        job.forecast(str(past), reading=reading, output=str(tmp_path / "f.parquet"), **options)
    ahead.write_csv(future)
    written = job.forecast(str(past), reading=reading, output=str(tmp_path / "f.parquet"), **options)
    assert written.rows == SERIES * HORIZON

    mlflow.set_tracking_uri(store)
    served = mlflow.pyfunc.load_model("models:/sales@champion")
    rows = pl.concat([head(frame, 600), ahead.with_columns(y=pl.lit(None, pl.Float64))], how="diagonal")
    asked = rows.with_columns(pl.col("ds").dt.strftime("%Y-%m-%dT%H:%M:%SZ")).select(served.metadata.get_input_schema().input_names())
    answer = served.predict(asked.to_pandas(), params={"h": 3})
    forecast = tables.read(tmp_path / "f.parquet").group_by("unique_id", maintain_order=True).head(3)
    np.testing.assert_allclose(answer["mean"], forecast["mean"], rtol=1e-5)


def test_effects_do_not_depend_on_how_many_series_share_a_call(fitted: TitansForecaster, frame: pl.DataFrame) -> None:
    together = fitted.predict(head(frame, 800), future=frame)
    alone = fitted.predict(head(frame, 800).filter(pl.col("unique_id") == "s1"), future=frame)
    np.testing.assert_allclose(alone["mean"], together.filter(pl.col("unique_id") == "s1")["mean"], rtol=1e-6)
    assert torch.count_nonzero(fitted.forecaster_.effect) > 0


def test_a_stream_in_a_zone_has_the_slots_of_its_batch() -> None:
    hours = pl.datetime_range(datetime(2024, 3, 30), datetime(2024, 4, 2), "1h", eager=True)
    seasons = default_seasons("1h", 1000)
    of_batch, of_stream = phases("1h", seasons, "Europe/Berlin"), phases("1h", seasons, "Europe/Berlin")
    np.testing.assert_array_equal(of_batch(hours.to_numpy()), of_stream(hours.cast(pl.Int64).to_numpy()))
    assert of_batch(hours.to_numpy())[:, 1].tolist() == hours.dt.replace_time_zone("UTC").dt.convert_time_zone("Europe/Berlin").dt.hour().to_list()
