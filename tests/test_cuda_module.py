"""Kernels in CUDA C++ are loaded and launched on the device of their engine, on a driver that is not there."""

import contextlib
import ctypes
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import holdfast.engine

SOURCE = Path(holdfast.engine.__file__).parent / "cuda" / "module.py"
OURS, CURRENT = torch.device("cuda:1"), torch.device("cuda:0")
STREAMS = {OURS: 7, CURRENT: 3}


@pytest.fixture
def module() -> ModuleType:
    """By its file: the package needs Triton, and this does not."""
    spec = importlib.util.spec_from_file_location("cuda_module", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Argument(ctypes.Structure):
    _fields_ = (("capacity", ctypes.c_int),)


class Driver:
    """Remembers on which device it was called, and the stream of a launch."""

    def __init__(self) -> None:
        self.device = CURRENT
        self.calls: list[tuple[str, torch.device]] = []
        self.stream = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(first: object, *_: object) -> int:
            self.calls.append((name, self.device))
            if name == "cuLaunchKernelEx":
                self.stream = first._obj.stream  # type: ignore[attr-defined]
            return 0

        return call

    @contextlib.contextmanager
    def used(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


def test_a_kernel_is_built_loaded_and_launched_on_its_own_device(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, built_for = Driver(), []
    monkeypatch.setattr(module, "_driver", lambda: driver)
    monkeypatch.setattr(module, "_compiled", lambda source, macros, capability: built_for.append(capability) or b"")
    monkeypatch.setattr(torch.cuda, "device", driver.used)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0) if device == OURS else (8, 0))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAMS[device or CURRENT])
    )
    kernel = module.Kernel(
        Path("attend.cu"), "attend", {}, OURS, threads=128, shared_bytes=1024, launch=module.Launch.OVERLAPPED
    )
    kernel.launch((1, 1, 1), Argument())
    assert built_for == [(9, 0)]
    names = ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx"]
    assert driver.calls == [(name, OURS) for name in names]
    assert driver.stream == STREAMS[OURS]
    assert driver.device == CURRENT
