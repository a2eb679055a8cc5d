"""`holdfast doctor`: what is found, how it is judged, and that the judgement is that of `serve`."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.chat.abilities import Abilities
from holdfast.cli import machine, main
from holdfast.cli.checks import (
    Device,
    Finding,
    Level,
    check_abilities,
    check_data,
    check_extra,
    check_fit,
    check_memory,
    check_mlx,
    check_native,
    check_torch,
    chosen_device,
    facts_of,
    require_fit,
)
from holdfast.cli.machine import CudaDevice, DataDirectory, Library, Memory, find_data
from holdfast.cli.models import RUNTIME_BYTES, Sizes, weight_bytes, window_table
from holdfast.config import EngineConfig
from holdfast.engine.factory import build_engine
from holdfast.engine.interface import engine_info, kv_bytes_per_position
from holdfast.engine.native import NativeEngine
from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.errors import ConfigError
from holdfast.extras import how_to_install
from holdfast.models import GGUFSource
from holdfast.sessions.journal.sqlite import SqliteJournal
from tests import tiny
from tests.engine_cases import needs_native
from tests.journaling import open_sessions, opening

FREE = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"]
H200 = CudaDevice("H200", 150_000_000_000, 149_000_000_000)
SMALL = ["--http", "", "--recent", "64", "--max-pin", "16"]
TORCH, MLX, NONE = Library("2.13.0", num_threads=2), Library("0.32.4", default_device="gpu"), Library()
SHAPE = SlabShape()


@pytest.fixture(scope="module", autouse=True)
def _own_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("HOLDFAST_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that is opened in no time; it has no tokenizer, so it goes without the HTTP door."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.hf_model("llama").save_pretrained(path)
    return str(path)


def _doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main(["doctor", "--json", *FREE, *arguments])
    return status, json.loads(capsys.readouterr().out)


def _finding(report: dict[str, Any], what: str) -> tuple[str, str]:
    return next((one["level"], one["says"]) for one in report["findings"] if one["what"] == what)


def test_a_good_machine_would_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, report = _doctor(capsys, "--data-dir", str(tmp_path / "new"))
    assert (status, report["would_start"], report["device"]) == (0, True, "cpu")
    assert report["model"]["architecture"]["context"] == 8192
    assert report["sizes"]["token_bytes"] == 23_040
    assert [row["recent"] for row in report["windows"]] == [512, 1024, 2048, 4096]
    assert _finding(report, "chat")[0] == "ok"
    assert "will be created" in _finding(report, "data directory")[1]
    assert not (tmp_path / "new").exists()


def test_a_person_gets_lines_and_a_table() -> None:
    command = [sys.executable, "-m", "holdfast.cli", "doctor", *FREE, "--recent", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=_environment())
    assert done.returncode == 0
    assert done.stderr == ""
    assert "134 M parameters" in done.stdout
    assert "sessions that fit (cpu)" in done.stdout
    assert "1,000" in done.stdout
    assert "holdfast serve would start" in done.stdout


@needs_native
def test_a_missing_model_is_no_reason_to_ask_for_torch(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_torch", lambda: NONE)
    status, report = _doctor(capsys, "no-such-model")
    assert (status, _finding(report, "model")[0], _finding(report, "torch")[0]) == (1, "problem", "ok")


def test_a_command_that_doctor_gives_can_be_copied(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(machine, "is_installed", lambda module: module != "pyarrow")
    main(["doctor", *FREE, "no-such-model"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " parquet " in line]
    assert line.endswith(f"; {how_to_install('parquet')}")


@needs_native
def test_a_light_install_is_told_what_to_add_and_can_still_front_another_server() -> None:
    program = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'mlx', 'pyarrow', 'matplotlib'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "from holdfast.cli import main\n"
        "sys.exit(main(['doctor', '--json', *sys.argv[1:]]))\n"
    )

    def run(*arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
        command = [sys.executable, "-c", program, *FREE, *arguments]
        environment = _environment() | settings
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
        return done.returncode, json.loads(done.stdout)

    status, report = run()
    assert (status, report["device"]) == (0, "cpu")  # the native engine needs none of them
    assert _finding(report, "native engine")[0] == _finding(report, "torch")[0] == "ok"
    status, report = run(HOLDFAST_NATIVE="off")
    assert status == 1
    assert _finding(report, "native engine")[0] == "warning"
    assert _finding(report, "torch")[0] == "problem"
    for what in ("torch", "parquet", "bench"):
        assert f"pip install -e '{Path(__file__).parents[1]}[{what}]'" in _finding(report, what)[1]
    assert report["windows"]  # how many would fit is known all the same
    status, report = run("--backend", "sglang", "--upstream", "http://127.0.0.1:1")
    assert (status, report["sizes"]) == (0, None)
    assert "not needed" in _finding(report, "torch")[1]


def test_torch_that_the_finder_does_not_find_is_missing(
    tiny_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    assert machine.find_torch() == NONE
    monkeypatch.setenv("HOLDFAST_NATIVE", "off")
    status, report = _doctor(capsys, tiny_path, *SMALL)
    assert (status, _finding(report, "torch")[0]) == (1, "problem")


def test_a_taken_port_is_a_problem(tiny_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, report = _doctor(capsys, tiny_path, *SMALL, "--grpc", address)
    assert status == 1
    level, says = _finding(report, "gRPC address")
    assert level == "problem"
    assert f"cannot listen on {address}" in says


@pytest.mark.parametrize(
    ("arguments", "what", "says"),
    [
        (["--grpc", "127.0.0.1:9", "--http", "127.0.0.1:9"], "HTTP address", "choose another address"),
        (["--grpc", "0.0.0.0:0"], "gRPC address", "without API keys"),
        (["--grpc", "nowhere"], "gRPC address", "is not HOST:PORT"),
        (["--keys-file", "/no/such/keys"], "keys", "cannot read the keys file"),
        (["--tls-cert", "/no/such.pem"], "TLS", "must be given together"),
        (["--tls-cert", "/no/such.pem", "--tls-key", "/no/such.key"], "TLS", "cannot read"),
        (["--backend", "vllm"], "upstream", "must be given together"),
        (["--upstream", "http://127.0.0.1:1"], "upstream", "must be given together"),
        (["--recent", "100000"], "window", "context of 512"),
        (["--sink", "600"], "window", "max_pin 16"),
        (["--recent", "2"], "window", "smaller than its sink"),
        (["--sessions", "100000000"], "sessions", "lower --sessions to"),
        (["--device", "cuda"], "torch", "use --device cpu"),
        (["--data-dir", "/dev/null/data"], "data directory", "cannot be written"),
        (["--data-dir", "/dev/null"], "data directory", "cannot be written"),
    ],
)
def test_what_would_keep_a_server_from_starting_is_a_problem(
    tiny_path: str, arguments: list[str], what: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = _doctor(capsys, tiny_path, *SMALL, *arguments)
    level, said = _finding(report, what)
    assert (status, level) == (1, "problem")
    assert says in said
    assert [one["what"] for one in report["findings"] if one["level"] == "problem"] == [what]


def test_a_model_that_is_not_there_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = _doctor(capsys, "no-such-model")
    assert (status, report["would_start"], report["model"]) == (1, False, None)
    assert "no model 'no-such-model'" in _finding(report, "model")[1]


def test_a_chat_template_that_cannot_be_read_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = _doctor(capsys, "--chat-template", "/no/such.jinja")
    assert (status, _finding(report, "chat")[0]) == (1, "problem")


def test_a_broken_gguf_is_one_sentence(
    default_source: GGUFSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "half.gguf"
    with default_source.path.open("rb") as whole:
        path.write_bytes(whole.read(49_000_000))
    status, report = _doctor(capsys, str(path))
    assert (status, report["model"], report["windows"]) == (1, None, [])
    assert "truncated" in _finding(report, "model")[1]
    assert main(["doctor", *FREE, str(path)]) == 1
    assert "holdfast serve would not start" in capsys.readouterr().out


def test_a_directory_without_a_chat_template_gets_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.hf_model("llama").save_pretrained(tmp_path)
    status, report = _doctor(capsys, str(tmp_path), "--recent", "64", "--max-pin", "16")
    assert (status, _finding(report, "chat")[0]) == (0, "warning")
    status, report = _doctor(capsys, str(tmp_path), "--recent", "64", "--max-pin", "16", "--http", "")
    assert (status, _finding(report, "HTTP address")[0]) == (0, "ok")
    assert "chat" not in {one["what"] for one in report["findings"]}
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "truncated" in _finding(_doctor(capsys, str(tmp_path))[1], "model")[1]


def test_weights_quantised_for_mlx_are_for_mlx(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.hf_model("llama").save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization": {"bits": 4, "group_size": 64}}))
    window = ["--recent", "64", "--max-pin", "16"]
    assert "use --device mlx" in _finding(_doctor(capsys, str(tmp_path), *window)[1], "model")[1]
    status, report = _doctor(capsys, str(tmp_path), "--device", "mlx", *window)
    assert (status, report["device"]) == (0, "mlx")
    assert report["sizes"]["weight_bytes"] == (tmp_path / "model.safetensors").stat().st_size


async def test_a_data_directory_tells_who_has_it_and_what_is_in_it(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    await journal.write(opening(0), opening(1))
    used = find_data(tmp_path)
    assert (used.is_in_use, used.num_open, used.num_closed, used.damage) == (True, 2, 0, "")
    crashed = tmp_path.with_name("crashed")
    await asyncio.to_thread(shutil.copytree, tmp_path, crashed)  # as after kill -9: with its write-ahead log
    await journal.close()
    before = sorted(os.listdir(tmp_path))
    assert replace(find_data(tmp_path), free_bytes=0) == DataDirectory(
        path=tmp_path, exists=True, is_writable=True, num_open=2
    )
    assert sorted(os.listdir(tmp_path)) == before
    assert find_data(crashed).num_open == 2
    again = SqliteJournal(crashed)  # looking did no harm
    assert len(open_sessions(again)) == 2
    await again.close()


def test_a_journal_that_is_damaged_gone_or_from_the_future_is_a_problem(tmp_path: Path) -> None:
    database = tmp_path / "journal.db"
    database.write_bytes(b"nonsense" * 1000)
    assert "not a database" in find_data(tmp_path).damage
    database.unlink()
    (tmp_path / "segments").mkdir()
    assert "segments exists" in find_data(tmp_path).damage
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    found = find_data(tmp_path)
    assert "version 99" in found.damage
    assert check_data(found).level == "problem"


@needs_native
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_sizes_are_those_of_the_engine(default_source: GGUFSource, dtype: str) -> None:
    settings = {"sessions": 2, "recent": 64, "max_pin": 16, "prefill_chunk": 32, "rewind_tokens": 8}
    config = EngineConfig(device="cpu", dtype=dtype, **settings)
    engine = build_engine(default_source, config)
    assert isinstance(engine, NativeEngine)
    arch = default_source.architecture
    sizes = Sizes(weight_bytes=0, token_bytes=kv_bytes_per_position(arch, "bfloat16"), memory_bytes=None)
    assert 2 * sizes.slab_bytes(engine.shape) == engine.kv_reserved_bytes
    held = sum(array.nbytes for array in engine.arrays.values() if array.ndim == 2)
    assert weight_bytes(arch, dtype, "cpu", is_native=True) == held


def test_fp8_halves_the_weights_of_layers_and_the_cache(default_source: GGUFSource) -> None:
    arch = default_source.architecture
    shape = SlabShape(recent=64, max_pin=16)
    plain, small = (
        engine_info("m", arch, digest="d", dtype="fp8", shape=shape, kv_dtype=kv_dtype) for kv_dtype in ("auto", "fp8")
    )
    assert plain.kv_bytes_per_position == 23_040
    assert small.kv_bytes_per_position == 23_040 // 2 + 2 * 30 * 3 * 2
    assert plain.fingerprint != small.fingerprint  # a snapshot of one does not fit the other
    embedding = arch.vocab_size * arch.hidden_size
    assert weight_bytes(arch, "fp8", "cuda") == arch.num_parameters + embedding


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "fp8", "device": "cpu"}, "--dtype fp8 needs a CUDA device; on the CPU leave it out"),
        ({"kv_dtype": "fp8", "device": "cpu"}, "--kv-dtype fp8 needs a CUDA device; on the CPU leave it out"),
        (
            {"dtype": "int8", "device": "cuda"},
            "dtype int8 is for the CPU; with --device cuda use --dtype fp8 or bfloat16",
        ),
        ({"dtype": "fp8", "device": "mlx"}, "device mlx does not support dtype fp8; use --device cpu"),
    ],
)
def test_a_dtype_of_another_device_is_refused(default_source: GGUFSource, settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        build_engine(default_source, EngineConfig(**settings))


def test_the_sizes_are_those_of_torch_too(default_engine: TorchEngine) -> None:
    weights = default_engine._decoder.weights
    parts = [weights.embedding]
    parts += [part for one in weights.layers for part in (one.qkv, one.output, one.gate_up, one.down)]
    assert weight_bytes(default_engine._decoder.arch, "float32", "cpu") == sum(part.nbytes for part in parts)


def test_the_head_is_wider_than_the_rest_except_on_cuda() -> None:
    for family in tiny.FAMILIES:
        arch = tiny.architecture(family)
        plain, head = arch.num_parameters * 2, arch.vocab_size * arch.hidden_size
        assert weight_bytes(arch, "bfloat16", "cuda") == plain
        assert weight_bytes(arch, "float32", "cpu") == weight_bytes(arch, "float32", "mlx") == plain * 2
        assert weight_bytes(arch, "bfloat16", "mlx") == plain + 2 * head
        assert weight_bytes(arch, "bfloat16", "cpu") == plain + (4 if arch.has_tied_embeddings else 2) * head


def test_as_many_fit_as_memory_holds_beside_the_weights() -> None:
    slab = SHAPE.capacity * 10
    exact = Sizes(weight_bytes=500, token_bytes=10, memory_bytes=RUNTIME_BYTES + 500 + 3 * slab)
    assert exact.num_fitting(SHAPE) == 3
    assert replace(exact, memory_bytes=RUNTIME_BYTES + 499 + 3 * slab).num_fitting(SHAPE) == 2
    assert replace(exact, memory_bytes=1000).num_fitting(SHAPE) == 0
    assert replace(exact, memory_bytes=None).num_fitting(SHAPE) is None
    rows = window_table(exact, SHAPE, 4096 + 512, (1024, 4096, 8192))
    assert [(row.recent, row.num_fitting) for row in rows] == [(1024, 4), (2048, 3), (4096, 1)]


@pytest.mark.parametrize(
    ("memory_mb", "num_sessions", "level", "says"),
    [
        (10_000, 16, "ok", "99 would fit"),
        (3_000, 16, "warning", "--snapshot-memory-mb"),
        (2_000, 16, "problem", "lower --sessions to 12"),
        (600, 1, "problem", "not even one slab fits"),
        (None, 16, "warning", "make sure that this much is free"),
    ],
)
def test_sessions_that_do_not_fit_are_a_problem(
    memory_mb: int | None, num_sessions: int, level: Level, says: str
) -> None:
    memory = None if memory_mb is None else memory_mb * 1_000_000
    sizes = Sizes(weight_bytes=250_000_000, token_bytes=24_000, memory_bytes=memory)
    finding = check_fit(sizes, SHAPE, num_sessions, 2048 * 2**20, "cpu", total_bytes=memory or 10**10)
    assert finding.level == level
    assert says in finding.says


def test_snapshots_that_can_never_fit_are_a_problem_and_the_default_is_not() -> None:
    sizes = Sizes(weight_bytes=250_000_000, token_bytes=24_000, memory_bytes=4_000_000_000)

    def level(snapshot_mb: int, device: Device, total_bytes: int) -> Level:
        return check_fit(sizes, SHAPE, 16, snapshot_mb * 2**20, device, total_bytes=total_bytes).level

    assert level(2048, "cpu", 4_000_000_000) == "warning"
    assert level(4096, "cpu", 4_000_000_000) == "problem"
    assert level(4096, "cuda", 16_000_000_000) == "ok"  # the slabs are on the device
    assert level(40_960, "cuda", 16_000_000_000) == "problem"


def test_the_draft_model_takes_memory_too(default_source: GGUFSource) -> None:
    config = EngineConfig(device="cpu", proposer="draft_model", draft_model=str(default_source.path))
    alone, both = (
        facts_of(default_source).sizes(each, "cpu", None) for each in (replace(config, proposer="ngram"), config)
    )
    assert both.weight_bytes == 2 * alone.weight_bytes
    draft = SlabShape(max_pin=4, rewind_tokens=0)
    assert both.slab_bytes(SHAPE) - alone.slab_bytes(SHAPE) == draft.capacity * alone.token_bytes


def test_an_engine_that_does_not_fit_is_refused_before_it_is_allocated(
    default_source: GGUFSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "find_memory", lambda: Memory(4_000_000_000, 2_000_000_000))
    config = EngineConfig(device="cpu", sessions=300)
    with pytest.raises(
        ConfigError, match=r"but only (\d+) fit into 2\.0 GB: lower --sessions to \1, or lower --recent$"
    ):
        require_fit(default_source, config)
    with pytest.raises(ConfigError, match=r"lower --recent or --max-pin$"):
        require_fit(default_source, replace(config, max_pin=4000))
    with pytest.raises(ConfigError, match="not even one slab fits"):
        require_fit(default_source, replace(config, sessions=1, rewind_tokens=10**9))
    with pytest.raises(ConfigError, match="lower --snapshot-memory-mb to"):
        require_fit(default_source, replace(config, sessions=1), 64 * 2**30)
    assert require_fit(default_source, replace(config, sessions=1)) == ""


@pytest.mark.parametrize(
    ("asked", "torch", "mlx", "is_mac", "device"),
    [
        ("auto", TORCH, MLX, True, "mlx"),
        ("auto", TORCH, NONE, True, "cpu"),
        ("auto", TORCH, MLX, False, "cpu"),
        ("auto", replace(TORCH, cuda=(H200,)), MLX, False, "cuda"),
        ("cpu", replace(TORCH, cuda=(H200,)), MLX, True, "cpu"),
        ("mlx", TORCH, NONE, False, "mlx"),
        ("cuda", TORCH, MLX, True, "cuda"),
    ],
)
def test_the_device_is_the_one_that_serve_takes(
    asked: str, torch: Library, mlx: Library, is_mac: bool, device: Device
) -> None:
    assert chosen_device(asked, torch, mlx, is_apple_silicon=is_mac) == device


def test_libraries_are_judged_by_what_is_asked_of_them() -> None:
    broken = Library("2.13.0", failure="libcudart.so.13 is absent")
    assert check_torch(TORCH, "cpu", is_needed=True).level == "ok"
    assert "H200 with 149.0 of 150.0 GB free" in check_torch(replace(TORCH, cuda=(H200,)), "cuda", is_needed=True).says
    assert [check_torch(broken, device, is_needed=True).level for device in ("cpu", "mlx")] == ["problem", "ok"]
    assert check_torch(broken, "cpu", is_needed=False).level == "ok"
    assert check_native(["avx2", "portable"], "cpu") == Finding("native engine", "ok", "built for avx2")
    assert [check_native([], device).level for device in ("cpu", "cuda")] == ["warning", "ok"]
    mac = [(NONE, "cpu", "warning"), (NONE, "mlx", "problem"), (MLX, "mlx", "ok"), (broken, "mlx", "problem")]
    other = [(NONE, "cpu", "ok"), (MLX, "mlx", "warning"), (MLX, "cpu", "ok"), (broken, "cpu", "warning")]
    for is_mac, cases in ((True, mac), (False, other)):
        for mlx, device, level in cases:
            assert check_mlx(mlx, device, is_apple_silicon=is_mac).level == level  # type: ignore[arg-type]
    assert check_extra("bench", "plots", is_installed=True).level == "ok"
    assert check_memory(Memory(1, None)).level == "warning"


def test_little_disk_is_a_warning() -> None:
    data = DataDirectory(path=Path("/data"), exists=True, is_writable=True, free_bytes=10**6)
    assert check_data(data).level == "warning"
    assert check_data(replace(data, is_in_use=True)).level == "problem"
    assert check_data(None).level == "ok"


def test_what_a_template_cannot_show_is_told() -> None:
    full = Abilities(frozenset({"system", "developer", "user"}), frozenset(), True, [], None)
    assert check_abilities(full).says == "the template renders tools, system messages, developer messages"
    plain = replace(full, first_roles=frozenset({"system"}), has_tools=False)
    assert (
        "developer messages become system messages; tools are written into the system prompt"
        in check_abilities(plain).says
    )
    assert check_abilities(replace(full, first_roles=frozenset({"user"}))).level == "warning"


def test_memory_is_read_as_each_system_writes_it() -> None:
    assert machine.available_in_meminfo("MemTotal: 9 kB\nMemAvailable:   2 kB\n") == 2048
    assert machine.available_in_meminfo("") is None
    mac = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free:   10.\nPages active: 5.\n"
    assert machine.available_in_vm_stat(mac + "Pages inactive:  3.\nPages purgeable: 1.\n") == 14 * 16384
    assert machine.available_in_vm_stat("") is None
    assert machine.left_in_cgroup(100, 70, "anon 1\ninactive_file 20\n") == 50
    memory = machine.find_memory()
    assert memory.available_bytes
    assert 0 < memory.available_bytes <= memory.total_bytes


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")} | {"COLUMNS": "200"}


def test_every_control_group_above_the_process_limits_it(tmp_path: Path) -> None:
    for version, folder, names in (
        (2, "pods/one", ("memory.max", "memory.current")),
        (1, "memory/pods/one", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ):
        (tmp_path / folder).mkdir(parents=True)
        for place, limit in ((tmp_path / folder, "max"), ((tmp_path / folder).parent, "100\n")):
            for name, text in ((names[0], limit), (names[1], "70\n"), ("memory.stat", "anon 1\ninactive_file 20\n")):
                (place / name).write_text(text)
        groups = "0::/pods/one\n" if version == 2 else "3:cpu,cpuacct:/x\n2:memory:/pods/one\n"
        assert list(machine.cgroup_limits(groups, tmp_path)) == [(100, 50)]
