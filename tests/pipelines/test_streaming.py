import json
import os
import threading
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import polars as pl
import pytest
import torch

from connectors.checkpoints import CheckpointError, CheckpointStore
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.base import Record
from pipelines.streaming.dials import Dials, Step
from pipelines.streaming.engine import Engine
from pipelines.streaming.event_time import EventTime, Frequency, Schedule, parse_duration
from pipelines.streaming.journal import Arrivals, pack_arrivals, pack_rows, unpack_arrivals
from pipelines.streaming.slots import Layout
from pipelines.streaming.worker import Stop, StreamSummary, work
from tests.pipelines.toy_memory import toy_model

SHARED = next((p / "shared" for p in Path(__file__).parents if (p / "shared/cases").is_dir()), Path("shared"))
MINUTE = 60_000_000
START = 1_704_067_200_000_000


OUTPUTS = ("out.csv", "alarms.ndjson", "dead.ndjson")


def case(name: str) -> Path:
    path = SHARED / "cases/series" / name
    if not path.exists():
        assert os.environ.get("TETHYS_REQUIRE_DATA") != "1", f"{path} is missing"
        pytest.skip(f"shared case {name} is absent")
    return path


def events(path: Path, streams: int, rows: int, seed: int = 0) -> Path:
    """Interleaved streams of unequal speed: some batches hold many rows of one stream, some few."""
    random = np.random.default_rng(seed)
    place = Counter()
    with open(path, "w") as file:
        for _ in range(rows):
            name = f"s{int(random.integers(streams) * random.random())}"
            ds = datetime(2024, 1, 1) + timedelta(minutes=place[name])
            place[name] += 1 + (random.random() < 0.05) * int(random.integers(1, 4))
            y = None if random.random() < 0.03 else round(float(random.normal(10, 2)), 3)
            file.write(json.dumps({"unique_id": name, "ds": ds.isoformat(), "y": y}) + "\n")
    return path


def run(source: Path, folder: Path, *, grace: str = "0s", version: str = "toy/1", **options) -> StreamSummary:
    folder.mkdir(exist_ok=True)
    policy = EventTime(Frequency.parse("1m"), grace=parse_duration(grace))
    store = CheckpointStore(folder / "c.db")
    sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
    try:
        return work(toy_model(version=version), policy, open_source(str(source)), store, *sinks, **options)
    finally:
        for thing in (*sinks, store):
            thing.close()


def digest(folder: Path) -> str:
    store = CheckpointStore(folder / "c.db")
    engine = Engine(toy_model(), EventTime(Frequency.parse("1m")), store)
    assert store.journal() == [], "a graceful stop leaves no journal"
    return engine.digest()


def test_forecasts_of_a_stream_do_not_depend_on_its_company(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 20, 600)
    run(source, tmp_path / "all", batch_rows=64)
    alone = tmp_path / "one.ndjson"
    alone.write_text("".join(line for line in source.open() if json.loads(line)["unique_id"] == "s1"))
    run(alone, tmp_path / "one", batch_rows=1)
    together = pl.read_csv(tmp_path / "all/out.csv").filter(pl.col("unique_id") == "s1")
    single = pl.read_csv(tmp_path / "one/out.csv")
    assert together.height == single.height > 0
    assert together.select("origin", "ds", "step").equals(single.select("origin", "ds", "step"))
    for name in ("q0.1", "q0.5", "q0.9", "surprise"):
        np.testing.assert_allclose(together[name], single[name], rtol=1e-5)


def test_rows_of_the_output(tmp_path: Path) -> None:
    source = tmp_path / "e.csv"
    source.write_text("unique_id,ds,y\na,2024-01-01 00:00,1\na,2024-01-01 00:01,\na,2024-01-01 00:04,3\n")
    summary = run(source, tmp_path / "r")
    rows = pl.read_csv(tmp_path / "r/out.csv", try_parse_dates=True)
    assert rows.columns == [
        *("unique_id", "origin", "ds", "step", "q0.1", "q0.5", "q0.9"),
        *("low", "high", "surprise", "anomaly", "model_version"),
    ]
    assert rows.height == 9 and rows["step"].to_list() == [1, 2, 3] * 3
    assert rows["ds"][3].replace(tzinfo=None) == datetime(2024, 1, 1, 0, 2)
    assert rows["q0.5"][3] == pytest.approx(rows["q0.5"][0], rel=1e-5), "a missing value is not learnt"
    assert rows["surprise"].null_count() == 9, "no forecast before the first row, no truth in the second, a gap then"
    assert rows["low"].to_list()[:6] == rows["q0.1"].to_list()[:6], "nothing was judged yet"
    assert summary.counters["accepted"] == 2 and summary.counters["missing"] == 1
    assert summary.counters["gap_steps"] == 2 and summary.stopped == "end of the source"


@pytest.mark.parametrize("stops", [[1], [60, 150], [37, 38, 39, 200]])
def test_stop_and_start_anywhere_changes_nothing(tmp_path: Path, stops: list[int]) -> None:
    source = events(tmp_path / "e.ndjson", 20, 240)
    run(source, tmp_path / "a", batch_rows=1, grace="2m")
    before = 0
    for stop in stops:
        assert run(source, tmp_path / "b", batch_rows=1, grace="2m", max_events=stop - before).events == stop - before
        before = stop
    last = run(source, tmp_path / "b", batch_rows=1, grace="2m")
    assert last.resumed and last.events == 240 - before
    for name in OUTPUTS:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_spilled_streams_come_back_as_they_went(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 60, 1500)
    run(source, tmp_path / "a", batch_rows=16)
    summary = run(source, tmp_path / "b", batch_rows=16, max_resident=20, snapshot_share=7)
    assert summary.spilled > 50 and summary.streams > 40
    assert (tmp_path / "a/out.csv").read_bytes() == (tmp_path / "b/out.csv").read_bytes()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


class Killed(Exception):
    pass


@pytest.mark.parametrize("max_resident", [1000, 20])
def test_a_crash_at_any_call_changes_nothing(tmp_path: Path, max_resident: int) -> None:
    """Dies (by exception, without any clean-up) before or after one of the steps that change something outside."""
    source = events(tmp_path / "e.ndjson", 40, 400)
    run(source, tmp_path / "a", batch_rows=16, grace="2m")
    random = np.random.default_rng(1)
    folder = tmp_path / "b"
    folder.mkdir()
    deaths = 0
    while True:
        left = int(random.integers(1, 30)) if deaths < 25 else 10**9

        def maybe(call):
            def wrapped(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                result = call(*args, **kwargs)
                left -= 1
                if left == 0:
                    raise Killed
                return result

            return wrapped

        store = CheckpointStore(folder / "c.db")
        output, _, dead = sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
        for thing, names in ((store, ("accept", "commit", "settle")), (output, ("write", "flush")), (dead, ("flush",))):
            for name in names:
                setattr(thing, name, maybe(getattr(thing, name)))
        try:
            policy = EventTime(Frequency.parse("1m"), grace=2 * MINUTE)
            options = {"batch_rows": 16, "snapshot_share": 5, "max_resident": max_resident}
            work(toy_model(), policy, open_source(str(source)), store, *sinks, **options)
            break
        except Killed:
            deaths += 1
        finally:
            for thing in (*sinks, store):
                thing.close()
    assert deaths >= 10
    for name in OUTPUTS:
        assert (tmp_path / "a" / name).read_bytes() == (folder / name).read_bytes()
    assert digest(tmp_path / "a") == digest(folder)


def test_replay_rebuilds_every_state_to_the_bit(tmp_path: Path) -> None:
    """Snapshots are staggered over the batches; the replay must not mix a stream's rows into a later snapshot."""
    model, policy = toy_model(), EventTime(Frequency.parse("1m"), grace=MINUTE)
    store = CheckpointStore(tmp_path / "c.db")
    store.claim({})
    engine = Engine(model, policy, store, max_resident=12)
    random = np.random.default_rng(0)
    place = Counter()
    for batch in range(1, 60):
        records = []
        for name in random.choice([f"s{i}" for i in range(30)], size=8):
            records.append(Record(name, START + place[name] * MINUTE, float(random.normal()), None, "p", batch))
            place[name] += 1
        arrivals = Arrivals(records)
        store.accept(batch, pack_arrivals(arrivals), {})
        outcome = engine.step(arrivals, batch)
        snapshots, keep_from = engine.slots.snapshots(batch, share=9)
        store.commit(
            batch,
            learnt=pack_rows(outcome.learnt, arrivals),
            receipts={},
            counters={},
            snapshots=snapshots,
            keep_from=keep_from,
        )
        engine.slots.committed(snapshots)
        if batch % 7 == 0:
            again = Engine(model, policy, store, max_resident=12)
            assert again.restore() is None
            assert again.digest() == engine.digest()
            assert len(store.journal()) < 25


def test_journal_keeps_everything(tmp_path: Path) -> None:
    batch = open_source(str(events(tmp_path / "e.ndjson", 3, 50))).poll(100, 0)
    arrivals = Arrivals(batch.records, [("malformed", "x", "p", 3, "raw")], ["a"])
    again = unpack_arrivals(pack_arrivals(arrivals))
    assert repr(list(again.records)) == repr(list(arrivals.records))  # repr: NaN equals NaN
    assert list(again.dead) == list(arrivals.dead) and again.flush == ["a"]


def test_case_late_stream(tmp_path: Path) -> None:
    source = case("09_late_stream") / "events.jsonl"
    summary = run(source, tmp_path / "a", grace="5m")
    wanted = {
        "received": 65,
        "parsed": 64,
        "accepted": 59,
        "missing": 1,
        "late": 1,
        "duplicate": 1,
        "conflict": 1,
        "quarantined": 1,
        "malformed": 1,
    }
    assert {name: summary.counters[name] for name in wanted} == wanted
    dead = [json.loads(line) for line in (tmp_path / "a/dead.ndjson").open()]
    assert sorted(d["reason"] for d in dead) == ["conflict", "late", "malformed", "quarantined"]
    assert next(d["offset"] for d in dead if d["reason"] == "malformed") == 65
    out = pl.read_csv(tmp_path / "a/out.csv", try_parse_dates=True)
    assert out.height == 60 * 3, "a forecast from every row, the missing one too"
    assert out["q0.5"].max() < 12, "the rejected 99.0 was not learnt"
    for rows in (1, 7, 64):
        run(source, tmp_path / f"b{rows}", grace="5m", batch_rows=rows, max_events=40)
        run(source, tmp_path / f"b{rows}", grace="5m", batch_rows=rows)
        assert (tmp_path / f"b{rows}/out.csv").read_bytes() == (tmp_path / "a/out.csv").read_bytes()
        assert digest(tmp_path / f"b{rows}") == digest(tmp_path / "a")


def test_case_resume(tmp_path: Path) -> None:
    source = case("16_resume") / "stream.csv"

    def hourly(folder: Path, **options) -> None:
        folder.mkdir(exist_ok=True)
        store = CheckpointStore(folder / "c.db")
        sinks = [open_sink(str(folder / name)) for name in OUTPUTS]
        work(toy_model("1h"), EventTime(Frequency.parse("1h")), open_source(str(source)), store, *sinks, **options)
        for thing in (*sinks, store):
            thing.close()

    hourly(tmp_path / "a")
    hourly(tmp_path / "b", max_events=300)
    hourly(tmp_path / "b")
    assert (tmp_path / "a/out.csv").read_bytes() == (tmp_path / "b/out.csv").read_bytes()
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_another_model_or_policy_is_refused(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 3, 30)
    run(source, tmp_path / "a", max_events=10)
    with pytest.raises(CheckpointError, match="made with model = toy/1, now it is toy/2"):
        run(source, tmp_path / "a", version="toy/2")
    with pytest.raises(CheckpointError, match="grace_us"):
        run(source, tmp_path / "a", grace="1m")
    (tmp_path / "a/out.csv").write_text("")
    with pytest.raises(UserError, match="committed"):
        run(source, tmp_path / "a")


def test_a_stop_is_graceful(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 3, 300)
    stop = Stop()
    counts = []

    def report(step: Step) -> None:
        counts.append(step.counters["received"])
        if len(counts) == 3:
            stop.set()

    summary = run(source, tmp_path / "a", batch_rows=10, stop=stop, report=report)
    assert summary.stopped == "signal" and summary.events == 40, "the batch already journalled is finished"
    run(source, tmp_path / "a", batch_rows=10)
    run(source, tmp_path / "b", batch_rows=10)
    assert (tmp_path / "a/out.csv").read_bytes() == (tmp_path / "b/out.csv").read_bytes()


def test_nothing_learns_through_autograd(tmp_path: Path) -> None:
    model = toy_model()
    seen = []
    inner = model.memory.observe

    def observe(*args):
        seen.append(torch.is_inference_mode_enabled())
        return inner(*args)

    model.memory.observe = observe  # type: ignore[method-assign]
    store = CheckpointStore(tmp_path / "c.db")
    Engine(model, EventTime(Frequency.parse("1m")), store).step(Arrivals([Record("a", START, 1.0, None, "p", 0)]), 1)
    assert seen == [True]


def test_metrics_and_health(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 3, 200)
    pages: dict[str, str] = {}
    with Dials(port=0) as dials:
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"{dials.address}/readyz")

        def report(step: Step) -> None:
            dials(step)
            pages.update({p: urlopen(dials.address + p).read().decode() for p in ("/metrics", "/healthz", "/readyz")})

        summary = run(source, tmp_path / "a", batch_rows=20, report=report)
    assert pages["/healthz"] == "alive\n" and pages["/readyz"] == "ready\n"
    metrics = dict(line.rsplit(" ", 1) for line in pages["/metrics"].splitlines() if not line.startswith("#"))
    counters = summary.counters
    assert float(metrics['tethys_events_total{verdict="accepted"}']) == counters["accepted"]
    assert float(metrics["tethys_coverage"]) == pytest.approx(counters["covered"] / counters["judged"])
    assert float(metrics["tethys_latency_seconds_count"]) == 200


def test_forecasts_on_a_schedule_are_those_of_every_row_at_its_times(tmp_path: Path) -> None:
    source = events(tmp_path / "e.ndjson", 6, 400)
    run(source, tmp_path / "every", batch_rows=32)
    few = run(source, tmp_path / "few", batch_rows=32, schedule=Schedule.parse("5m"))
    none = run(source, tmp_path / "none", batch_rows=32, schedule=Schedule.parse("demand"))
    numbers = {"surprise": pl.Float64, "anomaly": pl.Float64}
    every, some = (pl.read_csv(tmp_path / name / "out.csv", try_parse_dates=True, schema_overrides=numbers) for name in ("every", "few"))
    firsts = (
        every.filter(pl.col("step") == 1)
        .group_by("unique_id", pl.col("origin").dt.truncate("5m"), maintain_order=True)
        .first()
        .select("unique_id", pl.col("ds").dt.offset_by("-1m").alias("origin"))
    )
    expected = every.join(firsts, on=["unique_id", "origin"], how="semi")
    order = ["unique_id", "origin", "step"]
    assert some.height < every.height / 3 and some.sort(order).equals(expected.sort(order))
    assert (tmp_path / "none/out.csv").read_bytes() == b"" and none.counters["forecasts"] == 0
    assert few.counters["judged"] == none.counters["judged"] > 0, "all rows are learnt and watched"
    for name in ("few", "none"):
        assert digest(tmp_path / name) == digest(tmp_path / "every")
        assert (tmp_path / name / "alarms.ndjson").read_bytes() == (tmp_path / "every/alarms.ndjson").read_bytes()
    with pytest.raises(UserError, match="no schedule of forecasts: use every, demand"):
        Schedule.parse("sometimes")


def test_forecasts_when_asked(tmp_path: Path) -> None:
    """Of resident and spilled streams: what is answered is what stood in the output last, and nothing moves."""
    source = events(tmp_path / "e.ndjson", 40, 500)
    run(source, tmp_path / "a", batch_rows=16)
    rows = pl.read_csv(tmp_path / "a/out.csv")
    asked = ["s0", "s1", rows["unique_id"][0], "nobody"]  # the third is long spilled
    answers: dict[str, list[dict]] = {}
    replies: list[threading.Thread] = []
    with Dials(port=0) as dials:

        def ask(name: str) -> None:
            try:
                answers[name] = [json.loads(line) for line in urlopen(f"{dials.address}/forecast?unique_id={name}")]
            except HTTPError as error:
                answers[name] = [{"status": error.code, "text": error.read().decode()}]

        def report(step: Step) -> None:
            if step.counters["received"] == 496:
                for name in asked:
                    replies.append(threading.Thread(target=ask, args=(name,)))
                    replies[-1].start()
                time.sleep(0.2)  # all have asked

        run(source, tmp_path / "b", batch_rows=16, max_resident=16, report=report, answer=dials.answer)
        for reply in replies:
            reply.join()
    assert (tmp_path / "b/out.csv").read_bytes() == (tmp_path / "a/out.csv").read_bytes()
    assert digest(tmp_path / "b") == digest(tmp_path / "a")
    assert answers.pop("nobody") == [{"status": 404, "text": "there is no stream 'nobody'\n"}]
    for name, found in answers.items():
        assert [row["step"] for row in found] == [1, 2, 3]
        expected = rows.filter((pl.col("unique_id") == name) & (pl.col("origin") == found[0]["origin"]))
        np.testing.assert_allclose([row["q0.5"] for row in found], expected["q0.5"], rtol=1e-5)
        np.testing.assert_allclose([row["high"] for row in found], expected["high"], rtol=1e-5)


def test_a_state_with_a_tensor_of_no_bytes_comes_back_from_its_rows():
    state = (torch.arange(6, dtype=torch.float64).view(3, 2), torch.empty(3, 4, 0), torch.arange(3, dtype=torch.int16))
    layout = Layout(tuple(leaf[:1] for leaf in state))
    again = layout.state(layout.rows(state))
    assert [(leaf.dtype, leaf.shape) for leaf in again] == [(leaf.dtype, leaf.shape) for leaf in state]
    assert all(torch.equal(a, b) for a, b in zip(again, state, strict=True))
