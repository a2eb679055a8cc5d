"""Models by their id on the hub: the real `huggingface_hub` in front of a hub of our own."""

import asyncio
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from holdfast.chat.tokenizer import load_tokenizer
from holdfast.cli import main
from holdfast.models import HFSource
from holdfast.models.hub import HubModel, parse_id
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import FakeModel
from tests.fake_hub import FakeHub, Files, commit_of
from tests.model_folders import VOCABULARIES
from tests.test_serve import FREE, start

TOKENIZER = json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}).encode()
CONFIG = {
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), 2),
    **{"head_dim": 4, "max_position_embeddings": 512},
}
TEMPLATE = b'{"chat_template": "{{ messages }}", "eos_token": "b"}'
LURES = {  # nothing of this may be fetched
    **dict.fromkeys(
        ("pytorch_model.bin", "modeling_tiny.py", "training_args.bin", "README.md", "tokenizer.model"), b"x"
    ),
    **dict.fromkeys(("original/consolidated.00.pth", "original/model.safetensors", "consolidated.safetensors"), b"x"),
}
NAMES = {"config.json", "tokenizer_config.json", "tokenizer.json"}
DRIVER = """
import json, sys, time
from holdfast import cli, models
time.sleep = lambda seconds: None  # the hub's package waits between two tries
def open_tokenizer(name):
    try:
        source = models.open_model(name, tokenizer_only=True, may_fetch=False)
        print(source.name, "has", source.vocab_size)
    except models.source.ModelError as exc:
        print(exc)
for line in json.load(sys.stdin):
    print("exit", cli.main(line) if len(line) > 1 else open_tokenizer(*line) or 0)
"""


class Done(NamedTuple):
    statuses: list[int]
    out: str
    err: str


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """What a repository has: a small model in one safetensors file, and much beside it."""
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save({"model.norm.weight": np.ones(2000, np.float32)}),
        "tokenizer.json": TOKENIZER,
        "tokenizer_config.json": TEMPLATE,
        **LURES,
    }


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path) -> Iterator[FakeHub]:
    config: Files = {name: files[name] for name in NAMES}
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}).encode()
    sharded = {**config, **LURES, **{name: name.encode() for name in shards}, "model.safetensors.index.json": index}
    evil = json.dumps({"weight_map": {"a": "modeling_tiny.py"}}).encode()
    repositories = {
        "org/tiny": {"main": files, "v1": {**files, "config.json": files["config.json"] + b"\n"}},
        "org/sharded": {"main": sharded},
        "org/gated": {"main": files},
        "org/pickled": {"main": {**config, "pytorch_model.bin": b"x"}},
        "org/evil": {"main": {**config, **LURES, "model.safetensors.index.json": evil}},
        "org/empty": {"main": {"README.md": b"x"}},
    }
    with FakeHub(repositories, gated=("org/gated",)) as running:
        yield running


def _run(hub: FakeHub | None, folder: Path, *commands: list[str], **variables: str) -> Done:
    """The commands, one after the other in one process that has its own cache. None: nobody is at the address."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HOLDFAST_"))}
    url = hub.url if hub else "http://127.0.0.1:9"
    env = kept | {"HF_ENDPOINT": url, "HF_HOME": str(folder / "hf"), "HF_HUB_DISABLE_XET": "1"} | variables
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env=env,
    )
    statuses = [int(line.removeprefix("exit ")) for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert len(statuses) == len(commands), done.stderr
    return Done(statuses, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("argument", "model"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/name@", None),
        ("./org/name", None),
        ("/org/name", None),
        ("~/name", None),
        ("org/name/more", None),
        ("name", None),
        ("org/näme", None),
    ],
)
def test_an_id_is_told_from_a_path(argument: str, model: HubModel | None) -> None:
    assert parse_id(argument) == model
    assert model is None or str(model) == argument


def test_a_model_is_fetched_once_and_then_taken_from_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    info = ["models", "info", "org/tiny"]
    gated = ["models", "info", "org/gated"]
    done = _run(
        hub, tmp_path, info, info, ["models", "list"], gated, ["models", "pull", "org/tiny@v1"], HF_TOKEN="good"
    )
    assert done.statuses == [0] * 5
    assert f"org/tiny\n  0.0 MB, commit {commit_of('main')[:12]}" in done.out
    assert hub.fetched() == {*NAMES, "model.safetensors"}
    asked = [line for line in hub.requests if line.startswith("GET /api/models/")]
    assert [line.rpartition("/")[2] for line in asked] == ["main", "main", "v1"]  # not again for what is here
    weights = [line for line in hub.requests if line.startswith("GET /org/tiny") and line.endswith(".safetensors")]
    assert len(weights) == 1  # the same content is kept once
    missing = ["models", "info", "org/sharded"]
    offline = _run(None, tmp_path, info, ["models", "info", "org/tiny@v1"], missing, HF_HUB_OFFLINE="1")
    assert offline.statuses == [0, 0, 2]
    assert "org/sharded is not complete in the local cache, and HF_HUB_OFFLINE forbids to fetch it" in offline.err


def test_a_tokenizer_alone_needs_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "org/here").mkdir(parents=True)
    (tmp_path / "org/here/config.json").write_text('{"vocab_size": 7}')
    done = _run(
        hub,
        tmp_path,
        ["org/sharded"],
        ["models", "pull", "org/sharded", "--tokenizer-only"],
        ["org/sharded"],
        ["models", "list"],
        ["org/here"],
        ["models", "pull", "org/sharded"],
        ["models", "rm", "org/sharded"],
        ["models", "rm", "org/sharded", "--yes"],
        ["models", "rm", "org/sharded", "--yes"],
    )
    assert done.statuses == [0, 0, 0, 0, 0, 0, 2, 0, 2]
    assert "org/sharded is not in the local cache of the hub; run: holdfast models pull org/sharded\nexit" in done.out
    assert "org/sharded has 2\n" in done.out
    assert "without weights" in done.out
    assert "org/here is a directory here: it is used" in done.err
    assert "here has 7\n" in done.out
    assert not hub.fetched() & LURES.keys()
    assert {name for name in hub.fetched() if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert "stdin is not a terminal; pass --yes to confirm" in done.err
    assert "deleted org/sharded: " in done.out
    assert "bytes freed" in done.out
    assert "org/sharded is not in the local cache" in done.err


def test_what_cannot_be_fetched_is_said_in_a_sentence(hub: FakeHub, tmp_path: Path) -> None:
    cases = {
        "org/nowhere": "no such directory here and no such repository on the hub; a private one needs HF_TOKEN",
        "org/tiny@v9": "org/tiny has no revision 'v9' on the hub",
        "org/gated": "org/gated is gated: accept its terms on its page, and set HF_TOKEN",
        "org/pickled": "org/pickled has no model.safetensors on the hub: only weights in safetensors files are fetched",
        "org/evil": "names modeling_tiny.py, which is not a safetensors file",
        "org/empty": "has no model.safetensors on the hub",
    }
    done = _run(hub, tmp_path, *(["models", "info", name] for name in cases), ["models", "pull", "tiny"])
    assert done.statuses == [2] * 7
    for says in cases.values():
        assert says in done.err
    assert "Traceback" not in done.err
    assert "no model 'tiny' to pull" in done.err


@pytest.mark.slow
def test_a_download_that_breaks_off_is_resumed_or_repeated(
    hub: FakeHub, tmp_path: Path, files: dict[str, bytes]
) -> None:
    hub.cuts = {"model.safetensors": deque([1000]), "tokenizer.json": deque([3] * 99)}  # which never arrives
    pull = ["models", "pull", "org/tiny"]
    failed = _run(hub, tmp_path, pull, ["models", "info", "org/tiny"])
    assert failed.statuses == [2, 2]  # half a model is none
    assert failed.err.count("cannot fetch org/tiny from the hub") == 2
    assert "Traceback" not in failed.err
    hub.cuts.pop("tokenizer.json")
    done = _run(hub, tmp_path, pull)
    assert done.statuses == [0], done.err
    folder = Path(done.out.splitlines()[0])
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        name: files[name] for name in (*NAMES, "model.safetensors")
    }
    assert sum(line.startswith("GET") and "model.safetensors" in line for line in hub.requests) == 2


@pytest.mark.slow
def test_a_directory_that_other_tools_filled_is_used_where_the_hub_is_out_of_reach(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    cache = tmp_path / "hf/hub/models--org--tiny"
    folder = cache / "snapshots" / commit_of("main")
    folder.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs/main").write_text(commit_of("main"))
    for name in (*NAMES, "model.safetensors"):
        (folder / name).write_bytes(files[name])
    assert _run(None, tmp_path, ["models", "info", "org/tiny"]).statuses == [0]


def test_pull_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "pull", "--help"])
    assert "ORG/NAME[@REVISION] on the hub" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
async def test_a_server_in_front_of_an_upstream_starts_offline_from_the_cache(tmp_path: Path) -> None:
    package = VOCABULARIES / "tokenizer-qwen3/models"
    content = {name: (package / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    with FakeHub({"org/qwen3": {"main": content}}) as hub:
        pulled = _run(hub, tmp_path, ["models", "pull", "org/qwen3", "--tokenizer-only"])
    assert pulled.statuses == [0], pulled.err
    tokenizer = load_tokenizer(HFSource("x", package))
    async with FakeSGLang(FakeModel(vocab_size=151_669, encode=tokenizer.encode)) as fake:
        cached = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        flags = ["org/qwen3", "--backend", "sglang", "--upstream", fake.url]
        server = await asyncio.to_thread(start, *flags, options=FREE, env=cached)
        try:
            assert "org/qwen3 is served: by sglang" in server.banner
            async with httpx.AsyncClient() as client:
                (model,) = (await client.get(f"http://{server.http}/v1/models")).json()["data"]
            assert model["id"] == "org/qwen3"
        finally:
            assert await asyncio.to_thread(server.stop) == 0
