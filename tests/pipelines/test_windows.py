"""Long frames to panels to windows: values, order, and what wrong tables are told."""

from datetime import date, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.errors import UserError
from pipelines.windows import Panel, continue_grid, panel, parse_frequency, ray_cluster, read_panel, windows


def hourly(name: str, n: int, start: datetime = datetime(2026, 1, 1), scale: float = 1.0) -> pl.DataFrame:
    return pl.DataFrame(
        {
            "unique_id": [name] * n,
            "ds": [start + timedelta(hours=i) for i in range(n)],
            "y": [float(scale * i) for i in range(n)],
        }
    )


def test_rows_in_any_order_become_series_sorted_by_id_and_time():
    frame = pl.concat([hourly("b", 5, scale=10), hourly("a", 3)])
    shuffled = panel(frame.sample(fraction=1.0, shuffle=True, seed=3))
    assert shuffled.ids == ("a", "b")
    assert shuffled.frequency == "1h"
    assert shuffled.y.tolist() == [0, 1, 2, 0, 10, 20, 30, 40]
    assert shuffled.lengths.tolist() == [3, 5]
    assert shuffled.frame().equals(frame.sort("unique_id", "ds"))


def test_gaps_and_nulls_are_missing_rows_on_the_grid():
    frame = hourly("a", 6).with_columns(pl.when(pl.col("y") == 1).then(None).otherwise(pl.col("y")).alias("y"))
    p = panel(frame.filter(pl.col("y").is_null() | (pl.col("y") != 3)))
    assert p.observed.tolist() == [True, False, True, False, True, True]
    assert np.isnan(p.y[[1, 3]]).all()
    assert p.ds[3] == np.datetime64("2026-01-01T03:00")


@pytest.mark.parametrize(
    ("stamps", "frequency"),
    [
        ([date(2026, 1, 31), date(2026, 2, 28), date(2026, 3, 31), date(2026, 5, 31)], "1mo"),
        ([date(2026, 1, 15), date(2026, 2, 15), date(2026, 3, 15), date(2026, 5, 15)], "1mo"),
        ([date(2025, 1, 1), date(2025, 4, 1), date(2025, 7, 1), date(2026, 1, 1)], "1q"),
        ([date(2024, 1, 1), date(2025, 1, 1), date(2026, 1, 1), date(2028, 1, 1)], "1y"),
        ([date(2026, 1, 1), date(2026, 1, 8), date(2026, 1, 15), date(2026, 1, 29)], "1w"),
        ([1, 2, 3, 5], "1i"),
        (["2026-01-01 00:00", "2026-01-01 00:15", "2026-01-01 00:30", "2026-01-01 01:00"], "15m"),
    ],
)
def test_the_frequency_is_inferred_and_the_gap_filled(stamps, frequency):
    p = panel(pl.DataFrame({"unique_id": "a", "ds": stamps, "y": [1.0, 2.0, 3.0, 5.0]}))
    assert p.frequency == frequency
    assert p.observed.tolist() == [True, True, True, False, True]
    assert (continue_grid(p.ds[0], frequency, 4)[[0, 1, 3]] == p.ds[[1, 2, 4]]).all()


def test_a_zone_is_taken_to_utc():
    frame = hourly("a", 3).with_columns(pl.col("ds").dt.replace_time_zone("Europe/Berlin"))
    assert panel(frame).ds[0] == np.datetime64("2025-12-31T23:00")


def test_months_continue_on_last_days():
    ahead = continue_grid(np.datetime64("2027-12-31T06:00"), "1mo", 3)
    assert [str(x)[:13] for x in ahead] == ["2028-01-31T06", "2028-02-29T06", "2028-03-31T06"]


def test_aligned_puts_series_side_by_side():
    frame = pl.concat([hourly("a", 3), hourly("b", 2, start=datetime(2026, 1, 1, 2))])
    ds, y, observed = panel(frame).aligned()
    assert len(ds) == 4
    np.testing.assert_array_equal(y, [[0, 1, 2, np.nan], [np.nan, np.nan, 0, 1]])
    np.testing.assert_array_equal(observed, ~np.isnan(y))
    with pytest.raises(UserError, match="'b' begins at .* off the 1h grid"):
        panel(pl.concat([hourly("a", 3), hourly("b", 2, start=datetime(2026, 1, 1, 0, 30))])).aligned()


def wrong_tables():
    good = hourly("a", 4)
    six = hourly("a", 6)
    off = six.with_columns(pl.when(pl.col("y") == 2).then(pl.col("ds").dt.offset_by("7m")).otherwise("ds").alias("ds"))
    yield "no rows", good.clear(), {}, "holds no rows"
    yield "missing column", good.drop("y"), {}, "has no column 'y'; it has 'unique_id', 'ds'"
    yield "duplicate", pl.concat([good, good[:1]]), {}, r"'a' has two rows at 2026-01-01 00:00:00 \(1 such"
    yield "stamp off the grid", off, {}, r"1h does not fit: series 'a' has a row at 2026-01-01 02:07:00.*\(1 of 6 rows"
    yield "stated too long", good, {"frequency": "2h"}, r"2h does not fit: series 'a' has a row at 2026-01-01 01:00:00"
    yield "stated far too short", good[[0, 3]], {"frequency": "1ms"}, "would make 10800001 rows"
    yield "unknown frequency", good, {"frequency": "hourly"}, "unknown frequency 'hourly'"
    yield "zero frequency", good, {"frequency": "0h"}, "unknown frequency '0h'"
    yield "frequency of another kind", good, {"frequency": "1i"}, "the time column of the table holds dates"
    yield "one row each", good[:1], {}, "state the frequency"
    yield "null stamp", good.with_columns(pl.lit(None, pl.Datetime).alias("ds")), {}, "4 of 4 rows .* column 'ds'"
    yield (
        "infinite",
        good.with_columns(pl.lit(float("inf")).alias("y")),
        {},
        "'a' at 2026-01-01 00:00:00 has the target",
    )
    yield "text target", good.with_columns(pl.lit("x").alias("y")), {}, "is String, not a number"
    yield "text stamp", good.with_columns(pl.lit("soon").alias("ds")), {}, r"holds 'soon', not a time stamp \(4 of 4"


@pytest.mark.parametrize(("frame", "options", "message"), [pytest.param(*c[1:], id=c[0]) for c in wrong_tables()])
def test_a_wrong_table_is_told_what_where_and_what_to_do(frame, options, message):
    with pytest.raises(UserError, match=message) as told:
        panel(frame, **options)
    assert "\n" not in str(told.value)


def test_windows_equal_a_plain_loop():
    p = panel(pl.concat([hourly("a", 9), hourly("b", 4, scale=3), hourly("c", 11, scale=-1)]))
    w = windows(p, look_back=3, horizon=2, stride=2)
    expected = [
        (i, p.y[p.rows(i)][s : s + 3], p.y[p.rows(i)][s + 3 : s + 5])
        for i in range(len(p))
        for s in range(0, int(p.lengths[i]) - 4, 2)
    ]
    assert w.series.tolist() == [i for i, _, _ in expected] == [0, 0, 0, 2, 2, 2, 2]
    np.testing.assert_array_equal(w.x, [x for _, x, _ in expected])
    np.testing.assert_array_equal(w.target, [t for _, _, t in expected])
    assert w.origin[0] == np.datetime64("2026-01-01T02:00")
    assert w.observed_x.all() and w.observed_target.shape == (7, 2)
    x, target = w.take(np.array([5, 0]))
    np.testing.assert_array_equal(x, w.x[[5, 0]])
    np.testing.assert_array_equal(target, w.target[[5, 0]])
    assert [len(x) for x, _ in w.batches(3)] == [3, 3, 1]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    look_back=st.integers(1, 4),
    horizon=st.integers(1, 3),
    stride=st.integers(1, 4),
)
@settings(deadline=None, max_examples=40)
def test_no_window_crosses_series_and_none_is_lost(lengths, look_back, horizon, stride):
    ids = tuple(f"s{i:02}" for i in range(len(lengths)))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    # The value tells the series and the row.
    y = np.concatenate([100.0 * i + np.arange(n) for i, n in enumerate(lengths)])
    p = Panel(ids, np.arange(len(y)), y, np.ones(len(y), bool), offsets, "1i")
    fit = [range(0, n - look_back - horizon + 1, stride) for n in lengths]
    if not any(fit):
        with pytest.raises(UserError, match="no series is long enough"):
            windows(p, look_back, horizon, stride=stride)
        return
    w = windows(p, look_back, horizon, stride=stride)
    assert w.x[:, 0].tolist() == [100.0 * i + s for i, starts in enumerate(fit) for s in starts]
    assert (w.target[:, -1] - w.x[:, 0] == look_back + horizon - 1).all()


def test_windows_of_one_series_are_views():
    p = panel(hourly("a", 50))
    w = windows(p, look_back=8, horizon=4)
    assert np.shares_memory(w.x, p.y) and np.shares_memory(w.target, p.y)
    assert np.shares_memory(w.take(slice(5, 9))[0], p.y)


def test_frequencies():
    assert parse_frequency("15m") == (15, "m")
    assert parse_frequency("h") == (1, "h")
    assert parse_frequency("1mo") == (1, "mo")


@pytest.fixture
def partitions(tmp_path):
    """Three tables: series b lies in two of them, rows in order of time and not of series, one target missing."""
    b = hourly("b", 40, scale=2)
    tables = [
        pl.concat([hourly("c", 30), b[20:]]).sort("ds"),
        pl.concat([hourly("a", 25), hourly("d", 26)]).sort("ds"),
        b[:20].with_columns(pl.when(pl.col("y") == 4).then(None).otherwise(pl.col("y")).alias("y")),
    ]
    paths = []
    for i, table in enumerate(tables):
        paths.append(str(tmp_path / f"part-{i}.parquet"))
        table.write_parquet(paths[-1])
    return paths


def equal(a: Panel, b: Panel) -> bool:
    fields = ("ds", "y", "observed", "offsets")
    same = all(np.array_equal(getattr(a, f), getattr(b, f), equal_nan=f == "y") for f in fields)
    return same and a.ids == b.ids and a.frequency == b.frequency


def test_many_tables_are_one_table(partitions):
    once = panel(pl.concat([pl.read_parquet(path) for path in partitions]))
    assert once.ids == ("a", "b", "c", "d") and once.lengths.tolist() == [25, 40, 30, 26]
    assert equal(read_panel(partitions), once)
    assert equal(read_panel(partitions[::-1]), once)


@pytest.mark.ray
def test_ray_gives_equal_numbers_in_equal_order(partitions):
    ray_cluster(2)
    here, there = read_panel(partitions), read_panel(partitions, executor="ray")
    assert equal(here, there)
    a, b = windows(here, 6, 3), windows(there, 6, 3)
    np.testing.assert_array_equal(a.x, b.x)
    np.testing.assert_array_equal(a.target, b.target)
    np.testing.assert_array_equal(a.origin, b.origin)
    with pytest.raises(UserError, match=r"part-0\.parquet has no column 'z'"):
        read_panel(partitions, target_column="z", executor="ray")


def test_a_folder_and_a_glob_stand_for_their_files(partitions, tmp_path):
    assert equal(read_panel(str(tmp_path)), read_panel(partitions))
    assert equal(read_panel(str(tmp_path / "part-*.parquet")), read_panel(partitions))
    hourly("a", 3).drop("unique_id").write_parquet(tmp_path / "hive" / "unique_id=a" / "0.parquet", mkdir=True)
    assert read_panel(str(tmp_path / "hive")).ids == ("a",)
    with pytest.raises(UserError, match="no file matches"):
        read_panel(str(tmp_path / "none-*.csv"))


def test_no_table_and_no_such_executor():
    with pytest.raises(UserError, match="no table to read"):
        read_panel([])
    with pytest.raises(UserError, match="unknown executor 'spark'"):
        read_panel(["x.csv"], executor="spark")


def test_a_cluster_that_is_slow_to_start_is_started_again(monkeypatch):
    import ray

    tries = []

    def init(address, **options):
        tries.append((address, options["num_cpus"]))
        if len(tries) < 2:
            raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    ray_cluster(2)
    assert tries == [("local", 2)] * 2, "a cluster of somebody else on this machine is left alone"
    monkeypatch.setattr(ray, "init", lambda address, **options: (_ for _ in ()).throw(ValueError("no such option")))
    with pytest.raises(ValueError, match="no such option"):
        ray_cluster(2)
