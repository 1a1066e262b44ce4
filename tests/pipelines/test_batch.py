"""The scheduled job: resumable at every step, idempotent, and a bad series costs only itself."""

import contextlib
import io
import json
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest
import typer
from typer.testing import CliRunner

from connectors import tables
from connectors.errors import UserError
from pipelines.forecasting import batch, commands
from pipelines.forecasting.batch import Job, read_job, run_shards
from tests.pipelines import trained

START, AS_OF = datetime(2026, 1, 1), "2026-01-11"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return trained.loaded(tmp_path_factory.mktemp("model"))


def table(series=6, rows=264):
    """Eleven days: the last one is not known yet on the date of the run."""
    noise = np.random.default_rng(0).normal(size=(series, rows))
    day = np.sin(np.arange(rows) * 2 * np.pi / 24)
    return pl.concat(
        pl.DataFrame(
            {"unique_id": f"s{i}", "ds": [START + timedelta(hours=h) for h in range(rows)], "y": 100 * i + 10 * day + noise[i]}
        )
        for i in range(series)
    )


def job(folder, frame=None, **options):
    if frame is not None:
        tables.write(frame, folder / "table.parquet")
    settings = {
        "name": "nightly",
        "input": {"uri": str(folder / "table.parquet")},
        "output": {"uri": str(folder / "out" / "{as_of}.parquet")},
        "model": {"name": "load"},
        "series_per_shard": 2,
        "work": folder / "work",
        **options,
    }
    return Job.model_validate(settings)


def row_hash(path):
    return Path(path).read_bytes()


def test_every_series_is_forecast_from_the_rows_before_the_date(tmp_path, model):
    frame = table()
    summary = run_shards(job(tmp_path, frame), model, AS_OF)
    out = tables.read(summary.output)
    assert summary.series == 6 and summary.failed == 0 and summary.shards == 3 and summary.rows == out.height == 72
    assert out["ds"].min() == datetime(2026, 1, 11) and out["ds"].max() == datetime(2026, 1, 11, 11)
    assert out.columns == ["unique_id", "ds", "mean", "q0.025", "q0.1", "q0.5", "q0.9", "q0.975", "as_of", "model", "short_history"]
    assert out.select("unique_id", "ds").equals(out.select("unique_id", "ds").unique().sort("unique_id", "ds"))
    # What came later changes nothing.
    late = pl.when(pl.col("ds") >= datetime(2026, 1, 11)).then(1e6).otherwise("y")
    again = run_shards(job(tmp_path, frame.with_columns(y=late)), model, AS_OF)
    assert row_hash(again.output) == row_hash(summary.output) and again.resumed == 3
    # And the numbers are those of the model at work on one series alone.
    alone = frame.filter((pl.col("unique_id") == "s4") & (pl.col("ds") < datetime(2026, 1, 11)))
    expected = model.estimator.predict(alone)
    np.testing.assert_allclose(out.filter(unique_id="s4")["q0.9"], expected["q0.9"], rtol=1e-6)


def test_running_again_changes_nothing_and_a_corrected_row_costs_one_shard(tmp_path, model):
    frame = table()
    first = run_shards(job(tmp_path, frame), model, AS_OF)
    bytes_ = row_hash(first.output)
    second = run_shards(job(tmp_path), model, AS_OF)
    assert second.resumed == 3 and row_hash(second.output) == bytes_ and second.run_key == first.run_key
    corrected = frame.with_columns(y=pl.when((pl.col("unique_id") == "s5") & (pl.col("ds") == START)).then(900.0).otherwise("y"))
    third = run_shards(job(tmp_path, corrected), model, AS_OF)
    assert third.resumed == 2 and row_hash(third.output) != bytes_
    assert len(list((tmp_path / "work/nightly" / first.run_key).glob("shard-*.parquet"))) == 6, "no part of the old rows stays"


class Killed(BaseException):
    pass


def test_killed_at_every_step_and_run_again_gives_the_same_table(tmp_path, model, monkeypatch):
    frame = table()
    (tmp_path / "a").mkdir()
    undisturbed = row_hash(run_shards(job(tmp_path / "a", frame), model, AS_OF).output)
    write, calls = tables.write, []
    monkeypatch.setattr(tables, "write", lambda *a, **k: (calls.append(1), write(*a, **k)))
    (tmp_path / "b").mkdir()
    write(frame, tmp_path / "b" / "table.parquet")
    run_shards(job(tmp_path / "b"), model, AS_OF)
    steps = len(calls)
    assert steps == 8, "two files a shard, the failures, the output"
    for at in range(steps):
        for after in (False, True):
            here = tmp_path / f"c{at}{after}"
            here.mkdir()
            write(frame, here / "table.parquet")
            count = iter(range(steps))

            def dying(*args, count=count, at=at, after=after, **options):
                if next(count) == at:
                    if after:
                        write(*args, **options)
                    raise Killed
                write(*args, **options)

            monkeypatch.setattr(tables, "write", dying)
            with pytest.raises(Killed):
                run_shards(job(here), model, AS_OF)
            monkeypatch.setattr(tables, "write", write)
            summary = run_shards(job(here), model, AS_OF)
            assert row_hash(summary.output) == undisturbed
            assert summary.resumed == min(3, (at + after) // 2)


@pytest.mark.parametrize("kill_at", [1, 4])
def test_a_process_killed_by_the_system_leaves_whole_parts(tmp_path, model, kill_at):
    frame = table()
    (tmp_path / "a").mkdir()
    undisturbed = row_hash(run_shards(job(tmp_path / "a", frame), model, AS_OF).output)
    tables.write(frame, tmp_path / "table.parquet")
    code = f"""
import json, os, pathlib, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from connectors import tables
from pipelines.forecasting.batch import Loaded, run_shards
from tests.pipelines.test_batch import job
write, count = tables.write, iter(range(100))
def dying(frame, uri, **options):
    if next(count) == {kill_at}:
        # In the middle: bytes on the disk, nothing renamed.
        pathlib.Path(str(uri) + '.torn').write_bytes(b'PAR1')
        os.kill(os.getpid(), signal.SIGKILL)
    write(frame, uri, **options)
tables.write = dying
folder = pathlib.Path({str(tmp_path)!r})
model = Loaded({model.name!r}, pathlib.Path({str(model.weights)!r}), json.loads({json.dumps(model.config)!r}))
run_shards(job(folder), model, {AS_OF!r})
"""
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert died.returncode == -9, died.stderr
    summary = run_shards(job(tmp_path), model, AS_OF)
    assert row_hash(summary.output) == undisturbed and summary.resumed == kill_at // 2


def test_a_bad_series_costs_only_itself(tmp_path, model):
    frame = table(5)
    nothing = table(1).with_columns(unique_id=pl.lit("empty"), y=pl.lit(None, pl.Float64))
    twice = pl.concat([frame.filter(unique_id="s1")[:1], frame.filter(unique_id="s1")]).with_columns(unique_id=pl.lit("twice"))
    gap = frame.filter(unique_id="s2").with_columns(unique_id=pl.lit("gap"))[[i for i in range(264) if i != 50]]
    infinite = frame.filter(unique_id="s3").with_columns(unique_id=pl.lit("infinite"), y=pl.lit(float("inf")))
    old = frame.filter(unique_id="s3").with_columns(unique_id=pl.lit("old"))[:100]
    short = frame.filter(unique_id="s4").with_columns(unique_id=pl.lit("young"))[230:]
    no_id = frame[:1].with_columns(unique_id=pl.lit(None, pl.String))
    everything = pl.concat([frame, nothing, twice, gap, infinite, old, short, no_id])
    summary = run_shards(job(tmp_path, everything, stale_after=24, series_per_shard=3), model, AS_OF)
    out = tables.read(summary.output)
    assert set(out["unique_id"]) == {"s0", "s1", "s2", "s3", "s4", "young"} and out.filter(unique_id="young")["short_history"].all()
    assert not out.filter(unique_id="s0")["short_history"].any()
    told = dict(tables.read(summary.failures_file).with_columns(pl.col("unique_id").fill_null("")).iter_rows())
    assert set(told) == {"", "empty", "twice", "gap", "infinite", "old"} and summary.failed == 6
    assert "duplicates: 1 rows (first 2026-01-01" in told["twice"] and "gaps" in told["gap"] and "stale" in told["old"]
    assert "6 failed" in summary.line() and "6 series forecast" in summary.line()
    # The good ones are what they would have been without the bad ones beside them.
    (tmp_path / "good").mkdir()
    good = tables.read(run_shards(job(tmp_path / "good", frame), model, AS_OF).output)
    np.testing.assert_allclose(out.filter(unique_id="s0")["mean"], good.filter(unique_id="s0")["mean"], rtol=1e-6)
    masked = run_shards(job(tmp_path, stale_after=24, rules={"gaps": "mask", "duplicates": "last"}), model, AS_OF)
    assert masked.failed == 4 and masked.run_key != summary.run_key


def test_a_fault_in_the_middle_of_a_shard_is_laid_at_the_door_of_its_series(tmp_path, model, monkeypatch):
    whole = batch.forecast_panel

    def forecast(estimator, panel, horizon, **options):
        if "s3" in panel.ids:
            raise RuntimeError("boom")
        return whole(estimator, panel, horizon, **options)

    monkeypatch.setattr(batch, "forecast_panel", forecast)
    summary = run_shards(job(tmp_path, table()), model, AS_OF)
    assert summary.series == 5 and summary.failures == {"s3": "RuntimeError: boom"}


def test_one_table_for_all_dates(tmp_path, model):
    settings = {"output": {"uri": str(tmp_path / "all.parquet"), "keep_other_dates": True}}
    run_shards(job(tmp_path, table(), **settings), model, "2026-01-10")
    both = run_shards(job(tmp_path, **settings), model, AS_OF)
    once = row_hash(both.output)
    run_shards(job(tmp_path, **settings), model, AS_OF)
    run_shards(job(tmp_path, **settings), model, "2026-01-10")
    out = tables.read(both.output)
    assert row_hash(both.output) == once and out.height == 2 * 72
    assert out.select("as_of", "unique_id", "ds").is_unique().all()


@pytest.mark.parametrize("kind", ["postgresql", "delta"])
def test_one_table_for_all_dates_on_a_server(tmp_path, model, kind, request):
    """From a query or a table of a server into one table for all dates: a night that is repeated replaces its own rows."""
    if kind == "postgresql":
        address = request.getfixturevalue("postgres").database()
        tables.write(table(), f"{address}#sales")
        source, target = f"{address}#SELECT * FROM sales WHERE unique_id <> 's5'", f"{address}#forecasts"
    else:
        tables.write(table().filter(pl.col("unique_id") != "s5"), f"delta://{tmp_path}/sales")
        source, target = f"delta://{tmp_path}/sales", f"delta://{tmp_path}/forecasts"
    settings = {"input": {"uri": source}, "output": {"uri": target, "keep_other_dates": True}}
    for night in ("2026-01-10", AS_OF, "2026-01-10", AS_OF):
        done = run_shards(job(tmp_path, **settings), model, night)
        assert done.output == target and done.series == 5
    out = tables.read(target).sort("as_of", "unique_id", "ds")
    assert out.height == 2 * 60 and out.select("as_of", "unique_id", "ds").is_unique().all()
    here = run_shards(job(tmp_path, table().filter(pl.col("unique_id") != "s5")), model, AS_OF)
    expected = tables.read(here.output)
    np.testing.assert_allclose(out.filter(as_of=AS_OF)["q0.9"], expected["q0.9"])


def test_zone_in_zone_out(tmp_path, model):
    frame = table().with_columns(pl.col("ds").dt.replace_time_zone("UTC").dt.convert_time_zone("America/New_York"))
    summary = run_shards(job(tmp_path, frame, zone="America/New_York"), model, "2026-01-10")
    ds = tables.read(summary.output)["ds"]
    assert ds.dtype.time_zone == "America/New_York" and ds.min().isoformat() == "2026-01-10T00:00:00-05:00"


def test_csv_is_staged_and_gives_the_same_numbers(tmp_path, model):
    parquet = tables.read(run_shards(job(tmp_path, table()), model, AS_OF).output)
    tables.write(table().sample(fraction=1.0, shuffle=True, seed=1), tmp_path / "t.csv")
    summary = run_shards(job(tmp_path, input={"uri": str(tmp_path / "t.csv")}), model, AS_OF)
    assert tables.read(summary.output).drop("model").equals(parquet.drop("model"))


@pytest.mark.ray
def test_a_worker_killed_in_the_middle_costs_nothing_but_time(tmp_path, model):
    (tmp_path / "a").mkdir()
    undisturbed = row_hash(run_shards(job(tmp_path / "a", table(12)), model, AS_OF).output)
    killed, over = [], threading.Event()

    def kill_one():
        while not killed and not over.is_set():
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "_shard_or_mistake" in " ".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        summary = run_shards(job(tmp_path, table(12), executor="ray", series_per_shard=3), model, AS_OF)
    finally:
        over.set()
        killer.join()
        import ray  # its settings are read at import, and the job makes them

        ray.shutdown()
    assert killed and summary.shards == 4 and summary.failed == 0
    local = run_shards(job(tmp_path / "a", series_per_shard=3), model, AS_OF)
    assert row_hash(summary.output) == row_hash(local.output)
    assert tables.read(summary.output).select("unique_id", "ds").equals(pl.read_parquet(io.BytesIO(undisturbed)).select("unique_id", "ds"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no settings"),
        ("name: x\nmodel: {name: m}\noutput: {uri: o.parquet}\ninput: {uri: 'postgresql://me:hunter2@db/x#t'}", "input.uri: .*must not hold a pass"),
        ("a: [", "is no YAML"),
        ("name: x\nmodel: {name: m}\noutput: {uri: o.parquet}\ninput: {url: t}", "input.uri: Field required; input.url: Extra"),
        ("name: a/b\nmodel: {name: m}\noutput: {uri: o}\ninput: {uri: t}", "name: String should match"),
        ("name: x\nmodel: {name: m}\noutput: {uri: o}\ninput: {uri: t}\nrules: {gap: mask}", "unknown gap; there are ambiguous, dup"),
    ],
)
def test_a_job_file_at_fault_is_told_field_by_field(tmp_path, text, message):
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_job(tmp_path / "job.yaml")


def test_mistakes_of_the_run(tmp_path, model):
    with pytest.raises(UserError, match="'yesterday' is no date"):
        run_shards(job(tmp_path, table()), model, "yesterday")
    with pytest.raises(UserError, match="no series of .* could be forecast as of 2020-01-01"):
        run_shards(job(tmp_path), model, "2020-01-01")
    with pytest.raises(UserError, match="has no column 'value'"):
        run_shards(job(tmp_path, input={"uri": str(tmp_path / "table.parquet"), "target_column": "value"}), model, AS_OF)


def test_the_command_from_the_registry_to_the_exit_status(tmp_path, model):
    from pipelines import tracking

    uri = f"sqlite:///{tmp_path}/store.db"
    store = tracking.open_store(uri)
    example = table(1)[:24]
    with tracking.run(store, "train") as trained_run:
        tracking.register_forecaster(
            trained_run, model.weights, model.config, name="load", alias="champion", input_example=example,
            output_example=model.estimator.predict(example), params={"horizon": 12, "quantiles": [0.1, 0.5, 0.9]},
        )  # fmt: skip
    frame = pl.concat([table(2), table(1).with_columns(unique_id=pl.lit("bad"), y=pl.lit(None, pl.Float64))])
    tables.write(frame, tmp_path / "table.parquet")
    (tmp_path / "job.yaml").write_text(
        f"name: nightly\ninput: {{uri: {tmp_path}/table.parquet}}\noutput: {{uri: '{tmp_path}/out.parquet'}}\n"
        f"model: {{name: load}}\ntracking_uri: {uri}\nwork: {tmp_path}/work\nseries_per_shard: 2\n"
    )
    app = typer.Typer()
    app.add_typer(commands.forecasts, name="forecast")
    app.command()(commands.validate)
    done = CliRunner().invoke(app, ["forecast", "run", str(tmp_path / "job.yaml"), "--as-of", AS_OF])
    assert done.exit_code == 3, done.output
    assert done.output.count("\n") == 1 and "2 series forecast by load/1, 1 failed (bad: " in done.output
    runs = store.client.search_runs([store.experiment_id], "params.as_of = '2026-01-11'")
    (parent,) = runs
    assert parent.data.metrics["series"] == 2 and parent.data.metrics["failed"] == 1
    children = store.client.search_runs([store.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'")
    assert sorted(c.info.run_name for c in children) == ["shard 0", "shard 1"]
    assert {c.data.metrics["rows"] for c in children} == {12.0}


def test_the_example_is_a_job():
    assert read_job(ROOT / "docs" / "examples" / "job.yaml").rules.gaps == "mask"
