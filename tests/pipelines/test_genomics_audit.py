"""The dataset audit: what it must find on the shared files, and the same faults in made data."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from connectors.sequences import Interval, SequenceError, reverse_complement
from pipelines.genomics.audit import audit, audit_intervals, clusters, overlapping, split_by
from pipelines.genomics.datasets import Labelled, LabelledIntervals, read_folder, read_interval_folder, read_labelled

DATA = Path(__file__).parents[2] / "../shared/data/sequences"


@pytest.fixture
def shared():
    def find(name):
        path = DATA / name
        if not path.exists():
            if os.environ.get("TETHYS_REQUIRE_DATA") == "1":
                pytest.fail(f"shared data {name} are required and absent")
            pytest.skip(f"shared data {name} are absent")
        return path

    return find


def made(count, length=60, seed=0, labels=("a", "b")):
    choose = random.Random(seed)
    sequences = ["".join(choose.choices("ACGT", k=length)) for _ in range(count)]
    return Labelled(sequences, [choose.choice(labels) for _ in range(count)], [f"s{seed}_{i}" for i in range(count)])


# The shared files -----------------------------------------------------------------------------------------------------


def test_gue_tf_4_shares_358_dev_rows_with_train(shared):
    folder = shared("gue/tf/4")
    report = audit({name: read_labelled(folder / f"{name}.csv.gz") for name in ("train", "dev", "test")})
    assert report.verdict == "refuse"
    leak = report.find("rows that are in train", "dev")
    assert (leak.count, leak.total, leak.verdict) == (358, 1000, "refuse")
    assert report.find("rows that are in train", "test").count == 0
    assert report.find("repeated sequences", "train").count == 3789
    near = report.find("rows with half of their 16-mers in train", "test")
    assert near.count > 50 and near.detail == f"0: {near.count}"  # all of them negatives
    assert report.find("rows sorted by label", "test").verdict == "warn"


def test_human_enhancers_cohn_overlaps_in_47_of_6948_rows(shared):
    report = audit_intervals(read_interval_folder(shared("genomic_benchmarks/intervals/human_enhancers_cohn")))
    found = report.find("rows that overlap a train row", "test")
    assert (found.count, found.total) == (47, 6948)
    assert len(report.clean["test"]) == 6948 - 47


def test_length_alone_scores_91_percent_on_human_ensembl_regulatory(shared):
    report = audit_intervals(read_interval_folder(shared("genomic_benchmarks/intervals/human_ensembl_regulatory")))
    found = report.find("length alone", "test")
    assert found.score == pytest.approx(0.915, abs=5e-4)
    assert (found.verdict, found.detail) == ("refuse", "majority 37.0 %")
    assert report.find("rows that overlap a train row", "test").count == 0


def test_uci_splice_repeats_185_sequences(shared):
    rows = read_labelled(shared("uci/splice.data"), columns=("label", "id", "sequence"))
    report = audit({"all": rows})
    assert report.find("repeated sequences", "all").count == 185
    assert report.find("sequences with two labels", "all").count == 1
    assert report.find("rows sorted by label", "all").verdict == "warn"


# Made data ------------------------------------------------------------------------------------------------------------


def test_clean_random_data_pass():
    report = audit({"train": made(400, seed=1), "test": made(200, seed=2)})
    assert report.verdict == "pass", report.text()
    assert report.clean["test"] == list(range(200))


def test_the_other_strand_and_near_copies_are_found():
    train = made(300, seed=1)
    test = made(100, seed=2)
    test.sequences[3] = train.sequences[5]
    test.sequences[4] = reverse_complement(train.sequences[6].encode()).decode().lower()
    test.sequences[5] = train.sequences[7][10:] + test.sequences[5][:10]
    test.sequences[6] = reverse_complement(train.sequences[8][8:].encode()).decode() + test.sequences[6][:8]
    report = audit({"train": train, "test": test})
    assert report.find("rows that are in train", "test").count == 1
    assert report.find("rows whose other strand is in train", "test").count == 1
    assert report.find("rows with half of their 16-mers in train", "test").count == 2
    assert report.clean["test"] == [i for i in range(100) if i not in (3, 4, 5, 6)]


def test_case_that_is_the_label_refuses():
    train, test = made(200, seed=1), made(100, seed=2)
    for rows in (train, test):
        rows.sequences[:] = [s.lower() if label == "a" else s for s, label in zip(rows.sequences, rows.labels, strict=True)]
    report = audit({"train": train, "test": test})
    found = report.find("case alone", "test")
    assert (found.score, found.verdict) == (1.0, "refuse")


def intervals_of(count, seed, contigs=("chr1", "chr2")):
    choose = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        start = int(choose.integers(0, 10_000_000))
        rows.append(Interval(str(choose.choice(contigs)), start, start + int(choose.integers(50, 500)), str(i), "+", i))
    return LabelledIntervals(rows, [str(label) for label in choose.choice(["negative", "positive"], count)])


def test_overlap_equals_the_pairwise_definition():
    train, other = intervals_of(600, 1), intervals_of(300, 2)
    brute = [any(a.contig == b.contig and a.start < b.end and b.start < a.end for a in train.intervals) for b in other.intervals]
    assert overlapping(train, other).tolist() == brute
    assert 0 < sum(brute) < 300


def test_test_rows_with_the_coordinates_of_train_rows_are_found():
    """The pattern of human_enhancers_ensembl: three of four positives of the test split are train rows."""
    train, test = intervals_of(2000, 1), intervals_of(800, 2)
    positives = [row for row in train.intervals[:600]]
    train.labels[:600] = ["positive"] * 600
    test.intervals[:600] = positives
    test.labels[:600] = ["positive"] * 600
    report = audit_intervals({"train": train, "test": test})
    assert report.find("rows with the coordinates of a train row", "test").count == 600
    lookup = report.find("look-up of train coordinates", "test")
    assert lookup.score is not None and lookup.score > 0.85
    assert report.verdict == "refuse"


def test_splits_keep_groups_together():
    groups = [f"chr{i % 9}" for i in range(900)]
    found = split_by(groups, {"train": 0.7, "test": 0.3})
    assert sorted(row for rows in found.values() for row in rows) == list(range(900))
    assert not {groups[i] for i in found["train"]} & {groups[i] for i in found["test"]}
    assert 0.2 < len(found["test"]) / 900 < 0.4


def test_clusters_join_near_copies():
    rows = made(50, seed=4)
    sequences = [*rows.sequences, rows.sequences[3][5:] + "ACGTA", reverse_complement(rows.sequences[4].encode()).decode()]
    found = clusters(sequences)
    assert found[50] == found[3] and found[51] == found[4]
    assert len(set(found)) == 50


def test_folders_in_the_official_layout(tmp_path):
    rows = made(30, seed=6)
    for split, part in (("train", range(20)), ("test", range(20, 30))):
        for i in part:
            folder = tmp_path / split / rows.labels[i]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}.txt").write_text(rows.sequences[i])
    found = read_folder(tmp_path)
    assert (len(found["train"]), len(found["test"])) == (20, 10)
    assert set(found["train"].labels) == {"a", "b"}
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(SequenceError, match="holds no class folder"):
        read_folder(tmp_path / "empty", splits=["train"])


def test_a_row_without_label_is_an_error(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("sequence,label\nACGT,a\nACGT,\n")
    with pytest.raises(SequenceError, match=r"record 2 .*has no label"):
        read_labelled(path)
