"""The backtest in blocks and the page on it: the same figures however it is cut, nothing loaded, every name escaped."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from connectors import tables
from pipelines.forecasting import backtest as rolling
from pipelines.forecasting import baselines, charts, report, validation
from pipelines.forecasting.estimator import TitansForecaster
from pipelines.windows import panel
from tests.pipelines import trained

NASTY = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a&b'c", "</title></svg>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TitansForecaster:
    return trained.loaded(tmp_path_factory.mktemp("model")).estimator


def sample(names: list[str], days: int = 20, seed: int = 0) -> pl.DataFrame:
    """Hourly series, the first with a missing day, the second beginning later."""
    rng = np.random.default_rng(seed)
    frames = []
    for i, name in enumerate(names):
        hours = np.arange(24 * days)
        y = 50 + 10 * np.sin(2 * np.pi * hours / 24 + i) + rng.normal(size=len(hours))
        frame = pl.DataFrame({"unique_id": name, "ds": [datetime(2025, 1, 1) + timedelta(hours=int(h)) for h in hours], "y": y})
        frames.append(frame.filter(~pl.int_range(pl.len()).is_between(300, 323)) if i == 0 else frame[100:] if i == 1 else frame)
    return pl.concat(frames)


def contest(model: TitansForecaster, frame: pl.DataFrame, origins: int = 6, ets: int | None = None) -> rolling.Backtest:
    table = panel(frame, frequency=model.frequency_)
    at = rolling.rolling_origins(table, model.horizon, origins, model.look_back)
    return rolling.Backtest(model, table, at, int(at[0]), ets)


def page(found: rolling.Backtest, folder: Path, **given: object) -> str:
    tables.write(found.rows(), folder / "backtest.parquet")
    settings = {"title": "load/1", "data": "load.csv", "findings": None, "facts": [("data", "load.csv")], **given}
    return report.page(found, folder / "backtest.parquet", **settings)  # type: ignore[arg-type]


class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_blocks_of_series_give_the_figures_of_all_at_once(
    model: TitansForecaster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = sample([f"s{i}" for i in range(7)])
    whole = contest(model, frame)
    tables.write(whole.rows(), tmp_path / "whole.parquet")
    monkeypatch.setattr(rolling, "CELLS_AT_ONCE", 2 * 6 * model.horizon)
    told: list[tuple[int, int]] = []
    cut = contest(model, frame)
    tables.write(cut.rows(lambda done, of: told.append((done, of))), tmp_path / "cut.parquet")
    assert told == [(2, 7), (4, 7), (6, 7), (7, 7)]
    with monkeypatch.context() as patch:  # rows count too, however few origins are asked for
        patch.setattr(rolling, "CELLS_AT_ONCE", 1 << 30)
        patch.setattr(rolling, "ROWS_AT_ONCE", 3 * len(cut.grid))
        assert [part["unique_id"].n_unique() for part in contest(model, frame, ets=0).rows()] == [3, 3, 1]
    assert pq.ParquetFile(tmp_path / "cut.parquet").metadata.num_row_groups == 4
    a, b = (pl.read_parquet(tmp_path / f"{name}.parquet") for name in ("whole", "cut"))
    assert a.columns == ["unique_id", "origin", "ds", "step", "y", "mean", "q0.025", "q0.1", "q0.5", "q0.9", "q0.975"] + [
        "last_value", "seasonal_naive", "ridge", "ridge_carried", "ets"
    ]  # fmt: skip
    assert a.select("unique_id", "origin", "ds", "step", "y").equals(b.select("unique_id", "origin", "ds", "step", "y"))
    for name in a.columns[5:]:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5)
    for one, other in zip(whole.scores.leaderboard(), cut.scores.leaderboard(), strict=True):
        assert one["model"] == other["model"]
        np.testing.assert_allclose(list(one.values())[1:], list(other.values())[1:], rtol=1e-5)
    # A figure of the board from the rows of the file, by hand.
    mine = next(row for row in whole.scores.leaderboard() if row["model"] == "tethys")
    seen = a.drop_nulls("y")
    assert mine["mae"] == pytest.approx(float((seen["mean"] - seen["y"]).abs().mean()))  # type: ignore[arg-type]
    inside = ((seen["y"] >= seen["q0.1"]) & (seen["y"] <= seen["q0.9"])).mean()
    assert mine["coverage80"] == pytest.approx(inside)


def test_a_baseline_on_a_sample_says_so_and_is_no_rival(model: TitansForecaster, tmp_path: Path) -> None:
    found = contest(model, sample([f"s{i}" for i in range(5)]), ets=2)
    html = page(found, tmp_path)
    board = {row["model"]: row for row in found.scores.leaderboard()}
    assert [name for name, row in board.items() if "series" in row] == ["ets"] and board["ets"]["series"] == 2
    rows = pl.read_parquet(tmp_path / "backtest.parquet")
    drawn = rows.drop_nulls("ets")
    assert drawn["unique_id"].n_unique() == 2
    error = (drawn["ets"] - drawn["y"]).abs().mean()
    assert board["ets"]["mae"] == pytest.approx(float(error))  # type: ignore[arg-type]
    there = found.scores.series.filter(pl.col("unique_id").is_in(drawn["unique_id"].unique().to_list()))
    assert board["ets"]["tethys_mase"] == pytest.approx(there["tethys.mase"].mean()) != board["tethys"]["mase"]
    assert "ets on 2 series; tethys there" in " ".join(Page(html).text.split())
    assert "Left out, because it forecast a sample of the series: ets." in html and "of series better than ets" not in html
    assert report._rival([{"model": "ets", "series": 2}, {"model": "tethys"}, {"model": "ridge"}]) == "ridge"
    assert "ets" not in contest(model, sample(["a", "b"]), ets=0).scores.models


def test_ets_that_is_not_installed_is_told_in_one_line(
    model: TitansForecaster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    assert "ets" not in contest(model, sample(["a", "b"])).scores.models
    assert capsys.readouterr().err == "ets is left out: it needs statsforecast: pip install 'tethys-streams[ets]'\n"


def test_a_block_has_the_covariates_of_its_series(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    frame = sample([f"s{i}" for i in range(5)])
    price = rng.normal(size=frame.height)
    region = pl.when(pl.col("unique_id").is_in(["s0", "s3"])).then(pl.lit("north")).otherwise(pl.lit("south"))
    frame = frame.with_columns(price=pl.Series(price), y=pl.col("y") + 5 * pl.Series(price), region=region)
    model = TitansForecaster(horizon=12, look_back=24, hidden=0, epochs=1, future=("price",), static=("region",)).fit(frame)
    table = panel(frame, covariates=("price", "region"))
    at = rolling.rolling_origins(table, 12, 3, 24)
    point, _ = model.quantiles_at(table, at)
    monkeypatch.setattr(rolling, "CELLS_AT_ONCE", 2 * 3 * 12)
    made = pl.concat(rolling.Backtest(model, table, at, int(at[0])).rows())
    np.testing.assert_allclose(made["mean"].to_numpy().reshape(point.shape), point, rtol=1e-5)


def test_the_page_loads_nothing_runs_nothing_and_escapes_every_name(model: TitansForecaster, tmp_path: Path) -> None:
    frame = sample([*NASTY, *(f"s{i}" for i in range(6))])
    found = contest(model, frame)
    rules = validation.Rules(missing="mask", gaps="mask")
    html = page(found, tmp_path, title=NASTY[0], data=NASTY[1], findings=validation.validate(frame, rules), facts=[(NASTY[2], NASTY[3])])
    parsed = Page(html)
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "img", "iframe", "link", "object", "foreignobject", "use", "a"}
    for tag, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "href", "xlink:href"), (tag, name)
            assert "url(" not in (value or "")
    assert "url(" not in html and "@import" not in html and not re.search(r"https?://", html)
    policy = next(a["content"] for t, a in parsed.elements if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "default-src 'none'" in policy
    for name in NASTY:
        assert name in parsed.text, "told as it is"
    assert sum(tag == "svg" for tag, _ in parsed.elements) == 5 + 2 * report.EXAMPLES
    assert "prefers-color-scheme: dark" in html and html.count("<title>") == html.count("</title>")
    # The findings of the validation stand on it: one series has a day's gap.
    assert "gaps" in parsed.text and "24 missing steps" in parsed.text
    for row in found.scores.leaderboard():
        assert row["model"] in parsed.text and charts.number(row["mae"]) in parsed.text


def test_worst_and_best_series_are_those_of_the_scores(model: TitansForecaster, tmp_path: Path) -> None:
    frame = sample([f"s{i}" for i in range(9)])
    spoilt = frame.with_columns(
        y=pl.when((pl.col("unique_id") == "s4") & (pl.col("ds") >= datetime(2025, 1, 18))).then(pl.col("y") + 60).otherwise("y")
    )
    found = contest(model, spoilt)
    html = page(found, tmp_path)
    names = re.findall(r"<h3>([^<]*)<span class=\"tag (\w+)\"", html)
    order = found.scores.series.sort("tethys.mase", descending=True)["unique_id"].to_list()
    assert names[0] == ("s4", "worst") and [name for name, tag in names if tag == "worst"] == order[:3]
    assert [name for name, tag in names if tag == "best"] == order[::-1][:3]


def test_the_lead_says_who_wins_and_whether_intervals_keep_their_promise() -> None:
    scores = rolling.Scores(("tethys", "last_value"), (0.1, 0.5, 0.9), 1, 50)
    y = np.zeros((1, 1, 50))
    y[0, 0, :10] = 5.0
    quantile = np.stack([y * 0 - 1, y * 0, y * 0 + 1], axis=-1)
    scores.add(["a"], {"tethys": y + 1.0, "last_value": y + 2.0}, quantile, rolling.Truth(y, np.array([2.0])))
    board = scores.leaderboard()
    assert report.verdict(scores, board, "last_value") == (
        "tethys has a MASE of 0.5, 50.0 % below last_value, the best baseline (1). Its 80 % interval held 80.0 % of what came: it keeps its promise."
    )
    worse = rolling.Scores(("tethys", "last_value"), (0.1, 0.5, 0.9), 1, 50)
    worse.add(["a"], {"tethys": y + 3.0, "last_value": y + 2.0}, quantile * 100, rolling.Truth(y, np.array([np.nan])))
    said = report.verdict(worse, worse.leaderboard(), "last_value")
    assert said.startswith("tethys has a mean absolute error of 3, 50.0 % above last_value") and "100.0 % of what came: it is wider" in said


@pytest.mark.parametrize(
    ("name", "frame", "options"),
    [
        ("one series", sample(["a", "b"]).filter(unique_id="a"), {}),
        ("constant", sample(["a", "b", "c"]).with_columns(y=pl.lit(4.0)), {}),
        ("one step", sample(["a", "b", "c"]), {"horizon": 1}),
        ("whole numbers", sample(["a", "b", "c"]).with_columns(ds=pl.int_range(pl.len()).over("unique_id")), {"frequency": "1i"}),
    ],
)
def test_odd_tables_have_a_page_too(name: str, frame: pl.DataFrame, options: dict[str, object], tmp_path: Path) -> None:
    settings = {"horizon": 12, "look_back": 24, "hidden": 0, "epochs": 1, **options}
    odd = TitansForecaster(**settings).fit(frame)  # type: ignore[arg-type]
    html = page(contest(odd, frame, origins=1 if name == "one series" else 4), tmp_path)
    text = Page(html).text
    assert "nan" not in text.lower().replace("finance", "") and "Leaderboard" in text


def test_steps_without_a_forecast_are_counted_and_do_not_flatter() -> None:
    scores = rolling.Scores(("tethys",), (0.1, 0.5, 0.9), 1, 4)
    y = np.arange(4.0).reshape(1, 1, 4)
    point = y.copy()
    point[..., 2] = np.nan
    scores.add(["a"], {"tethys": point}, np.stack([point] * 3, axis=-1), rolling.Truth(y, np.array([1.0])))
    assert scores.unforecast == 1 and scores.count.sum() == 3 and scores.banded.tolist() == [1, 1, 0, 1]


def test_labels_do_not_cover_each_other_and_ticks_are_round() -> None:
    placed = charts._apart([(50.0, name, "") for name in "abcde"] + [(200.0, "z", "")], 10, 210)
    places = [at for at, _, _ in placed]
    assert all(b - a >= charts.LABEL for a, b in zip(places, places[1:], strict=False)) and places[-1] <= 210
    assert charts.nice(0.13, 0.97, 5) == [0.2, 0.4, 0.6, 0.8]
    assert charts.nice(-3, 12, 4) == [0.0, 5.0, 10.0]
    hours = np.arange(np.datetime64("2025-01-01T00:00", "us"), np.datetime64("2025-01-05T00:00", "us"), np.timedelta64(1, "h"))
    assert report.stamp_ticks(hours, 10, 95) == [(24.0, "2 Jan"), (48.0, "3 Jan"), (72.0, "4 Jan")]
    years = np.arange("1900", "2020", dtype="datetime64[Y]").astype("datetime64[us]")
    assert [label for _, label in report.stamp_ticks(years, 0, 119)] == ["1900", "1950", "2000"]
    assert report.stamp_ticks(np.arange(1000, 2000), 0, 900, most=4) == [(0.0, "1000"), (250.0, "1250"), (500.0, "1500"), (750.0, "1750")]
    assert charts.number(1234567.0) == "1,234,567" and charts.number(float("nan")) == "–"
