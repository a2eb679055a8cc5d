"""Messages to tokens and back, with the default model's real tokenizer and template."""

import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import normalizers, pre_tokenizers

from holdfast.chat.template import ChatTemplate, load_template
from holdfast.chat.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from holdfast.errors import InvalidArgument, ModelError, TemplateError
from holdfast.models import GGUFSource, HFSource, open_model
from tests import tiny
from tests.qwen3 import qwen3

USER = {"role": "user", "content": "What is the capital of France?"}


@pytest.fixture(scope="module")
def tokenizer(default_source: GGUFSource) -> Tokenizer:
    return load_tokenizer(default_source)


def test_the_tokenizer_is_that_of_transformers(default_source: GGUFSource, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    path = default_source.path
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in (
        "Hello, world!",
        "  two  spaces\n\n\ttab",
        "héllo 日本 🙂",
        "it's we'll I'M",
        "<|im_start|>user\nhi<|im_end|>",
    ):
        assert tokenizer.encode(text) == theirs(text)["input_ids"]
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a 2024")] == ["a", " ", "2", "0", "2", "4"]


@given(st.text(max_size=60))
def test_text_comes_back_in_pieces_that_are_never_half_a_character(text: str) -> None:
    tokenizer = _tokenizer()
    detokenizer = Detokenizer(tokenizer)
    try:
        ids = tokenizer.encode(text)
    except InvalidArgument:
        return
    pieces = [detokenizer.push(token) for token in ids]
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.finish() == text


PARTS = [
    "a",
    "Z",
    "7",
    "12",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    ".",
    "!",
    "'s",
    "é",
    "e\u0301",
    "漢",
    "\t",
    "<|im_end|>",
    "€",
    "\x1c",
]


@pytest.mark.parametrize("which", ["default", "qwen3"])
@given(st.lists(st.sampled_from([*PARTS, "\u1112\u1161\u11ab", "\u03b1\u0313\u0300\u0345"]), max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_text_in_pieces_has_the_tokens_of_the_whole_text_and_at_least_the_fewest(
    which: str, monkeypatch: pytest.MonkeyPatch, parts: list[str]
) -> None:
    monkeypatch.setattr("holdfast.chat.tokenizer._PIECE", 2)
    tokenizer, text = _tokenizer() if which == "default" else qwen3().tokenizer, "".join(parts)
    whole = tokenizer.inner.encode(text, add_special_tokens=False).ids
    if not tokenizer._missing_bytes.intersection(text.encode()):
        assert tokenizer.encode(text) == whole
        assert tokenizer.fewest_tokens(text) <= len(whole)


def test_long_texts_are_tokenized_in_pieces_at_the_ends_of_words(tokenizer: Tokenizer) -> None:
    pieces = list(tokenizer._pieces("some words. " * 100_000))
    assert "".join(pieces) == "some words. " * 100_000
    assert len(pieces) == 5
    assert all(piece.startswith(" ") for piece in pieces[1:])
    assert tokenizer.fewest_tokens("#" * 80) == 1
    assert tokenizer.fewest_tokens("#" * 810) == 10


def test_tokenizers_of_other_kinds_are_not_split_and_have_no_lower_bound(tokenizer: Tokenizer) -> None:
    inner = RustTokenizer.from_str(tokenizer.inner.to_str())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not Tokenizer(inner, frozenset())._can_split
    inner.normalizer = normalizers.Strip()
    assert Tokenizer(inner, frozenset()).fewest_tokens("a" * 1000) == 0


@cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(open_model())


@pytest.mark.parametrize(("text", "says"), [("a\U00040000", "no token for the byte 0xF1"), ("ab\ud800", "character 2")])
def test_text_that_cannot_be_spelled_is_refused_not_dropped(tokenizer: Tokenizer, text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        tokenizer.encode(text)


def test_a_cut_character_is_shown_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_templates_that_fail_say_so() -> None:
    with pytest.raises(ModelError, match="does not parse, line 1"):
        ChatTemplate("{% if %}")
    refusing = ChatTemplate("{{ raise_exception('only users here') }}")
    with pytest.raises(TemplateError, match="only users here"):
        refusing.render([USER], add_generation_prompt=True)
    with pytest.raises(TemplateError, match=r"unsafe|access"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([USER], add_generation_prompt=True)


def test_templates_get_the_helpers_they_expect() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y') | length }}{{ x }}", bos_token="<s>"
    )
    text = template.render([{"role": "user", "content": "é"}], add_generation_prompt=False, x=1)
    assert text == '<s>[{"role": "user", "content": "é"}]41'


@pytest.fixture
def hf_directory(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tiny.hf_model("llama").save_pretrained(tmp_path)
    tokenizer.inner.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_directory_brings_its_tokenizer_and_template(hf_directory: Path, tokenizer: Tokenizer) -> None:
    source = HFSource("x", hf_directory)
    (hf_directory / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    config: dict[str, object] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (hf_directory / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(source)
    assert loaded.encode("Hello 12") == tokenizer.encode("Hello 12")
    assert (loaded.eos_token_ids, loaded.bos_token, loaded.eos_token) == ({2, 5}, "<s>", "</s>")
    with pytest.raises(ModelError, match="no chat template"):
        load_template(source, loaded)
    for templates in (
        "A{{ bos_token }}",
        [{"name": "other", "template": "B"}, {"name": "default", "template": "A<s>"}],
    ):
        (hf_directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": templates}))
        assert load_template(HFSource("x", hf_directory), loaded).render([], add_generation_prompt=False) == "A<s>"
    (hf_directory / "chat_template.jinja").write_text("C")
    assert load_template(HFSource("x", hf_directory), loaded).render([], add_generation_prompt=False) == "C"


def test_one_eos_id_or_none_is_fine(hf_directory: Path) -> None:
    (hf_directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_tokenizer(HFSource("x", hf_directory)).eos_token_ids == {7}
    for name in ("generation_config.json", "config.json"):
        (hf_directory / name).write_text("{}")
    assert load_tokenizer(HFSource("x", hf_directory)).eos_token_ids == frozenset()


def test_a_tokenizer_that_is_missing_or_broken_is_refused(hf_directory: Path) -> None:
    (hf_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="not a readable tokenizer"):
        load_tokenizer(HFSource("x", hf_directory))
    (hf_directory / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(HFSource("x", hf_directory))


def _with_value(source: GGUFSource, key: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    real = source.file.value
    monkeypatch.setattr(source.file, "value", lambda k, d=None: value if k == key else real(k, d))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [("tokenizer.ggml.model", "llama", "GGUF tokenizer 'llama'"), ("tokenizer.ggml.pre", "odd", "pre-tokenizer 'odd'")],
)
def test_gguf_vocabularies_of_other_kinds_are_refused(
    default_source: GGUFSource, monkeypatch: pytest.MonkeyPatch, key: str, value: str, says: str
) -> None:
    _with_value(default_source, key, value, monkeypatch)
    with pytest.raises(ModelError, match=says):
        load_tokenizer(default_source)


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", 5), ("llama-bpe", 3), ("gpt-2", 2)])
def test_pre_tokenizers_split_numbers_their_own_way(
    default_source: GGUFSource, monkeypatch: pytest.MonkeyPatch, pre: str, pieces: int
) -> None:
    _with_value(default_source, "tokenizer.ggml.pre", pre, monkeypatch)
    split = load_tokenizer(default_source).inner.pre_tokenizer.pre_tokenize_str("it 123")
    assert len(split) == pieces
