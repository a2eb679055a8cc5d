"""Settings as frozen dataclasses: file < environment < flags. Imports nothing of ours but errors."""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
ENVIRONMENT_PREFIX = "HOLDFAST_"

C = TypeVar("C")


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that is also a flag, an environment variable and a key of the config file."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The embedded engine."""

    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda"))
    dtype: str = option("bfloat16", "weights and cache", choices=("float32", "bfloat16"))
    sessions: int = option(16, "slabs, that is, sessions with a live cache")
    sink: int = option(4, "first tokens that every session keeps")
    recent: int = option(2048, "last tokens that a session keeps")
    max_pin: int = option(512, "most first tokens that a session may ask to keep")
    prefill_chunk: int = option(256, "prompt tokens computed between two tokens of running streams")
    rewind_tokens: int = option(1024, "how far back a session can go without recomputing")
    max_recompute_tokens: int = option(65536, "longest history that a far rewind may recompute")
    max_batch: int = option(64, "sequences that share one decoding step")


def load(
    cls: type[C],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
) -> C:
    """An instance of `cls` from its defaults, then `file`, then `environment`, then `flags` (None: not given)."""
    values = _from_file(cls, file) if file else {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (text := environment.get(ENVIRONMENT_PREFIX + field.name.upper())) is not None:
            values[field.name] = _converted(
                field, text, f"the environment variable {ENVIRONMENT_PREFIX}{field.name.upper()}"
            )
    values |= {name: value for name, value in flags.items() if value is not None}
    return cls(**values)


def _from_file(cls: type[Any], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read the config file {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"the config file {path} is not TOML: {exc}") from exc
    fields = {field.name: field for field in dataclasses.fields(cls)}
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key!r} in {path}{hint}")
        values[name] = _converted(fields[name], value, f"{key} in {path}")
    return values


def _converted(field: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """`value` as the field's type; text is parsed, anything else must fit already."""
    kind: type[Any] = type(field.default)
    try:
        converted = kind(value) if isinstance(value, str) else value
    except ValueError:
        converted = None
    if type(converted) is not kind:
        raise ConfigError(f"{where} must be {_NAMES[kind]}, got {value!r}")
    if (choices := field.metadata["choices"]) and converted not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, got {value!r}")
    return converted


_NAMES = {int: "a whole number", str: "text"}
