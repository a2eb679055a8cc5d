"""CUDA C++ for one device: compiled by NVRTC, which comes with torch, and launched on torch's stream.

Knows nothing of what the kernels compute.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch

from holdfast.errors import ConfigError

CHOICE = "HOLDFAST_CUDA"  # environment variable: what computes single tokens where there is a choice
TRITON, CPP = "triton", "c++"
_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def chosen_kernels() -> str:
    chosen = os.environ.get(CHOICE) or TRITON
    if chosen not in (TRITON, CPP):
        raise ConfigError(f"{CHOICE}={chosen} is not a choice; use {TRITON} or {CPP}")
    return chosen


class Launch(IntEnum):
    """How a kernel's blocks run, by CUDA's number of that launch attribute."""

    TOGETHER = 2  # all at once, or not at all: they may wait for each other
    OVERLAPPED = 6  # while the kernel before this one ends; they wait for it before they read what it wrote


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`, whose value is 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class Kernel:
    """One kernel of a source file, with its macros, on one device. Loaded for as long as the process lives.

    The driver loads and launches in the context of the thread's current device, which may be another one.
    """

    def __init__(
        self,
        source: Path,
        name: str,
        macros: Mapping[str, int],
        device: torch.device,
        *,
        threads: int,
        shared_bytes: int,
        launch: Launch,
    ) -> None:
        binary = _compiled(source, macros, torch.cuda.get_device_capability(device))
        self._device = device
        self._threads = threads
        self._shared_bytes = shared_bytes
        self._attribute = _Attribute(id=launch, value=(ctypes.c_int * 16)(1))
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(_driver().cuModuleLoadData(ctypes.byref(self._module), binary))
            _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()))
            _check(_driver().cuFuncSetAttribute(self._function, _MAX_SHARED_BYTES, shared_bytes))

    def launch(self, grid: tuple[int, int, int], argument: ctypes.Structure) -> None:
        """Does not wait for the result."""
        config = _Config(
            grid=grid,
            block=(self._threads, 1, 1),
            shared_bytes=self._shared_bytes,
            stream=torch.cuda.current_stream(self._device).cuda_stream,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=1,
        )
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        with torch.cuda.device(self._device):
            _check(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None))


def _compiled(source: Path, macros: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Machine code for devices of this compute capability."""
    major, minor = capability
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", f"--include-path={source.parent}"]
    encoded = [option.encode() for option in [*options, *(f"-D{key}={value}" for key, value in macros.items())]]
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None):
        raise RuntimeError(f"NVRTC does not accept {source.name}")
    try:
        if nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded)):
            log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise RuntimeError(f"{source.name} does not compile for this GPU: {log.decode(errors='replace')[:2000]}")
        return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, size_of: Callable[..., int], read: Callable[..., int]) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise RuntimeError("libcuda.so.1 was not found; it comes with the GPU's driver") from exc
    if not hasattr(driver, "cuLaunchKernelEx"):
        raise RuntimeError("the GPU's driver has no cuLaunchKernelEx; it comes with drivers for CUDA 11.8 or newer")
    return driver


@cache
def _nvrtc() -> ctypes.CDLL:
    """The library that torch was built with: already loaded, beside torch, or among the packages that torch needs."""
    name = f"libnvrtc.so.{(torch.version.cuda or '0').split('.')[0]}"
    torch_folder = Path(torch.__file__).parent
    folders = [torch_folder / "lib", *sorted((torch_folder.parent / "nvidia").glob("*/lib")), Path(sys.prefix, "lib")]
    for candidate in (name, *(str(folder / name) for folder in folders)):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise RuntimeError(f"{name} was not found; it comes with torch for CUDA")


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA driver: {(text.value or b'unknown error').decode()} ({status})")
