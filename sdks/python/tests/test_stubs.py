"""The committed stubs are what generate.py makes, and may share a process with a server's."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_sdk.gen import runtime_pb2 as pb

SCRIPT = Path(__file__).resolve().parents[1] / "generate.py"


def generate(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_the_committed_stubs_are_up_to_date() -> None:
    result = generate("--check")
    assert result.returncode == 0, result.stderr


def test_the_descriptor_keeps_the_protos_name() -> None:
    assert pb.DESCRIPTOR.name == "holdfast/v1/runtime.proto"


def test_differing_stubs_are_named_in_one_sentence(tmp_path: Path) -> None:
    assert generate("--out", str(tmp_path)).returncode == 0
    assert generate("--out", str(tmp_path), "--check").returncode == 0
    (tmp_path / "runtime_pb2.pyi").write_text("")
    (tmp_path / "stale_pb2.py").write_text("")
    result = generate("--out", str(tmp_path), "--check")
    assert result.returncode == 1
    assert "differ" in result.stderr
    assert "runtime_pb2.pyi, stale_pb2.py; make them again" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_two_copies_live_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate("--out", str(tmp_path / "serving_stubs")).returncode == 0
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("serving_stubs.runtime_pb2")
    service = importlib.import_module("serving_stubs.runtime_pb2_grpc")
    assert service.RuntimeServiceServicer.__module__ == "serving_stubs.runtime_pb2_grpc"
    assert other.Done.FromString(pb.Done(seed=7).SerializeToString()).seed == 7
    monkeypatch.delitem(sys.modules, "serving_stubs.runtime_pb2")
    monkeypatch.delitem(sys.modules, "serving_stubs.runtime_pb2_grpc")
