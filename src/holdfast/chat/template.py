"""The model's own chat template, rendered in a sandbox."""

import datetime
import json
from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import ModelError, TemplateError
from holdfast.models import ModelSource


class ChatTemplate:
    """Messages to text. Whatever a template raises comes out as TemplateError."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ModelError(f"the chat template does not parse, line {exc.lineno}: {exc.message}") from exc
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, **variables: Any) -> str:
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **variables,
            )
        except Exception as exc:
            raise TemplateError(f"the chat template refused these messages: {exc}") from exc


def load_template(source: ModelSource, tokenizer: Tokenizer) -> ChatTemplate:
    if not source.chat_template:
        raise ModelError(f"model {source.name} has no chat template; use an instruct model")
    return ChatTemplate(source.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
