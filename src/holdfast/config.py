"""Settings as frozen dataclasses: file < environment < flags. Imports nothing of ours but errors."""

import dataclasses
import datetime
import difflib
import json
import math
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
ENVIRONMENT_PREFIX = "HOLDFAST_"

C = TypeVar("C")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    least: int = 0,
) -> Any:
    """A dataclass field that is also a flag, an environment variable and a key of the config file."""
    facts = {"help": help, "choices": choices, "aliases": aliases, "least": least}
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The embedded engine."""

    device: str = option("auto", "where to compute", choices=("auto", "cpu", "cuda", "mlx"))
    dtype: str = option(
        "auto",
        "weights; auto: int8 where the native CPU engine runs, else bfloat16",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    deterministic: bool = option(False, "the same bits for a session whatever is computed beside it")
    threads: int = option(0, "compute threads on the CPU; 0: one for each core")
    sessions: int = option(16, "slabs, that is, sessions with a live cache", aliases=("--capacity",), least=1)
    sink: int = option(4, "first tokens that every session keeps")
    recent: int = option(2048, "last tokens that a session keeps", aliases=("--window",))
    max_pin: int = option(512, "most first tokens that a session may ask to keep")
    prefill_chunk: int = option(256, "prompt tokens computed between two tokens of running streams", least=1)
    rewind_tokens: int = option(1024, "how far back a session can go without recomputing")
    max_recompute_tokens: int = option(65536, "longest history that a far rewind may recompute")
    max_batch: int = option(64, "sequences that share one decoding step", least=1)
    proposer: str = option(
        "auto",
        "who drafts tokens that the model verifies; auto: ngram where the native CPU engine runs, else none",
        choices=("auto", "none", "ngram", "draft_model"),
    )
    draft_length: int = option(7, "longest draft; shorter ones are chosen where they pay")
    draft_model: str = option("", "the small model of --proposer draft_model: a path or a name, same vocabulary")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The doors."""

    grpc: str = option("127.0.0.1:50051", "where the gRPC door listens", aliases=("--bind",))
    http: str = option("127.0.0.1:8000", "where the HTTP door listens; empty: nowhere")
    served_model_name: str = option("", "the name clients see (default: the model's own)")
    keys_file: str = option("", "API keys, one OWNER:KEY a line; without keys, loopback only")
    tls_cert: str = option("", "certificate chain, PEM")
    tls_key: str = option("", "its private key, PEM")
    insecure: bool = option(False, "allow other addresses than loopback without keys")
    idle_ttl_s: float = option(0.0, "close sessions that were idle for so long; 0: never")
    data_dir: str = option("", "where sessions are kept over restarts; empty: they end with the process")
    max_parked: int = option(10_000, "sessions that may wait without a slab; who is idle longest goes beyond that")
    snapshot_memory_mb: int = option(2048, "memory for the caches of parked sessions")
    snapshot_disk_mb: int = option(16_384, "disk for them, in the data directory")
    retain_days: int = option(30, "how long closed sessions stay on record; 0: for ever")
    drain_s: float = option(10.0, "how long running generations may go on after Ctrl-C")
    max_concurrent: int = option(0, "generations that the HTTP door runs at once; 0: as many as there are sessions")
    admission: str = option("queue", "what comes beyond that is", choices=("reject", "queue"))
    queue_max_wait_s: float = option(30.0, "longest wait in that queue; 0: for ever")
    queue_max: int = option(1024, "longest queue; who comes later is rejected", least=1)
    max_body_mb: int = option(64, "largest request body", least=1)
    max_session_mb: int = option(1024, "largest session file that is imported", least=1)
    deprecation_headers: bool = option(True, "tell stateless clients about sessions, in headers")
    sunset: str = option("2027-12-31", "the date that these headers name, YYYY-MM-DD")
    log_prompts: bool = option(False, "write request bodies to the access log")
    compat: str = option("none", "answer errors as another session server does", choices=("none", "miles"))
    backend: str = option("embedded", "where generation happens", choices=("embedded", "sglang", "vllm"))
    weight_version: str = option("", "the version of the weights, where the upstream does not tell; settable later")
    pause_max_wait_s: float = option(60.0, "how long a turn waits while turns are paused")

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.sunset)
        except ValueError as exc:
            raise ConfigError(f"sunset must be a date like 2027-12-31, got {self.sunset!r}") from exc


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """Messages to tokens."""

    chat_template: str = option("", "a file with a Jinja chat template (default: the model's own)")
    chat_template_kwargs: str = option("{}", "variables for the template, JSON; a request's own win")
    control_tokens: str = option(
        "reject", "control tokens that a message spells out stay text, or become real ones", choices=("reject", "allow")
    )
    matcher: str = option(
        "normal",
        "how resent messages are compared: normal, strict, loose_tool_call, role_content_only or a dotted path",
    )
    max_rollback: int = option(1, "sampled turns that a retry may leave behind; -1: any number", least=-1)
    edited_reply: str = option("reject", "a sampled reply that comes back changed is", choices=("reject", "branch"))

    def __post_init__(self) -> None:
        _ = self.template_variables

    @property
    def template_variables(self) -> dict[str, Any]:
        try:
            value = json.loads(self.chat_template_kwargs)
        except ValueError as exc:
            raise ConfigError(f"chat_template_kwargs is not JSON: {exc}") from exc
        if not isinstance(value, dict):
            raise ConfigError("chat_template_kwargs must be a JSON object")
        return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """The SGLang or vLLM server that generates where the embedded engine does not."""

    upstream: str = option("", "base URL of the server, or of the router in front of a cluster")
    upstream_key: str = option("", "bearer key for it; a client's own key never goes there")
    upstream_extra: str = option("", "JSON object merged last into every chat request, e.g. a LoRA path")
    upstream_timeout_s: float = option(600.0, "longest time that one upstream request may take", least=1)
    upstream_connections: int = option(256, "most connections to it at once", least=1)
    max_upstream_mb: int = option(256, "largest reply that is read", least=1)
    routing_replay: str = option(
        "off",
        "ask for routed experts: of all tokens, or of those not yet recorded",
        choices=("off", "full", "additional"),
    )
    keep_training_payloads: bool = option(False, "leave routed experts in the client's copy of a reply")
    logprob_kind: str = option(
        "auto",
        "how it was started: logprobs before or after temperature",
        choices=("auto", "raw", "sampling", "unknown"),
    )
    cpu_workers: int = option(0, "threads for work that would hold up the event loop; 0: min(16, cpus)")
    passthrough: str = option("", "more METHOD:PATH that sessions may reach, comma-separated")


def load(
    cls: type[C],
    *,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    others: Collection[str] = (),
) -> C:
    """An instance of `cls` from its defaults, then `file`, then `environment`, then `flags` (None: not given).

    `others` are the keys that the file may have for someone else.
    """
    values = _from_file(cls, file, others) if file else {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if (text := environment.get(ENVIRONMENT_PREFIX + field.name.upper())) is not None:
            values[field.name] = _converted(
                field, text, f"the environment variable {ENVIRONMENT_PREFIX}{field.name.upper()}"
            )
    values |= {name: value for name, value in flags.items() if value is not None}
    loaded = cls(**values)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value, least = getattr(loaded, field.name), field.metadata["least"]
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise ConfigError(f"{field.name} must be {least} or more, got {value}")
    return loaded


def _from_file(cls: type[Any], path: Path, others: Collection[str]) -> dict[str, Any]:
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
        if name in others and name not in fields:
            continue
        if name not in fields:
            near = difflib.get_close_matches(name, [*fields, *others], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"unknown key {key!r} in {path}{hint}")
        values[name] = _converted(fields[name], value, f"{key} in {path}")
    return values


def _converted(field: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """`value` as the field's type; text is parsed, anything else must fit already."""
    kind: type[Any] = type(field.default)
    try:
        converted = _PARSERS[kind](value) if isinstance(value, str) else value
    except (ValueError, KeyError):
        converted = None
    if kind is float and type(converted) is int:
        converted = float(converted)
    if type(converted) is not kind:
        raise ConfigError(f"{where} must be {_NAMES[kind]}, got {value!r}")
    if (choices := field.metadata["choices"]) and converted not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}, got {value!r}")
    return converted


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PARSERS: dict[type[Any], Any] = {
    int: int,
    float: float,
    str: str,
    bool: {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.__getitem__,
}
