"""ChatTokenizer over a small tokenizer that is made here; nothing is downloaded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from holdfast_sdk import ModelInfo, TokenizationMismatch
from holdfast_sdk.tokenization import ChatTokenizer

TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)
WORDS = ["<|unk|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "hello", "there"]
MODEL = ModelInfo(
    name="small",
    fingerprint="f",
    vocabulary_size=len(WORDS),
    eos_token_ids=(2,),
    tokenizer_hash="",
    chat_template_hash="",
    sink=4,
    recent=64,
    max_pin_tokens=16,
    context_length=128,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<|unk|>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", unk_token="<|unk|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return ChatTokenizer(folder)


def test_a_conversation_becomes_plain_ids(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "hello there"}]
    ids = tokenizer.tokens_for_chat(messages)
    assert ids == [1, 3, 5, 6, 2, 1, 4]
    assert all(type(token) is int for token in ids)
    assert tokenizer.tokens_for_chat(messages, add_generation_prompt=False) == [1, 3, 5, 6, 2]


def test_control_tokens_are_shown(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode(iter([5, 6, 2])).split() == ["hello", "there", "<|im_end|>"]


def test_the_models_own_tokenizer_passes(tokenizer: ChatTokenizer) -> None:
    tokenizer.check(MODEL)
    tokenizer.check(replace(MODEL, vocabulary_size=64))  # a padded vocabulary
    tokenizer.check(replace(MODEL, eos_token_ids=(0, 2)))
    tokenizer.check(replace(MODEL, eos_token_ids=()))


def test_ids_that_the_model_does_not_know_are_told(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(TokenizationMismatch, match="up to 6") as caught:
        tokenizer.check(replace(MODEL, vocabulary_size=6))
    assert caught.value.details == {"largest_id": "6", "vocabulary_size": "6"}
    assert caught.value.grpc_status is None


def test_another_end_token_is_told(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(TokenizationMismatch, match="ends with id 2"):
        tokenizer.check(replace(MODEL, eos_token_ids=(5,)))


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers jinja2"):
        ChatTokenizer("anywhere")


def test_the_sdk_itself_needs_neither_transformers_nor_torch_nor_the_server() -> None:
    code = "import sys, holdfast_sdk, holdfast_sdk.tokenization; print([m for m in sys.modules if m in sys.argv[1:]])"
    unwanted = ["transformers", "torch", "tokenizers", "numpy", "holdfast"]
    found = subprocess.run([sys.executable, "-c", code, *unwanted], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[]"
