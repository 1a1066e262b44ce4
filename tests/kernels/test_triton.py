"""Triton kernels in Triton's interpreter: each module below runs in its own process, for the mode is fixed at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is an extra")
HERE = Path(__file__).parent


@pytest.mark.parametrize("module", ["linear", "mlp", "newton_schulz"])
def test_interpreter(module: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--noconftest", str(HERE / f"triton_{module}.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_import_is_lazy() -> None:
    check = "import sys, kernels.triton; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=HERE.parents[1]).returncode == 0


def test_no_gpu_is_an_error() -> None:
    check = (
        "import torch, kernels.triton as t\n"
        "x = torch.ones(1, 1, 2, 4); g = torch.ones(1, 1, 2)\n"
        "t.linear_exact(x, x, x, g, g, g, (torch.ones(1, 1, 4, 4),) * 2)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", check], cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert "Triton kernels need a CUDA or HIP device" in done.stderr
