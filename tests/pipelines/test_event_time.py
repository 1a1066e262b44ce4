import json
import math
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from connectors.errors import UserError
from connectors.streams import open_source
from connectors.streams.base import Record, Records, parse_time
from pipelines.streaming.event_time import VERDICTS, Clock, Clocks, EventTime, Frequency, Row, parse_duration

MINUTE = 60_000_000
SHARED = next((p / "shared" for p in Path(__file__).parents if (p / "shared/cases").is_dir()), Path("shared"))
CASE = SHARED / "cases/series/09_late_stream/events.jsonl"
START = parse_time("2024-05-01")


def event(minute: float, y: float = 1.0, event_id: str | None = None) -> Record:
    return Record("s", START + round(minute * MINUTE), y, event_id, "p", 0)


def run(events: list[Record], **policy) -> tuple[list[str], list[Row], Clock]:
    clock, out = Clock(), []
    rules = EventTime(Frequency.parse("1m"), **policy)
    verdicts = []
    for e in events:
        verdicts.append(clock.feed(e, rules, out))
        clock = Clock.load(json.loads(json.dumps(clock.dump())))  # state is JSON at any moment
    return verdicts, out, clock


def minutes(rows: list[Row]) -> list[float]:
    return [(row.ds - START) / MINUTE for row in rows]


def test_out_of_order_within_grace_is_put_in_its_place() -> None:
    verdicts, rows, clock = run([event(m) for m in (0, 1, 3, 2, 4, 5)], grace=2 * MINUTE)
    assert verdicts == ["accepted"] * 6 and minutes(rows) == [0, 1, 2, 3]
    clock.flush("s", EventTime(Frequency.parse("1m")), rows)
    assert minutes(rows) == [0, 1, 2, 3, 4, 5]


def test_late_means_its_place_has_passed() -> None:
    verdicts, rows, _ = run([event(m) for m in (0, 1, 5, 2)])
    assert verdicts[-1] == "late" and minutes(rows) == [0, 1, 5] and rows[-1].gap == 3


def test_repeats_and_contradictions() -> None:
    a, b = event(0, 1.0, "a"), event(1, 2.0, "b")
    assert run([a, b, b, a])[0][2:] == ["duplicate", "duplicate"]
    assert run([a, b, event(1, 9.0, "b")])[0][2] == "conflict"
    assert run([a, b, event(1, 9.0, "c")])[0][2] == "conflict"
    assert run([a, b, event(2, 2.0, "b")])[0][2] == "conflict", "one event id, two times"
    assert run([event(0, math.nan), event(0, math.nan)])[0] == ["missing", "duplicate"]
    verdicts, rows, _ = run([a, b, event(1, 9.0, "b"), event(3), event(1, 8.0, "b")], grace=MINUTE, conflict="last")
    assert [row.y for row in rows] == [1.0, 9.0]
    assert verdicts[2] == "corrected" and verdicts[4] == "conflict", "what was learnt is not unlearnt"


def test_one_far_future_event_does_not_move_the_clock_but_many_do() -> None:
    far = 60 * 24 * 365
    assert run([event(0), event(far), event(1)])[0] == ["accepted", "quarantined", "accepted"]
    verdicts, rows, _ = run([event(0)] + [event(far + n) for n in range(12)])
    assert verdicts == ["accepted"] + ["quarantined"] * 9 + ["accepted"] * 3
    assert minutes(rows)[1:] == [far + 9, far + 10, far + 11]


def test_off_grid_is_refused() -> None:
    assert run([event(0), event(1.5)])[0] == ["accepted", "off_grid"]


def test_frequencies() -> None:
    month = Frequency.parse("1mo")
    jan, feb, mar = (parse_time(f"2024-{d}") for d in ("01-31", "02-29", "03-31"))
    assert month.after(np.array([jan, jan]), 2).tolist() == [[feb, mar]] * 2
    assert month.between(jan, mar) == 2 and month.between(feb, mar) == 1
    assert month.between(jan, parse_time("2024-03-30")) is None
    assert month.between(parse_time("2024-01-15"), parse_time("2024-04-15")) == 3
    assert Frequency.parse("1q").between(jan, feb) is None
    assert Frequency.parse("15m").after(np.array([START]), 2).tolist() == [[START + 15 * MINUTE, START + 30 * MINUTE]]
    assert month.before(np.array([mar]), 2).tolist() == [[jan, feb]]
    assert Frequency.parse("15m").before(np.array([START]), 2).tolist() == [[START - 30 * MINUTE, START - 15 * MINUTE]]
    assert Frequency.parse("2i").after(np.array([5]), 2).tolist() == [[7, 9]]
    assert parse_duration("5m") == 5 * MINUTE
    for bad in ("", "x", "0h"):
        with pytest.raises(UserError):
            Frequency.parse(bad)
    with pytest.raises(UserError):
        parse_duration("soon")
    with pytest.raises(UserError):
        EventTime(month, conflict="first")


def test_case_late_stream() -> None:
    if not CASE.exists():
        assert os.environ.get("TETHYS_REQUIRE_DATA") != "1", f"{CASE} is missing"
        pytest.skip("shared case 09_late_stream is absent")
    batch = open_source(str(CASE)).poll(1000, 0)
    assert len(batch) == 65
    assert [(d.reason, d.offset) for d in batch.dead] == [("malformed", 65)]
    policy, clock, rows = EventTime(Frequency.parse("1m"), grace=parse_duration("5m")), Clock(), []
    verdicts = Counter(clock.feed(r, policy, rows) for r in batch.records)
    assert verdicts == {"accepted": 59, "missing": 1, "late": 1, "duplicate": 1, "conflict": 1, "quarantined": 1}
    clock.flush("sensor/1", policy, rows)
    times = [row.ds for row in rows]
    assert times == sorted(set(times)) and len(rows) == 60
    place = minutes(rows)
    assert 20 in place and 30 not in place and 60 in place
    assert rows[place.index(39)].y == 11.066 and math.isnan(rows[-1].y)


@pytest.mark.parametrize("grace", [0, 2 * MINUTE])
def test_many_clocks_say_what_each_alone_says(grace: int) -> None:
    """Random events of all kinds, in batches of all sizes, some streams with event ids."""
    random = np.random.default_rng(0)
    policy = EventTime(Frequency.parse("1m"), grace=grace, remember=4, confirm=3)
    many, alone = Clocks(8, 4), [Clock() for _ in range(8)]
    now = [0] * 8
    for _ in range(300):
        records, slots = [], []
        for _ in range(int(random.integers(1, 20))):
            slot, kind = int(random.integers(8)), random.random()
            now[slot] += 1 + int(random.random() < 0.1)
            minute = now[slot] - (int(random.integers(1, 6)) if kind < 0.1 else 0) + (5000 if kind > 0.99 else 0) + (0.5 if 0.5 < kind < 0.52 else 0)
            y = math.nan if 0.2 < kind < 0.25 else float(random.integers(3))
            name = f"e{int(random.integers(50))}" if slot < 2 and kind < 0.5 else None
            records.append(Record(str(slot), START + round(minute * MINUTE), y, name, "p", 0))
            slots.append(slot)
        verdicts, released = many.feed(np.array(slots), Records.of(records), policy)
        rows: list[Row] = []
        expected = [alone[slot].feed(record, policy, rows) for slot, record in zip(slots, records, strict=True)]
        assert [VERDICTS[code] for code in verdicts] == expected
        found = [Row(str(s), int(t), float(y), int(g)) for s, t, y, g in zip(*released, strict=True)]
        assert repr(found) == repr(rows)  # repr: NaN equals NaN
        for slot, clock in enumerate(alone):
            assert repr(many.get(slot).dump()) == repr(clock.dump())
        back = int(random.integers(8))  # as after a spill
        many.put(back, Clock.load(json.loads(json.dumps(many.get(back).dump()))))
    assert len(many.special) < 8 or grace
