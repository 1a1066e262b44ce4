"""The command line: what it imports, what it says about mistakes, what it prints."""

import json
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner

from connectors.errors import UserError
from pipelines import cli

COMMANDS = ["demo", "train", "backtest", "forecast", "forecast run", "validate", "tune", "stream", "doctor", "models list"]
COMMANDS += ["models show", "models compare", "models promote", "models rollback"]


def tethys(*words: str, cwd=None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *words], capture_output=True, text=True, timeout=120, cwd=cwd
    )


def test_help_imports_no_heavy_library():
    code = (
        "import sys; sys.argv = ['tethys', '--help']\n"
        "from pipelines import cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'ray', 'mlflow', 'polars', 'triton', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage: tethys" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command):
    shown = CliRunner().invoke(cli.app, [*command.split(), "--help"])
    assert shown.exit_code == 0
    assert f"Example: tethys {command}" in " ".join(shown.output.split())


def test_a_mistake_is_one_line_and_status_2(tmp_path):
    missing = f"sqlite:///{tmp_path}/none.db"
    done = tethys("models", "list", "--tracking-uri", missing)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tethys: there is no tracking store at ") and done.stderr.count("\n") == 1
    assert tethys("no-such-command").returncode == 2


def test_a_message_of_several_lines_is_folded_into_one(monkeypatch, capsys):
    def fail() -> None:
        raise UserError("first\n   second")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err == "tethys: first second\n"


@dataclass(frozen=True)
class Result:
    run: str = "abc"
    plot: str | None = None
    leaderboard: list[dict] = field(
        default_factory=lambda: [{"model": "ridge", "mae": 0.123456}, {"model": "ours", "mae": 0.1}]
    )


def test_results_are_a_table_for_people_and_one_document_for_programs(capsys):
    cli._show(Result(), as_json=False)
    table = capsys.readouterr().out
    assert [line.split() for line in table.splitlines()] == [
        ["model", "mae"],
        ["ridge", "0.1235"],
        ["ours", "0.1"],
        ["run", "abc"],
    ]
    assert "\x1b[" not in table
    cli._show(Result(), as_json=True)
    assert json.loads(capsys.readouterr().out)["leaderboard"][0]["mae"] == 0.123456


def test_no_column_of_a_table_is_cut_off(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cli._print_table([{f"a_long_name_of_a_column_{i}": 0.123456 for i in range(6)}])
    assert "a_long_name_of_a_column_5" in capsys.readouterr().out
