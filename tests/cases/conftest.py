"""Tables that break other libraries, each with its right behaviour; they lie beside the checkout."""

import os
from pathlib import Path

import pytest

SERIES = Path(__file__).resolve().parents[3] / "shared" / "cases" / "series"


@pytest.fixture
def case(request) -> Path:
    """The folder of the case that the test file is named for (test_01_nan_target.py -> 01_nan_target)."""
    name = Path(request.node.fspath).stem.removeprefix("test_")
    folder = SERIES / name
    if not folder.is_dir():
        if os.environ.get("TETHYS_REQUIRE_DATA") == "1":
            pytest.fail(f"case {name} is not at {folder}, and TETHYS_REQUIRE_DATA=1")
        pytest.skip(f"case {name} is not at {folder}")
    return folder
