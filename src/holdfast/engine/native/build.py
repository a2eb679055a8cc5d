"""Compiles decoder.cpp, once for each instruction set that machines of this kind may have.

Runs when the package is installed (hatch_build.py), or by hand: `python src/holdfast/engine/native/build.py`. Imports
only the standard library.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / "decoder.cpp", *sorted(HERE.glob("*.h"))]

# Best first. library.py chooses among the builds by the processor's features.
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_X86 = {
    "avx512bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
    "avx512vnni": [*_AVX512, "-mavx512vnni"],
    "avx512": _AVX512,
    "avxvnni": [*_AVX2, "-mavxvnni"],
    "avx2": _AVX2,
}
_FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread"]


def variants() -> dict[str, list[str]]:
    """Compiler flags by the name of the instruction set, best first."""
    return (_X86 if platform.machine() in ("x86_64", "AMD64") else {}) | {"portable": []}


def library_path(variant: str) -> Path:
    return HERE / f"decoder_{variant}.so"


def compiler() -> str | None:
    """The C++ compiler: $CXX, or the first one on the PATH."""
    named = os.environ.get("CXX")
    return named or next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build() -> list[Path]:
    """Compile every build that is missing or older than its sources. Raises CalledProcessError with the output."""
    found = compiler()
    if found is None:
        raise FileNotFoundError("no C++ compiler: install g++ or clang, or set CXX")
    newest = max(path.stat().st_mtime for path in [*SOURCES, Path(__file__)])
    running = []
    for variant, flags in variants().items():
        target = library_path(variant)
        if target.exists() and target.stat().st_mtime >= newest:
            continue
        fresh = target.with_suffix(f".{os.getpid()}.tmp")
        command = [found, *_FLAGS, *flags, str(SOURCES[0]), "-o", str(fresh)]
        running.append((subprocess.Popen(command, stderr=subprocess.PIPE, text=True), fresh, target))
    failures = []
    for process, fresh, target in running:
        words = process.communicate()[1]
        if process.returncode:
            failures.append(subprocess.CalledProcessError(process.returncode, process.args, stderr=words))
        else:
            fresh.replace(target)
    if failures:
        raise failures[0]
    return [library_path(variant) for variant in variants()]


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{' '.join(error.cmd)} failed:\n{error.stderr}")
