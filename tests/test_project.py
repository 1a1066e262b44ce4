"""What must hold for the project as a whole: the folder mlflow/ and the contents of the wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_folder_mlflow_holds_no_python_package_and_no_test():
    forbidden = [
        p
        for pattern in ("__init__.py", "conftest.py", "test_*.py", "*_test.py")
        for p in (ROOT / "mlflow").rglob(pattern)
    ]
    assert forbidden == []


def test_import_mlflow_finds_the_real_one_from_the_root():
    code = "import mlflow; print(mlflow.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    ).stdout.strip()
    assert "site-packages" in Path(found).parts


def test_the_wheel_holds_the_four_packages_and_the_entry_file_of_registered_models(tmp_path):
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            tmp_path,
            ROOT,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "kernels",
        "titans_core",
        "connectors",
        "pipelines",
    }
    files = ("models/classifier.py", "models/forecaster.py", "registry/promotion.yaml")
    assert {f"pipelines/mlflow_files/{name}" for name in files} <= set(names)
