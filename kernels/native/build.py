"""Builds the native memory kernels: `python -m kernels.native.build`, once, at install or in an image; never at service start.

The core is compiled once a vector width and the bindings once, side by side, then linked into one library beside this file.
It needs a C++17 compiler with GCC's vector extensions (g++ or clang++, or the one named in CXX) and nothing else.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.native import HERE, LIBRARY, fingerprint

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-psabi")
BOUND = ("bindings", "streams", "rows")  # with torch's headers; the last two hold the loops of their own operators
X86 = ((16, "x86-64-v4"), (8, "x86-64-v3"), (4, "x86-64"))  # floats a vector, -march


def compiler() -> str | None:
    """CXX, else g++, else clang++; None where there is none."""
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def build() -> Path:
    """Compiles and links; returns the library. Raises RuntimeError with the compiler's own words where it cannot."""
    import torch

    cxx = compiler()
    if cxx is None:
        raise RuntimeError("no C++ compiler: set CXX or install g++ (12 or later); without it the torch form runs, with the same numbers")
    root = Path(torch.__file__).parent
    widths = X86 if platform.machine() in ("x86_64", "AMD64") else ((4, None),)
    with tempfile.TemporaryDirectory() as scratch:
        objects = [Path(scratch, f"core{width}.o") for width, _ in widths] + [Path(scratch, f"{name}.o") for name in BOUND]
        commands = [
            [
                *(cxx, "-c", *FLAGS, *([f"-march={arch}"] if arch else [])),
                *(f"-DTETHYS_WIDTH={width}", f"-DTETHYS_CORE=core{width}", str(HERE / "core.cpp"), "-o", str(out)),
            ]
            for (width, arch), out in zip(widths, objects, strict=False)
        ]
        include = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include", f'-DTETHYS_SOURCES="{fingerprint()}"']
        for name, out in zip(BOUND, objects[-len(BOUND) :], strict=True):
            commands.append([cxx, "-c", *FLAGS, "-O3", *include, str(HERE / f"{name}.cpp"), "-o", str(out)])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        made = Path(scratch, LIBRARY.name)
        _run([cxx, "-shared", "-o", str(made), *map(str, objects), f"-L{root}/lib", "-ltorch_cpu", "-ltorch", "-lc10"])
        shutil.copy(made, LIBRARY.with_suffix(".new"))
        os.replace(LIBRARY.with_suffix(".new"), LIBRARY)  # a process that has the old one loaded keeps it
    return LIBRARY


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"building the native kernels failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


if __name__ == "__main__":
    print(build())
