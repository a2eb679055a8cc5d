"""Messages to token ids by the model's own chat template, so that a client's text never becomes a control token."""

import datetime
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as RustTokenizer

from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import InvalidArgument, ModelError, TemplateError
from holdfast.models import ModelSource

REASONING_TAGS = ("<think>", "</think>")

Tools = Sequence[Mapping[str, Any]]

# Names that templates and Jinja itself use; no variable may have one of them.
RESERVED = {
    "messages",
    "tools",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "at",
}
RESERVED |= {"self", "super", "loop", "caller", "varargs", "kwargs", *DEFAULT_NAMESPACE}

_NONCE = secrets.token_hex(8)
_STAND_IN = f"\u2e28{_NONCE}:%d\u2e29"  # printable, so that a template that prints an object does not escape it
_STAND_INS = re.compile(f"\u2e28{_NONCE}:([0-9]+)\u2e29")


class ChatTemplate:
    """Messages to text, in a sandbox. Whatever the template raises comes out as TemplateError."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ModelError(f"the chat template does not parse, line {exc.lineno}: {exc.message}") from exc
        self.variables = frozenset(find_undeclared_variables(environment.parse(source)))  # that it reads
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self, messages: Sequence[Message], at: float | None = None, /, *, add_generation_prompt: bool, **variables: Any
    ) -> str:
        """The text. `at` is the time that the template is told, in seconds since 1970; without it, the current one."""
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        given["strftime_now"] = (datetime.datetime.fromtimestamp(at) if at else datetime.datetime.now()).strftime
        try:
            return self._template.render(variables | self._tokens | given)
        except Exception as exc:
            raise TemplateError(f"the model's chat template rejects these messages: {exc}") from exc


def load_template(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
    if not source.chat_template:
        raise ModelError(f"model {source.name} has no chat template; use an instruct model")
    return ChatTemplate(source.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def with_controls(tokenizer: Tokenizer, template: ChatTemplate) -> Tokenizer:
    """The tokenizer with the tokens that open messages as control tokens, which some tokenizer files leave plain.

    Where that is so, every added token that the template spells becomes a control token, except reasoning tags. Without
    this, a client that spells the opener of a message could write one.
    """
    talk = [{"role": role, "content": "-"} for role in ("user", "assistant", "user")]
    try:
        rendered = template.render(talk, add_generation_prompt=True)
    except TemplateError:
        return tokenizer
    added = tokenizer.inner.get_added_tokens_decoder().values()
    plain = {token.content for token in added if not token.special and token.content.strip()} - {*REASONING_TAGS}
    if not any(token in rendered for token in plain):
        return tokenizer
    state = json.loads(tokenizer.inner.to_str())
    for token in state["added_tokens"]:
        token["special"] |= token["content"] in plain and token["content"] in template.source
    return replace(tokenizer, inner=RustTokenizer.from_str(json.dumps(state)))


class Renderer:
    """Template and tokenizer together. With `allow_control`, control tokens spelled in messages become real ones."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, *, allow_control: bool = False) -> None:
        self.template = template
        self.tokenizer = tokenizer
        self._allow_control = allow_control
        self._controls = tokenizer.control_tokens  # text -> id
        spelled = "|".join(map(re.escape, sorted(self._controls, key=len, reverse=True)))
        self._pattern = re.compile(spelled) if spelled else None
        self._texts = list(self._controls)

    def text(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: Tools = (),
        variables: Mapping[str, Any] | None = None,
        is_limited: bool = True,
        at: float | None = None,
    ) -> str:
        """The rendered conversation. Control tokens in messages are replaced by stand-ins that `encode` resolves.

        `is_limited`: more text than may be tokenized at once is refused. `at`: the time that the template is told.
        """
        given = dict(variables or {}) | ({"tools": list(tools)} if tools else {})
        try:
            if is_limited:
                self.tokenizer.check_size(_size([*messages, given]), "messages")
            shown = [self._guarded(message) for message in messages]
            given = self._guarded(given)
        except RecursionError as exc:
            raise InvalidArgument("messages, tools or chat_template_kwargs are nested too deeply") from exc
        return self.template.render(shown, at, add_generation_prompt=prompt, **given)

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text. The text of a control token in a message stays plain text."""
        if not _STAND_INS.search(text) or self._pattern is None:
            return self.tokenizer.encode(text)
        ids: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            ids += self._plain(text[end : match.start()])
            ids.append(self._controls[match.group()])
            end = match.end()
        return ids + self._plain(text[end:])

    def fewest_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of rendered text, without tokenizing it."""
        return self.tokenizer.fewest_tokens(self.restored(text))

    def count_control(self, messages: Sequence[Message]) -> int:
        """How many control tokens the messages spell out."""
        if self._pattern is None:
            return 0
        return sum(len(self._pattern.findall(text)) for message in messages for text in _strings(message))

    def _plain(self, text: str) -> list[int]:
        ids = self.tokenizer.encode_plain(self.restored(text))
        for token in ids:
            if self.tokenizer.is_control(token):
                spelled = self.tokenizer.decode([token])
                raise InvalidArgument(
                    f"messages contain {spelled!r}, which is a control token of this model; remove it", param="messages"
                )
        return ids

    def restored(self, text: str) -> str:
        """Rendered text with the text of control tokens in place of their stand-ins."""
        return _STAND_INS.sub(lambda match: self._texts[int(match.group(1))], text)

    def _guarded(self, value: Any) -> Any:
        if self._allow_control or self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(lambda match: _STAND_IN % self._texts.index(match.group()), value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(item) for key, item in value.items()}
        return [self._guarded(item) for item in value] if isinstance(value, list | tuple) else value


def _size(value: Any) -> int:
    """About how many bytes a value takes in a prompt: not more than the text that it makes, quickly found."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value)) + sum(map(_size, value.values()))
    return sum(map(_size, value)) + len(value) if isinstance(value, list) else 1


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [text for item in inner for text in _strings(item)]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks what trainers learn from; it renders what is inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
