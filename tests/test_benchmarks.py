"""The contract of the benchmarks: their arguments, and one JSON line on standard output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(p for p in (ROOT / "benchmarks").glob("*.py") if "__main__" in p.read_text())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_every_benchmark_runs_by_itself_and_tells_its_arguments(script, tmp_path):
    words = [sys.executable, script, "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert shown.returncode == 0, shown.stderr
    assert "--seed" in shown.stdout and "--threads" in shown.stdout


def test_the_last_line_is_one_json_document(capsys):
    report.finish("sample", {"ratio": 2.0}, libraries=("numpy",))
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    document = json.loads(captured.out)
    assert set(document) == {"benchmark", "commit", "machine", "figures"}
    assert document["machine"]["libraries"]["numpy"] and document["figures"] == {"ratio": 2.0}


def test_sides_take_turns_and_the_first_round_is_not_counted():
    order = []
    seconds = report.in_turns({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(each) for name, each in seconds.items()} == {"a": 2, "b": 2}
    assert report.ratio([2.0, 6.0, 9.0], [1.0, 2.0, 1.0]) == {"median": 3.0, "low": 2.0, "high": 9.0, "rounds": 3}
