"""Kernels in CUDA C++ on the CPU: their source, compiled with `emulated_cuda.h` in the place of a GPU.

Inline PTX becomes calls of functions with the names of the instructions.
"""

import ctypes
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_HEADER = Path(__file__).with_suffix(".h")
_INCLUDE = re.compile(r'#include "(.*)"')
_PRAGMA_ONCE = "#pragma once"
_PTX = re.compile(r'asm(?: volatile)?\(\s*((?:"[^"]*"\s*)+)(.*?)\);', re.DOTALL)
_OPERAND = re.compile(r"%\d+|\b\d+\b")
_KERNEL = re.compile(r"__global__ .*?(\w+)\(const (\w+) \w+\)")
_DYNAMIC_SHARED = re.compile(r"extern __shared__ .*;")


class EmulatedKernel:
    """The kernel of a source file. One that uses instructions which the header has not does not compile."""

    def __init__(self, source: Path, macros: Mapping[str, int], *, compiler: str, folder: Path) -> None:
        text = emulated(source)
        (kernel,) = _KERNEL.finditer(text)
        name, argument = kernel.groups()
        text += (
            f'\nextern "C" bool launch(const unsigned (*grid)[3], unsigned num_threads, unsigned seed, '
            f"const {argument}* argument) {{\n"
            f"  return run_grid(*grid, num_threads, seed, [=] {{ {name}(*argument); }});\n}}\n"
        )
        translated, library = folder / f"{source.stem}.cpp", folder / f"{source.stem}.so"
        translated.write_text(f'#include "{_HEADER}"\n{text}', encoding="utf-8")
        defined = [f"-D{key}={value}" for key, value in macros.items()]
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fno-strict-aliasing", "-w"]
        subprocess.run([compiler, *flags, *defined, str(translated), "-o", str(library)], check=True)
        self._launch = ctypes.CDLL(str(library)).launch
        self._launch.restype = ctypes.c_bool

    def launch(self, grid: tuple[int, int, int], argument: ctypes.Structure, *, num_threads: int, seed: int) -> None:
        places = (ctypes.c_uint * 3)(*grid)
        if not self._launch(ctypes.byref(places), num_threads, seed, ctypes.byref(argument)):
            raise RuntimeError("some threads of a block wait for others that never come")


def emulated(source: Path) -> str:
    """The source with its includes and without anything that only a compiler for CUDA understands."""
    text = source.read_text(encoding="utf-8").replace(_PRAGMA_ONCE, "")
    text = _INCLUDE.sub(lambda found: emulated(source.with_name(found[1])), text)
    text = _PTX.sub(_called, text)
    return _DYNAMIC_SHARED.sub("", text).replace("__shared__", "static")


def _called(ptx: re.Match[str]) -> str:
    """`name(operands);`, with the operands in the order of the instruction."""
    template = "".join(re.findall(r'"([^"]*)"', ptx[1]))
    name, _, rest = template.rstrip("; ").partition(" ")
    expressions = _expressions(ptx[2])
    operands = [
        expressions[int(operand[1:])] if operand.startswith("%") else operand for operand in _OPERAND.findall(rest)
    ]
    return f"{name.replace('.', '_')}({', '.join(operands)});"


def _expressions(constraints: str) -> list[str]:
    """Those in `"=r"(out) : "r"(word), "n"(2) : "memory"`."""
    found = []
    for start in re.finditer(r'"[^"]*"\(', constraints):
        depth, end = 1, start.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(constraints[end], 0)
            end += 1
        found.append(constraints[start.end() : end - 1])
    return found


def structure(source: Path, name: str) -> type[ctypes.Structure]:
    """A struct of pointers, ints and floats as a source file declares it."""
    (body,) = re.findall(
        rf"^struct {name} \{{\n(.*?)^\}};", source.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    fields = re.findall(r"^  (?:const )?(?:(int|float) |\w[\w ]*\* )(\w+);", body, re.MULTILINE)
    types = {"int": ctypes.c_int, "float": ctypes.c_float, "": ctypes.c_void_p}
    return type(name, (ctypes.Structure,), {"_fields_": [(field, types[kind]) for kind, field in fields]})
