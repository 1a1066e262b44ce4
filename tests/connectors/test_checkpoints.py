import sqlite3
from pathlib import Path

import pytest

from connectors import checkpoints
from connectors.checkpoints import CheckpointError, CheckpointStore, JournalEntry, Progress, StaleWorker

SETTINGS = {"model": "m/1", "grace": 5}


def commit(store: CheckpointStore, done: int, snapshots=None, keep_from: int = 0, following=None, learnt=b"l") -> None:
    store.commit(
        done,
        learnt=learnt,
        receipts={"output": done * 10},
        counters={"received": done},
        snapshots=snapshots or {},
        keep_from=keep_from,
        following=following,
    )


def test_one_commit_moves_everything(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c.db")
    assert store.progress() is None
    assert store.claim(SETTINGS) == Progress(settings=SETTINGS)
    store.accept(1, b"one", {"p": 5})
    commit(store, 1, {"a": (1, b"A1"), "b": (1, b"B1")}, following=(b"two", {"p": 9}))
    store.close()
    store = CheckpointStore(tmp_path / "c.db")
    assert store.claim(SETTINGS) == Progress(1, {"p": 9}, {"output": 10}, {"received": 1}, SETTINGS)
    assert store.journal() == [JournalEntry(1, b"one", b"l"), JournalEntry(2, b"two", None)]
    assert store.read("a") == (1, b"A1") and store.read("z") is None
    commit(store, 2, {"a": (2, b"A2")}, keep_from=2)
    assert [e.batch for e in store.journal()] == [2]
    assert list(store.streams()) == [("a", 2, 2), ("b", 1, 2)]


def test_an_older_worker_is_refused(tmp_path: Path) -> None:
    old, new = CheckpointStore(tmp_path / "c.db"), CheckpointStore(tmp_path / "c.db")
    old.claim(SETTINGS)
    old.accept(1, b"one", {"p": 1})
    new.claim(SETTINGS)
    with pytest.raises(StaleWorker, match="newer worker"):
        commit(old, 1)
    with pytest.raises(StaleWorker):
        old.accept(2, b"two", {"p": 2})
    assert new.progress().positions == {"p": 1}, "the refused commits left nothing behind"
    commit(new, 1)


def test_a_failed_commit_changes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c.db")
    store.claim(SETTINGS)
    store.accept(1, b"one", {"p": 1})
    before = store.progress()
    with pytest.raises(CheckpointError, match="never accepted"):
        commit(store, 2, {"a": (2, b"A")})
    with pytest.raises(CheckpointError):  # the journal already holds batch 1
        store.accept(1, b"again", {"p": 7})
    assert store.progress() == before and store.read("a") is None


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "c.db").claim(SETTINGS)
    with pytest.raises(CheckpointError, match="made with model = m/1, now it is m/2"):
        CheckpointStore(tmp_path / "c.db").claim(SETTINGS | {"model": "m/2"})
    with pytest.raises(CheckpointError, match="made with another state: use"):
        CheckpointStore(tmp_path / "c.db").claim(SETTINGS | {"state": [["a.long.path", "float32", [8, 8]]] * 30})


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "FORMAT_VERSION", 2)
    CheckpointStore(tmp_path / "c.db").claim(SETTINGS)
    monkeypatch.setattr(checkpoints, "FORMAT_VERSION", 1)
    with pytest.raises(CheckpointError, match="format version 2, this program reads 1"):
        CheckpointStore(tmp_path / "c.db")


def test_a_locked_store_waits_then_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOCK_SECONDS", 0.2)
    store = CheckpointStore(tmp_path / "c.db")
    store.claim(SETTINGS)
    other = sqlite3.connect(tmp_path / "c.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CheckpointError, match="locked by another program"):
        store.accept(1, b"one", {"p": 1})
    other.execute("ROLLBACK")
    store.accept(1, b"one", {"p": 1})


def test_a_full_disk_is_said_and_nothing_is_lost(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c.db")
    store.claim(SETTINGS)
    store.accept(1, b"one", {"p": 1})
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages + 2}")
    with pytest.raises(CheckpointError, match="make room"):
        commit(store, 1, {"a": (1, b"x" * 1_000_000)})
    assert store.progress().done == 0 and store.read("a") is None
    store._db.execute("PRAGMA max_page_count=100000")
    commit(store, 1, {"a": (1, b"x" * 1_000_000)})


def test_forgetting_needs_a_finished_run_and_fences_the_worker(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c.db")
    store.claim(SETTINGS)
    store.accept(1, b"one", {"p": 1})
    with pytest.raises(CheckpointError, match="graceful stop"):
        store.forget(["a"])
    commit(store, 1, {"a": (1, b"A"), "b": (1, b"B")}, keep_from=2)
    other = CheckpointStore(tmp_path / "c.db")
    assert other.forget(["a", "nobody"]) == 1
    assert [name for name, *_ in other.streams()] == ["b"]
    with pytest.raises(StaleWorker):
        store.accept(2, b"two", {"p": 2})


def test_something_else_is_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "c.db").write_text("hello, this is no database" * 100)
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        CheckpointStore(tmp_path / "c.db")
    with pytest.raises(CheckpointError, match="folder does not exist"):
        CheckpointStore(tmp_path / "nowhere" / "c.db")
