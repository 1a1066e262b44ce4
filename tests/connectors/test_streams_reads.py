"""FASTQ as a live source: any cut gives the same reads, a growing file is waited for, and a place can be gone back to."""

import gzip
import os
import random

import pytest

from connectors.errors import UserError
from connectors.sequences import SequenceError
from connectors.streams import reads as module
from connectors.streams.reads import ReadSource


def fastq(count, seed=0):
    """Four-line, wrapped and damaged reads: text, and the ids of the good and the bad ones."""
    choose = random.Random(seed)
    text, good, bad = [], [], []
    for i in range(count):
        bases = "".join(choose.choices("ACGTN", k=choose.randrange(1, 80)))
        kind = choose.random()
        if kind < 0.08:
            text.append(f"@b{i}\n{bases}\n+\n{'I' * (len(bases) + 1)}\n")
            bad.append(f"b{i}")
        elif kind < 0.2:
            half = len(bases) // 2 or 1
            lines = [part for part in (bases[:half], bases[half:]) if part]
            text.append(f"@w{i}\n" + "\n".join(lines) + "\n+\n" + "\n".join("I" * len(part) for part in lines) + "\n")
            good.append(f"w{i}")
        else:
            text.append(f"@r{i} lane\n{bases}\n+\n{'@' * len(bases)}\n")
            good.append(f"r{i}")
    return "".join(text), good, bad


def drain(source, size=7):
    good, bad = [], []
    while not source.ended:
        batch = source.poll(size, 0.0)
        assert len(batch) <= size
        good += [record.id for record in batch.records]
        bad += [each.detail for each in batch.dead]
    return good, bad


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("block", [50, 1000, 1 << 16])
def test_every_place_can_be_gone_back_to(tmp_path, monkeypatch, block, ending):
    monkeypatch.setattr("connectors.sequences.Bytes.read.__defaults__", (block,))
    text, good, bad = fastq(120)
    path = tmp_path / "r.fq"
    path.write_bytes(text.replace("\n", ending).encode())
    whole = drain(ReadSource(str(path)))
    assert whole[0] == good and [detail.split("`")[1] for detail in whole[1]] == bad
    source, seen = ReadSource(str(path)), ([], [])
    while not source.ended:
        again = ReadSource(str(path))
        again.seek(source.positions())
        assert again.positions() == {**source.positions(), "r.fq": {**source.positions()["r.fq"], "bytes": again.positions()["r.fq"]["bytes"]}}
        rest = drain(again, 1000)
        assert (seen[0] + rest[0], seen[1] + rest[1]) == whole
        batch = source.poll(11, 0.0)
        seen[0].extend(record.id for record in batch.records)
        seen[1].extend(each.detail for each in batch.dead)
    assert (seen[0], seen[1]) == whole


def test_a_growing_file_is_waited_for_read_by_read(tmp_path):
    path = tmp_path / "r.fq"
    path.write_text("")
    source = ReadSource(str(path), follow=True)
    assert len(source.poll(5, 0.01)) == 0 and not source.ended
    pieces = [("@a\nAC", []), ("GT\n+\nII", []), ("II\n@b\nA\n", ["a"]), ("+\nI\n", ["b"]), ("@c\nACGT\n+\nII\nII\n@d\nA\n+\nI\n", ["c", "d"])]
    with open(path, "a") as file:
        for text, ids in pieces:
            file.write(text)
            file.flush()
            found = []
            for _ in range(3):
                found += [record.id for record in source.poll(5, 0.01).records]
            assert found == ids
    assert not source.ended
    place = source.positions()
    again = ReadSource(str(path), follow=True)
    again.seek(place)
    assert len(again.poll(5, 0.01)) == 0
    with open(path, "a") as file:
        file.write("@e\nA\n+\nI\n")
    assert [record.id for record in again.poll(5, 0.5).records] == ["e"]


def test_a_pipe_is_read_as_it_comes(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    write = os.open(path, os.O_RDWR)
    source = ReadSource(path)
    assert len(source.poll(5, 0.01)) == 0
    os.write(write, b"@a\nACGT\n+\nIIII\n@b\nAC")
    assert [record.id for record in source.poll(5, 0.5).records] == ["a"]
    os.write(write, b"\n+\nII\n")
    assert [record.id for record in source.poll(5, 0.5).records] == ["b"]
    os.close(write)
    source.close()


def test_compressed_files_are_read_and_gone_back_to_but_not_followed(tmp_path):
    text, good, _ = fastq(60, seed=2)
    path = tmp_path / "r.fastq"
    path.write_bytes(gzip.compress(text.encode()))
    source = ReadSource(str(path))
    first = [record.id for record in source.poll(20, 0.0).records]
    again = ReadSource(str(path))
    again.seek(source.positions())
    assert first + drain(again)[0] == good
    with pytest.raises(UserError, match="cannot follow"):
        ReadSource(str(path), follow=True)


def test_another_file_a_shortened_one_and_no_fastq_are_named(tmp_path):
    path = tmp_path / "r.fq"
    text, _, _ = fastq(60, seed=3)
    path.write_text(text)
    source = ReadSource(str(path))
    source.poll(20, 0.0)
    place = source.positions()
    for other in ("@x\nA\n+\nI\n" + text, text[:300]):
        path.write_text(other)
        with pytest.raises(UserError, match="is not the file the checkpoint was made with"):
            ReadSource(str(path)).seek(place)
    path.write_text(">a\nACGT\n")
    with pytest.raises(SequenceError, match="looks like FASTA, expected FASTQ"):
        ReadSource(str(path))
    with pytest.raises(UserError, match="belongs to"):
        source.seek({"other.fq": {}})


def test_text_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_READ_BYTES", 1 << 18)
    path = tmp_path / "r.fq"
    path.write_text("@a\nA\n+\nI\n@b\n" + "A" * (1 << 20))
    source = ReadSource(str(path))
    with pytest.raises(SequenceError, match=r"record 2, line 5: no read ends within 0 MiB"):
        drain(source)
