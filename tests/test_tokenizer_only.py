"""Models that an upstream computes: a tokenizer is enough, whatever the architecture; no weights are needed."""

import asyncio
import base64
import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.probe import TokenSample
from holdfast.backends.sglang import SGLangBackend
from holdfast.backends.upstream import upstream_model_info
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.cli import main
from holdfast.config import UpstreamConfig
from holdfast.errors import ConfigError, ModelError
from holdfast.models import HFSource, Routing, open_model
from holdfast.models.architecture import routing_of
from holdfast.models.tiktoken_file import KIMI_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT
from holdfast.testing.fake_servers import FakeSGLang
from holdfast.testing.fake_upstream import FakeModel, Fault, flat_rows
from tests.model_folders import FAMILIES, VOCABULARIES, family_folder
from tests.test_serve import FREE, start

FACTS = {  # vocabulary, context, routing
    "qwen3_moe": (151_936, 40_960, Routing(48, 8, 48)),
    "glm4_moe": (151_936, None, Routing(45, 8, 46)),
    "deepseek_v3": (129_280, 163_840, Routing(58, 8, 61)),
    "gpt_oss": (201_088, None, Routing(24, 4, 24)),
    "gemma3": (262_145, None, None),
    "qwen3_5_moe": (248_320, 262_144, Routing(40, 8, 40)),
    "": (151_665, None, None),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_files_tell_is_read(family: str, tmp_path: Path) -> None:
    source = open_model(str(family_folder(tmp_path, family)), tokenizer_only=True)
    assert isinstance(source, HFSource)
    assert (source.vocab_size, source.context, source.routing) == FACTS[family]
    assert source.tokenizer_hash
    with pytest.raises(ModelError, match="is not supported; supported: llama" if family else r"has no config\.json"):
        open_model(str(source.path))


@pytest.mark.parametrize(
    ("config", "routing"),
    [
        ({"mlp_only_layers": [0, 3], "num_experts_per_tok": 2}, Routing(4, 2, 6)),
        ({"decoder_sparse_step": 2, "num_experts_per_tok": 2}, Routing(3, 2, 6)),
        ({"interleave_moe_layer_step": 3, "num_experts_per_tok": 1}, Routing(2, 1, 6)),
        ({"moe_layers": [1, 5], "num_experts_per_tok": 1}, Routing(2, 1, 6)),
        ({"moe_layer_freq": [0, 0, 1, 1, 1, 1], "num_experts_per_tok": 6}, Routing(4, 6, 6)),
        ({"moe_layer_freq": [0], "num_experts_per_tok": 6}, None),
        ({"num_experts_per_tok": "many"}, None),
        ({"num_experts_per_tok": 2, "num_hidden_layers": None}, None),
        ({}, None),
    ],
)
def test_each_family_names_its_dense_layers_differently(config: dict[str, Any], routing: Routing | None) -> None:
    assert routing_of({"num_hidden_layers": 6} | config) == routing


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "qwen3_moe" else pytest.mark.slow) for name in FAMILIES]
)
async def test_a_server_with_routing_replay_starts_before_an_upstream(family: str, tmp_path: Path) -> None:
    path = family_folder(tmp_path, family)
    tokenizer = load_tokenizer(open_model(str(path), tokenizer_only=True))
    model = FakeModel(vocab_size=FACTS[family][0], encode=tokenizer.encode, decode=tokenizer.decode, context=32_768)
    routing = FACTS[family][2] or Routing(1, 2, 3)
    async with FakeSGLang(model, routed_experts=lambda num: flat_rows(num, routing.depth * routing.top_k)) as fake:
        flags = [str(path), "--backend", "sglang", "--upstream", fake.url, "--routing-replay", "full"]
        server = await asyncio.to_thread(start, *flags, options=FREE)
        try:
            assert f"{path.name} is served: by sglang" in server.banner
        finally:
            assert await asyncio.to_thread(server.stop) == 0
    assert all(json.loads(seen.body)["return_routed_experts"] for seen in fake.chats())


async def test_an_upstream_with_another_tokenizer_is_refused() -> None:
    model = FakeModel(encode=lambda text: list(text.encode()))
    async with FakeSGLang(model) as fake:
        backend = SGLangBackend(UpstreamConfig(upstream=fake.url), upstream_model_info(name="ours", vocab_size=64))
        for wrong in ((1, 2, 3), tuple(b"aba"), ()):
            backend.sample = TokenSample("ours", "ab", wrong)
            with pytest.raises(ConfigError, match="'fake-model', whose tokenizer is not that of 'ours': it reads"):
                await backend.prepare()
        backend.sample = TokenSample("ours", "ab", tuple(b"ab"))
        await backend.prepare()
        backend.sample = TokenSample("ours", "ab", (1,))
        model.encode = None  # an upstream without /tokenize cannot be asked
        await backend.prepare()
        fake.faults.extend([Fault(), Fault(body=b'{"tokens": "a"}')])  # nor one that does not answer the question
        model.encode = lambda text: []
        await backend.prepare()
        await backend.aclose()


@pytest.mark.parametrize("family", ["glm4_moe", ""])
def test_doctor_asks_for_no_architecture_in_front_of_an_upstream(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(family_folder(tmp_path, family))
    before = ["--backend", "sglang", "--upstream", "http://127.0.0.1:1"]
    assert main(["doctor", path, *FREE, *before]) == 0
    assert f"a vocabulary of {FACTS[family][0]:,}; the upstream has the weights" in capsys.readouterr().out
    assert main(["doctor", path, *FREE]) == 1
    assert ("has no config.json" if not family else "'glm4_moe' is not supported") in capsys.readouterr().out


def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    def refused(says: str) -> None:
        with pytest.raises(ModelError, match=says):
            open_model(str(tmp_path), tokenizer_only=True)

    refused("has no vocabulary: neither a vocab_size in config.json nor a tokenizer.json")
    (tmp_path / "config.json").write_text('{"vocab_size": "many"}')
    refused("vocab_size is 'many'")
    (tmp_path / "config.json").write_text('{"eos_token_id": "x"}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": 7}}')
    refused("no usable vocabulary")
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": []}')
    source = open_model(str(tmp_path), tokenizer_only=True)
    assert source.vocab_size == 2
    with pytest.raises(ModelError, match="eos_token_id is 'x'"):
        _ = source.eos_token_ids


# Vocabularies in tiktoken's format

NUM_RANKS = 6000
SPECIAL = {"<|begin|>": NUM_RANKS, "<|end|>": NUM_RANKS + 7, "[EOT]": NUM_RANKS + 2}
LISTED = {"added_tokens_decoder": {str(token): {"content": text} for text, token in SPECIAL.items()}}
PARTS = [
    *("a", "b", "A", " ", "  ", "\n", "\r\n", "\t", "1234567", "'S", "'ll", "(", ";;", "_", "the", "return", *SPECIAL),
    *("é", "e\u0301", "\u017f", "\u212a", "\u2003", "\x85", "\0", "ß", "İ", "Ⅷ", "漢字", "मस्ते", "ไทย", "🙂"),
]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """The first tokens of Llama 3: any number of them is a vocabulary."""
    whole = load_tokenizer(HFSource("x", VOCABULARIES / "tokenizer-llama3/models"))
    return {whole.token_bytes(token): token for token in range(NUM_RANKS)}


def _folder(path: Path, ranks: dict[bytes, int], name: str = "tokenizer.model", **config: Any) -> Path:
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (path / name).write_bytes(b"".join(lines))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("name", "config", "pattern"),
    [
        ("tokenizer.model", {"pat_str": LLAMA3_SPLIT, "eos_token": "<|end|>", **LISTED}, LLAMA3_SPLIT),
        ("tiktoken.model", {"tokenizer_class": "TikTokenTokenizer", **LISTED}, KIMI_SPLIT),
        ("qwen.tiktoken", {"tokenizer_class": "QWenTokenizer"}, QWEN2_SPLIT),
    ],
)
def test_tiktoken_reads_text_as_we_do(
    name: str, config: dict[str, Any], pattern: str, ranks: dict[bytes, int], tmp_path: Path
) -> None:
    import tiktoken

    source = open_model(str(_folder(tmp_path, ranks, name, **config)), tokenizer_only=True)
    assert isinstance(source, HFSource)
    vocabulary, ours = source.tiktoken, load_tokenizer(source)
    assert vocabulary
    special = SPECIAL if "added_tokens_decoder" in config else vocabulary.special_tokens
    assert ours.control_tokens == dict(sorted(special.items(), key=lambda pair: pair[1]))
    assert ours.eos_token_ids == ({SPECIAL["<|end|>"]} if "eos_token" in config else frozenset())
    assert source.vocab_size == 1 + max(special.values())
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    draw = random.Random(name)
    texts = ["".join(draw.choices(PARTS, k=draw.randint(1, 40))) for _ in range(1000)]
    texts += [part * num for part in ("a", "ab", " ", "=", "\n") for num in range(1, 60)]
    texts += [Path(__file__).read_text(), "<|im_start|>user\nhi<|im_end|>"]
    for text in texts:
        read = unicodedata.normalize("NFC", text) if vocabulary.composes else text
        assert ours.encode(text) == theirs.encode(read, allowed_special="all")
        assert ours.encode_plain(text) == theirs.encode_ordinary(read)
        assert ours.decode(ours.encode(text)) == read


def test_the_hash_of_a_tiktoken_vocabulary_covers_all_of_it(ranks: dict[bytes, int], tmp_path: Path) -> None:
    few = {bytes([byte]): byte for byte in range(256)}
    more = {"<|other|>": {"content": "<|other|>"}}

    def hash_of(ranks: dict[bytes, int], **config: Any) -> str:
        return HFSource("x", _folder(tmp_path, ranks, **config)).tokenizer_hash

    changed = {"added_tokens_decoder": LISTED["added_tokens_decoder"] | {"9000": more["<|other|>"]}}
    hashes = [
        hash_of(few, pat_str=LLAMA3_SPLIT, **LISTED),
        hash_of(few, pat_str=QWEN2_SPLIT, **LISTED),
        hash_of(few, pat_str=LLAMA3_SPLIT, **changed),
        hash_of(few | {b"ab": 256}, pat_str=LLAMA3_SPLIT, **LISTED),
    ]
    assert len({*hashes, ""}) == 5


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LISTED, r'how it splits text is not known: give the regular expression as "pat_str" in .*tokenizer_config'),
        ({"pat_str": LLAMA3_SPLIT}, "its control tokens are not known: list them in added_tokens_decoder"),
        ({"pat_str": "[", **LISTED}, r"cannot be used with the split '\['"),
        ({"pat_str": ".", "added_tokens_decoder": {"7": {"content": "<x>"}}}, "with ids of their own"),
        ({"pat_str": ".", "added_tokens_decoder": {"x": {"content": "<x>"}}}, "no usable added_tokens_decoder"),
        ({"pat_str": "[a-z]+", "added_tokens_decoder": {"300": {"content": "end"}}}, "'end' is also what plain text"),
    ],
)
def test_a_tiktoken_vocabulary_is_never_guessed(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    _folder(tmp_path, {bytes([byte]): byte for byte in range(256)}, **config)
    with pytest.raises(ModelError, match=says):
        load_tokenizer(HFSource("x", tmp_path))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\n\x0e\n\x05<unk>\x15\x00\x00", r"is a SentencePiece model.*save a tokenizer\.json beside it"),
        (b"", "SentencePiece"),
        (b"YQ== 0\nYg== \n", "truncated or damaged"),
        (b"YQ== 0\nY!== 1\n", "truncated or damaged"),
        (b"YQ== 0\nYg== 0\n", "a rank is there twice"),
    ],
)
def test_other_files_of_that_name_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ModelError, match=says):
        open_model(str(tmp_path), tokenizer_only=True)
