import gzip
import json
import math
import os
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.base import MAX_RECORD_BYTES, Decoder, Record, parse_time, parse_value
from connectors.streams.files import FileSink, FileSource, ParquetSink, StdinSource


def lines(start: int, stop: int) -> str:
    return "".join(
        json.dumps({"unique_id": "a", "ds": f"2024-01-01T00:00:{n:02d}", "y": n}) + "\n" for n in range(start, stop)
    )


def values(batch) -> list[float]:
    return [r.y for r in batch.records]


def test_times_and_values() -> None:
    assert parse_time("2024-05-01T00:00:00+00:00") == parse_time("2024-05-01 00:00:00") == 1714521600_000000
    assert parse_time("2024-05-01T02:00:00+02:00") == parse_time(1714521600) == parse_time(1714521600000)
    assert parse_time("2024-05-01T00:00:00.123456Z") == 1714521600_123456
    assert math.isnan(parse_value("NaN")) and math.isnan(parse_value(None)) and math.isnan(parse_value(""))
    assert parse_value(" 1.5 ") == 1.5
    for bad in ("x", True, "inf", [1], 1e308):
        with pytest.raises((ValueError, TypeError)):
            parse_value(bad)
    for bad in ("yesterday", True, math.nan):
        with pytest.raises(ValueError):
            parse_time(bad)


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"unique_id": "a", "ds": "2024-01-01"}', "malformed", "no field 'y'"),
        (b'{"unique_id": "a", "ds": "2024-01-01", "y"', "malformed", ""),
        (b'{"unique_id": "a", "ds": "tomorrow", "y": 1}', "malformed", "tomorrow"),
        (b'{"unique_id": null, "ds": "2024-01-01", "y": 1}', "malformed", "not a name"),
        (b'{"unique_id": "a", "ds": "2024-01-01", "y": Infinity}', "malformed", "beyond"),
        (b"[1]", "malformed", "not a JSON object"),
        (b"\xff\xfe", "malformed", "decode"),
        (b"[" * 100_000, "malformed", ""),
        (b"x" * (MAX_RECORD_BYTES + 1), "oversize", str(MAX_RECORD_BYTES)),
    ],
)
def test_bad_records_become_dead_letters(line: bytes, reason: str, detail: str) -> None:
    letter = Decoder("json").decode(line, "p", 7)
    assert not isinstance(letter, Record)
    assert letter.reason == reason and detail in letter.detail and (letter.partition, letter.offset) == ("p", 7)
    assert len(letter.raw) <= 4096


def test_file_is_cut_by_position_and_resumes_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "e.ndjson"
    path.write_text(lines(0, 25).rstrip("\n"))
    source = FileSource(path)
    sizes, places = [], []
    while not source.ended:
        places.append(source.positions())
        sizes.append(len(source.poll(10, 0)))
    assert sizes == [10, 10, 5]
    for start, place in zip((0, 10, 20), places, strict=True):
        again = FileSource(path)
        again.seek(json.loads(json.dumps(place)))
        assert values(again.poll(100, 0)) == [float(n) for n in range(start, 25)]
        assert again.poll(1, 0).records == [] and again.ended


@pytest.mark.parametrize("name", ["e.csv", "e.csv.gz"])
def test_csv_with_mapped_columns(tmp_path: Path, name: str) -> None:
    text = 'sensor,date,OT,extra\n"a,b",2024-01-01,1.5,x\na,2024-01-02,,x\na,2024-01-03\n'
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    source = open_source(str(path), columns={"unique_id": "sensor", "ds": "date", "y": "OT"})
    batch = source.poll(1, 0)
    place = source.positions()
    assert batch.records[0].unique_id == "a,b"
    source = open_source(str(path), columns={"unique_id": "sensor", "ds": "date", "y": "OT"})
    source.seek(place)
    batch = source.poll(10, 0)
    assert math.isnan(batch.records[0].y)
    assert batch.dead[0].offset == 4 and "2 cells" in batch.dead[0].detail


def test_a_header_that_is_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "junk.csv"
    path.write_bytes(b"\xc1\x00\xff\n1,2,3\n")
    with pytest.raises(UserError, match="first line of the stream is no header of CSV"):
        open_source(str(path))


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"hello\n"])
def test_a_damaged_gzip_file_is_told(tmp_path: Path, damage) -> None:
    path = tmp_path / "rows.ndjson.gz"
    path.write_bytes(damage(gzip.compress(lines(0, 60).encode())))
    with pytest.raises(UserError, match="is no whole gzip file"):
        source = open_source(str(path))
        while not source.ended:
            source.poll(10, 0)


def test_follow_waits_for_whole_lines_and_survives_rotation(tmp_path: Path) -> None:
    path = tmp_path / "e.ndjson"
    path.write_text(lines(0, 3) + '{"unique_id"')
    source = FileSource(path, follow=True)
    assert values(source.poll(10, 0)) == [0, 1, 2] and not source.ended
    with open(path, "a") as file:
        file.write(': "a", "ds": "2024-01-01", "y": 3}\n')
    assert values(source.poll(10, 0)) == [3]
    place = source.positions()
    with open(path, "a") as file:
        file.write(lines(4, 5))
    os.rename(path, tmp_path / "e.ndjson.1")
    path.write_text(lines(5, 7))
    assert values(source.poll(10, 0)) == [4, 5, 6]
    # A restart from before the rotation finds the renamed file and reads its end first.
    again = FileSource(path, follow=True)
    again.seek(place)
    assert values(again.poll(10, 0)) == [4, 5, 6]
    # Truncated in place.
    path.write_text(lines(7, 8))
    assert values(source.poll(10, 0)) == [7]


def test_another_file_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "e.ndjson"
    path.write_text(lines(0, 5))
    source = FileSource(path)
    source.poll(3, 0)
    place = source.positions()
    copy = tmp_path / "moved" / "e.ndjson"
    copy.parent.mkdir()
    copy.write_text(lines(0, 5))
    moved = FileSource(copy)
    moved.seek(place)
    assert values(moved.poll(9, 0)) == [3, 4]
    path.write_text(lines(3, 20))
    with pytest.raises(UserError, match="not the file the checkpoint was made with"):
        FileSource(path).seek(place)


def test_an_oversize_line_is_refused_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "e.ndjson"
    path.write_text("x" * (3 * MAX_RECORD_BYTES) + "\n" + lines(0, 2))
    source = FileSource(path)
    batch = source.poll(10, 0)
    assert [d.reason for d in batch.dead] == ["oversize"] and values(batch) == [0, 1]
    assert source.positions()["e.ndjson"]["byte"] == path.stat().st_size


def test_standard_input(tmp_path: Path) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as handle:
        source = StdinSource(handle=handle)
        assert len(source.poll(5, 0.01)) == 0 and not source.ended
        os.write(write, lines(0, 3).encode() + b'{"unique_id": "a", "ds": "2024-01-01", "y": 3}')
        assert values(source.poll(2, 1)) == [0, 1]
        os.close(write)
        assert values(source.poll(5, 1)) == [2, 3]
        assert source.ended and source.positions() == {"stdin": {"line": 4}}


ROWS = pl.DataFrame(
    {"unique_id": ["a", "b"], "ds": [datetime(2024, 1, 1), datetime(2024, 1, 1, 0, 0, 0, 5000)], "q0.5": [1.0, 2.0]}
)


@pytest.mark.parametrize("name", ["o.csv", "o.ndjson", "o.parquet"])
def test_rows_after_the_receipt_are_taken_back(tmp_path: Path, name: str) -> None:
    def content() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    sink = open_sink(str(tmp_path / name))
    sink.resume(None)
    sink.write(ROWS)
    first = json.loads(json.dumps(sink.flush()))
    sink.write(ROWS.reverse())
    sink.flush()
    whole = content()
    sink.write(ROWS)
    sink.flush()
    with pytest.raises(UserError, match="another worker"):
        open_sink(str(tmp_path / name))
    sink.close()
    again = open_sink(str(tmp_path / name))
    again.resume(first)
    again.write(ROWS.reverse())
    again.flush()
    assert content() == whole
    again.close()
    fresh = open_sink(str(tmp_path / name))
    with pytest.raises(UserError, match="another run"):
        fresh.resume(None)
    with pytest.raises(UserError, match="committed"):
        fresh.resume(10**9 if name != "o.parquet" else 5)
    fresh.close()


def test_csv_output_reads_as_utc_times(tmp_path: Path) -> None:
    sink = FileSink(tmp_path / "o.csv")
    sink.resume(None)
    sink.write(ROWS)
    sink.flush()
    sink.close()
    assert (tmp_path / "o.csv").read_text().splitlines()[:3] == [
        "unique_id,ds,q0.5",
        "a,2024-01-01T00:00:00Z,1.0",
        "b,2024-01-01T00:00:00.005Z,2.0",
    ]


def test_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    for call, message in [
        (lambda: open_source(str(tmp_path / "no.csv")), "does not exist"),
        (lambda: open_source(str(tmp_path)), "cannot tell the form|is a folder"),
        (lambda: open_source(str(tmp_path / "e.csv")), r"no column .* it has \['a', 'b'\]"),
        (lambda: open_source(str(tmp_path / "empty.csv")), "is empty"),
        (lambda: open_source("ftp://x/y"), "no stream has an address"),
        (lambda: open_source("kafka://nohost"), "is not kafka://"),
        (lambda: open_sink(str(tmp_path / "x.txt")), "use .csv"),
        (lambda: open_sink(str(tmp_path / "no" / "x.csv")), "does not exist"),
        (lambda: ParquetSink(tmp_path / "e.csv"), "is a file"),
        (lambda: Decoder("json", {"value": "y"}), "cannot map"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_many_lines_at_once_are_read_as_each_alone() -> None:
    plain = [b'{"unique_id": "a", "ds": %d, "y": %d}' % (1_704_067_200 + n, n) for n in range(5)]
    stamped = [b'{"unique_id": "b", "ds": "2024-01-01T00:00:0%d", "y": null, "event_id": %d}' % (n, n) for n in range(3)]
    odd = [b"", b"{}", b"[1]", b'{"unique_id": true, "ds": 1, "y": 2}', b'{"unique_id": "", "ds": 1, "y": 2}', b'{"unique_id": 7, "ds": 1, "y": "2"}']
    odd += [b'{"unique_id": "a", "ds": 1e300, "y": 2}', b'{"unique_id": "a", "ds": 1, "y": 1e31}', b'{"unique_id": "a", "ds": true, "y": 2}']
    odd += [b'{"unique_id": "a", "ds": 1, "y": NaN}', b'{"unique_id": "a", "ds": 1}', b"x" * (MAX_RECORD_BYTES + 1)]
    for count_steps in (False, True):
        decoder = Decoder("json", count_steps=count_steps)
        for lines in (plain, plain + stamped, *([*plain, line] for line in odd), []):
            places, offsets = np.arange(len(lines), dtype=np.int32) % 2, np.arange(len(lines)) + 10
            records, dead, which = decoder.decode_all(lines, ["p", "q"], places, offsets)
            alone = [decoder.decode(line, "pq"[n % 2], n + 10) for n, line in enumerate(lines)]
            assert repr(list(records)) == repr([r for r in alone if isinstance(r, Record)])  # repr: NaN equals NaN
            assert dead == [r for r in alone if not isinstance(r, Record)]
            assert which.tolist() == [n for n, one in enumerate(alone) if isinstance(one, Record)]
