"""Settings as frozen dataclasses, read from a TOML file, the environment and flags: file < environment < flags.

Imports nothing of ours but errors.
"""

import argparse
import dataclasses
import datetime
import difflib
import json
import math
import os
import tomllib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m-instruct"
ENVIRONMENT_PREFIX = "HOLDFAST_"
EMBEDDED_REPLY_TOKENS = 32_768  # the longest reply of the embedded engine, where no setting says otherwise

C = TypeVar("C")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
    least: int = 0,
    metavar: str = "",
    is_list: bool = False,
) -> Any:
    """A dataclass field that is also a flag, an environment variable and a key of the config file.

    `metavar`: what the help shows in place of a value, unless the name tells. `is_list`: text of several values,
    separated by commas; the flag may be given several times, and the key may be a list.
    """
    facts = {"help": help, "choices": choices, "aliases": aliases, "least": least, "metavar": metavar}
    facts["is_list"] = is_list
    return dataclasses.field(default=default, metadata=facts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The server: addresses, API keys, storage, limits."""

    grpc: str = option("127.0.0.1:50051", "address of the gRPC endpoint", aliases=("--bind",))
    http: str = option("127.0.0.1:8000", "address of the HTTP endpoint; empty: no HTTP endpoint")
    served_model_name: str = option("", "model name that clients see; empty: the model's own")
    keys_file: str = option("", "file of API keys, one OWNER:KEY per line; without keys, only loopback is served")
    tls_cert: str = option("", "TLS certificate chain for both endpoints, a PEM file")
    tls_key: str = option("", "private key of --tls-cert, a PEM file")
    insecure: bool = option(False, "allow addresses other than loopback without API keys")
    cors_origin: str = option(
        "", "origins of web pages that may use the HTTP endpoint, comma-separated; *: any, which needs API keys"
    )
    allowed_hosts: str = option(
        "", "names besides localhost that HTTP requests may address, comma-separated; checked only without API keys"
    )
    idle_ttl_s: float = option(0.0, "seconds after which an idle session is closed; 0: never")
    data_dir: str = option("", "directory that keeps sessions across restarts; empty: they end with the process")
    journal: str = option(
        "", "PostgreSQL database that keeps sessions in place of --data-dir, and that several servers may share"
    )
    blobs: str = option(
        "",
        "directory, or URL of an object store, for long requests and replies that --journal names but does not hold; "
        "empty: they are in the database too",
    )
    snapshots: str = option(
        "",
        "directory, or URL of an object store, for snapshots of sessions that all members of a cluster reach; "
        "empty: each server's own, in --data-dir",
    )
    max_parked: int = option(
        10_000,
        "sessions that may be parked, that is, without a slab; beyond this number the least recently used one rests "
        "in the journal until it is asked for, or is evicted if there is no journal",
    )
    snapshot_memory_mb: int = option(2048, "memory for snapshots, the caches of parked sessions, in MB")
    snapshot_disk_mb: int = option(16_384, "disk space for snapshots in the data directory, in MB")
    retain_days: int = option(30, "days that closed sessions stay on record; 0: forever")
    drain_s: float = option(10.0, "seconds that running generations may continue after Ctrl-C")
    max_concurrent: int = option(
        0, "generations that both endpoints together run at once; 0: as many as sessions can be live"
    )
    admission: str = option("queue", "what happens to requests beyond --max-concurrent", choices=("reject", "queue"))
    queue_max_wait_s: float = option(30.0, "longest wait in the queue, in seconds; 0: no limit")
    queue_max: int = option(1024, "longest queue; further requests are rejected", least=1)
    max_reply_tokens: int = option(
        0,
        "most tokens in one reply; a larger max_tokens is lowered to it; "
        f"0: {EMBEDDED_REPLY_TOKENS} on the embedded engine, on an upstream its own limit",
    )
    stream_stall_s: float = option(
        60.0, "seconds that a stream waits for a client that does not read; then it is cancelled; 0: no limit"
    )
    stream_ping_s: float = option(
        10.0,
        "seconds without an event after which a stream sends a ping, the first one within a second; "
        "0: no pings, and the response begins with the first event",
    )
    owner_max_sessions: int = option(0, "sessions that one owner may have; 0: no limit")
    owner_max_running: int = option(0, "generations that one owner may run at once; 0: no limit")
    owner_max_queued: int = option(0, "requests of one owner that may wait in the queue; 0: no limit")
    owner_max_mb: int = option(
        0, "tokens, logprobs and bodies that one owner may have on record, in MB, closed sessions included; 0: no limit"
    )
    max_body_mb: int = option(64, "largest request body, in MB", least=1)
    max_session_mb: int = option(1024, "largest session file that can be imported, in MB", least=1)
    max_connections: int = option(
        0, "HTTP connections that may be open at once; 0: as many as the limit on open files allows"
    )
    connection_timeout_s: float = option(
        30.0, "seconds that an HTTP connection may be idle, and that a client may stall while it sends a request"
    )
    deprecation_headers: bool = option(True, "send headers that point stateless clients to sessions")
    sunset: str = option("2027-12-31", "date in the Sunset header of stateless responses, YYYY-MM-DD")
    log_prompts: bool = option(False, "write request bodies to the access log")
    session_header: str = option(
        "",
        "request headers besides Holdfast-Session that name a session, such as an agent's own id, comma-separated; "
        "a session is created for each new value",
        metavar="NAMES",
    )
    compat: str = option(
        "none", "error format and order of tool fields of another session server", choices=("none", "miles")
    )
    unknown_fields: str = option(
        "ignore",
        "what happens to fields of a request or message that are unknown here: "
        "left out and named in the response header Holdfast-Ignored-Fields (ignore), or 400 (reject)",
        choices=("ignore", "reject"),
    )
    backend: str = option("embedded", "where generation runs", choices=("embedded", "sglang", "vllm"))
    weight_version: str = option("", "version of the weights if the upstream reports none; can be changed later")
    pause_max_wait_s: float = option(60.0, "longest wait of a request while generation is paused, in seconds")
    sample_weight_versions: str = option(
        "names",
        "how samples tell weight versions: a list of names (names), or for each turn spans of tokens (spans), "
        "as later versions of miles read them",
        choices=("names", "spans"),
    )

    member: str = option(
        "", "this server's name in its cluster; a server that starts under a name replaces the one before"
    )
    lease_s: float = option(
        10.0, "seconds without a sign of life after which other members take over the sessions of one"
    )
    advertise: str = option(
        "",
        "host name or address under which other members reach this server; "
        "empty: the host of --http and --grpc, or the name of this machine where they are all interfaces",
        metavar="HOST",
    )
    peer_http: str = option("", "further address of the HTTP endpoint, for other members alone; empty: --http")
    peer_grpc: str = option("", "further address of the gRPC endpoint, for other members alone; empty: --grpc")
    peer_ca: str = option("", "certificates that other members' are checked against, a PEM file; empty: the system's")
    workers: int = option(
        1, "servers on this machine that share the addresses and --journal, which more than one need", least=1
    )

    def __post_init__(self) -> None:
        if self.journal and self.data_dir:
            raise ConfigError("sessions are kept in one place: pass --journal or --data-dir, not both")
        if self.journal and not self.journal.startswith(("postgresql://", "postgres://")):
            raise ConfigError("journal must be the URL of a PostgreSQL database, postgresql://USER@HOST/DATABASE")
        if self.lease_s < 1:
            raise ConfigError("lease_s must be at least 1")
        if self.workers > 1 and not self.journal:
            raise ConfigError("--workers needs --journal postgresql://...: one data directory serves one process")
        if self.blobs and not self.journal:
            raise ConfigError("--blobs needs --journal: a data directory keeps long replies in files of its own")
        if self.blobs and self.blobs == self.snapshots:
            raise ConfigError("--blobs and --snapshots must be two places: snapshots may be deleted, replies must not")
        try:
            datetime.date.fromisoformat(self.sunset)
        except ValueError as exc:
            raise ConfigError(f"sunset must be a date like 2027-12-31, got {self.sunset!r}") from exc

    @property
    def reply_limit(self) -> int:
        """Most tokens in one reply; 0: no limit."""
        return self.max_reply_tokens or (EMBEDDED_REPLY_TOKENS if self.backend == "embedded" else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    """How messages become tokens."""

    chat_template: str = option("", "file with a Jinja chat template; empty: the model's own template")
    chat_template_kwargs: str = option("{}", "variables for the template, a JSON object; a request's own override them")
    control_tokens: str = option(
        "reject",
        "whether control tokens spelled out in a message stay text (reject) or become real ones (allow)",
        choices=("reject", "allow"),
    )
    max_text_mb: int = option(4, "largest text that one request may have tokenized, in MB", least=1)
    matcher: str = option(
        "normal",
        "how resent messages are compared: normal, strict, loose_tool_call, role_content_only or a dotted path",
    )
    history: str = option(
        "strict",
        "what a new session is, unless its client says: strict, one conversation, in which a request that does not "
        "continue it is refused; or forest, many conversations that begin, branch and run side by side",
        choices=("strict", "forest"),
    )
    max_conversations: int = option(
        8,
        "conversations of one forest session that keep a cache on the embedded engine; others are computed again",
        least=1,
    )
    max_rollback: int = option(1, "sampled turns that a retry may leave behind; -1: any number", least=-1)
    edited_reply: str = option(
        "reject", "what happens if a sampled reply is resent with changes", choices=("reject", "branch")
    )
    recall_tokens: int = option(
        0,
        "tokens of earlier passages, out of the model's view by now, that a turn may quote before the new message, "
        "unless its client says; 0: none",
    )

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
class EngineConfig:
    """The embedded engine."""

    device: str = option("auto", "device to compute on", choices=("auto", "cpu", "cuda", "mlx"))
    dtype: str = option(
        "auto",
        "data type of the weights; auto: int8 on the native CPU engine, otherwise bfloat16; int4 (native CPU engine): "
        "four-bit weights of a GGUF file as they are, weights that are not quantised rounded to four bits, others int8"
        "; fp8: CUDA, Ada and newer",
        choices=("auto", "float32", "bfloat16", "int8", "int4", "fp8"),
    )
    kv_dtype: str = option(
        "auto",
        "data type of cached keys and values; auto: float32 with float32 weights, otherwise bfloat16; fp8 (CUDA, Ada "
        "and newer): half the memory for each session",
        choices=("auto", "fp8"),
    )
    deterministic: bool = option(False, "bit-identical results for a session, whatever else is in the batch")
    threads: int = option(0, "compute threads on the CPU; 0: one per core")
    sessions: int = option(16, "slabs, that is, sessions that can be live at once", aliases=("--capacity",), least=1)
    sink: int = option(4, "first tokens that stay in every session's window")
    recent: int = option(2048, "most recent tokens that stay in a session's window", aliases=("--window",))
    max_pin: int = option(512, "largest number of first tokens that a session may pin")
    prefill_chunk: int = option(256, "prompt tokens computed between two tokens of running streams", least=1)
    rewind_tokens: int = option(1024, "how far a session can rewind without recomputing, in tokens")
    max_recompute_tokens: int = option(65536, "longest history that a rewind may recompute, in tokens")
    max_batch: int = option(64, "sequences in one decoding step", least=1)
    proposer: str = option(
        "auto",
        "source of draft tokens that the model verifies; auto: ngram on the native CPU engine, otherwise none",
        choices=("auto", "none", "ngram", "draft_model"),
    )
    draft_length: int = option(7, "longest draft, in tokens; shorter ones are used where they are faster")
    draft_model: str = option("", "model for --proposer draft_model, named as MODEL is; it needs the same vocabulary")
    lora: str = option("", "directory of a LoRA adapter (PEFT) that is merged into the model", metavar="DIR")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamConfig:
    """The SGLang or vLLM server that generates in place of the embedded engine."""

    upstream: str = option(
        "",
        "base URL of the SGLang or vLLM server, or of a router in front of several; "
        "may be given several times, for servers of the same model",
        is_list=True,
    )
    upstream_key: str = option("", "API key for the upstream; clients' own keys are never forwarded")
    upstream_extra: str = option("", "JSON object merged into every chat request to the upstream, e.g. a LoRA path")
    upstream_timeout_s: float = option(600.0, "longest time for one upstream request, in seconds", least=1)
    upstream_connections: int = option(256, "largest number of connections to one upstream", least=1)
    max_upstream_mb: int = option(256, "largest upstream response, in MB", least=1)
    routing_replay: str = option(
        "off",
        "request routed experts, for all tokens or only for those not yet recorded",
        choices=("off", "full", "additional"),
    )
    keep_training_payloads: bool = option(False, "leave routed experts in the client's copy of a response")
    logprob_kind: str = option(
        "auto",
        "whether the upstream reports logprobs before temperature (raw) or after it (sampling)",
        choices=("auto", "raw", "sampling", "unknown"),
    )
    passthrough: str = option("", "further upstream routes that sessions may call, METHOD:PATH, comma-separated")
    forward_fields: str = option(
        "",
        "further request fields that sessions may send to the upstream, comma-separated; "
        "others are left out, or refused if they change what is sampled",
    )
    routed_experts_shape: str = option(
        "",
        "layers and experts per token of routed experts that come as flat rows; empty: as in the model's config.json",
        metavar="LAYERS,TOPK",
    )
    upstream_wait_s: float = option(
        60.0, "longest wait of a request while no upstream is ready, in seconds; then it is 503"
    )
    retry_aborted: int = option(
        0, "times that a request is sent again if the upstream aborted its reply or the connection broke"
    )

    upstream_api: str = option(
        "chat",
        "how chat turns are generated: by the upstream's chat API with our token ids (chat), or from token ids alone, "
        "with replies parsed here (generate), as SGLang's router needs it",
        choices=("chat", "generate"),
    )

    context_budget: int = option(
        0,
        "most tokens of a prompt that a chat session sends to the upstream: system prompt and tools, the last turns, "
        "the new messages; earlier turns are dropped in steps; 0: the whole history is sent",
        metavar="TOKENS",
    )

    def __post_init__(self) -> None:
        if self.upstream_api == "generate" and self.routing_replay != "off":
            raise ConfigError("--routing-replay needs --upstream-api chat: token streams have no routed experts")

    @property
    def upstreams(self) -> tuple[str, ...]:
        """The URLs of all servers, each once."""
        return tuple(dict.fromkeys(filter(None, (url.strip() for url in self.upstream.split(",")))))


GROUPS: tuple[type[Any], ...] = (ServeConfig, ChatConfig, EngineConfig, UpstreamConfig)
_KEYS = {field.name for cls in GROUPS for field in dataclasses.fields(cls)}
VARIABLES = {  # every environment variable of ours: one for each setting, and those that are no settings
    *(ENVIRONMENT_PREFIX + key.upper() for key in _KEYS),
    *("HOLDFAST_API_KEY", "HOLDFAST_SERVER"),
    *("HOLDFAST_NATIVE", "HOLDFAST_CUDA"),
    *("HOLDFAST_CONFORMANCE_SERVER", "HOLDFAST_REQUIRE_CONFORMANCE", "HOLDFAST_TEST_VLLM"),
    *("HOLDFAST_TEST_SGLANG", "HOLDFAST_TEST_POSTGRES"),
}
_SECTIONS = {  # of the help, by the field that begins one
    "grpc": "addresses and security",
    "idle_ttl_s": "storage",
    "drain_s": "limits",
    "deprecation_headers": "HTTP responses and logs",
    "backend": "backend",
    "member": "cluster",
    "chat_template": "chat",
    "device": "engine",
    "upstream": "upstream",
}
_METAVARS = {  # by the name of a field, or by its last word
    **dict.fromkeys(("grpc", "http"), "HOST:PORT"),
    **dict.fromkeys(("chat_template", "file", "cert", "tls_key", "ca"), "FILE"),
    **dict.fromkeys(("blobs", "snapshots"), "DIR|URL"),
    **dict.fromkeys(("sink", "recent", "pin", "chunk", "tokens", "length"), "TOKENS"),
    **dict.fromkeys(("kwargs", "extra"), "JSON"),
    **{"dir": "DIR", "s": "SECONDS", "mb": "MB", "days": "DAYS", "sunset": "DATE", "version": "VERSION"},
    **{
        "name": "NAME",
        "matcher": "NAME",
        "model": "MODEL",
        "upstream": "URL",
        "journal": "URL",
        "member": "NAME",
        "key": "KEY",
    },
    **{"passthrough": "ROUTES", "fields": "FIELDS", "origin": "ORIGIN", "hosts": "HOSTS"},
}


def check_upstream(server: ServeConfig, upstream: UpstreamConfig) -> None:
    """ConfigError unless an upstream is given for exactly the backends that need one."""
    if (server.backend == "embedded") == bool(upstream.upstream):
        raise ConfigError("--upstream and --backend sglang or vllm must be given together")
    if upstream.context_budget and not upstream.upstream:
        raise ConfigError("--context-budget needs an --upstream; the embedded engine's window is --recent")


def add_flags(
    parser: argparse.ArgumentParser,
    cls: type[Any],
    *,
    only: Container[str] | None = None,
    without: Container[str] = (),
    shown: Container[str] | None = None,
) -> None:
    """Add a flag for each field of `cls`, or for those in `only`, by section; and `--config`, once per parser.

    The help leaves out those that are not in `shown`.
    """
    if not any(action.dest == "config" for action in parser._actions):
        about = "settings as TOML; flags and environment variables take precedence"
        parser.add_argument("--config", type=Path, metavar="FILE", help=about)
    group: argparse._ArgumentGroup | None = None
    section = ""
    for field in dataclasses.fields(cls):
        if field.name in _SECTIONS:
            group, section = None, _SECTIONS[field.name]
        if field.name in without or (only is not None and field.name not in only):
            continue
        group = group or parser.add_argument_group(section)
        _add_flag(group, field, is_shown=shown is None or field.name in shown)


def _add_flag(group: "argparse._ArgumentGroup", field: "dataclasses.Field[Any]", *, is_shown: bool) -> None:
    names = (flag_of(field.name), *field.metadata["aliases"])
    default = {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else field.default
    default = f"{default:g}" if isinstance(default, float) else default
    about = field.metadata["help"].replace("%", "%%") + ("" if default == "" else f" (default: {default})")
    shown = about if is_shown else argparse.SUPPRESS
    if isinstance(field.default, bool):
        group.add_argument(*names, action=argparse.BooleanOptionalAction, default=None, help=shown)
        return
    group.add_argument(
        *names,
        dest=field.name,
        action=_Joined if field.metadata["is_list"] else "store",
        type=type(field.default),
        choices=field.metadata["choices"],
        metavar=None if field.metadata["choices"] else metavar_of(field),
        help=shown,
    )


class _Joined(argparse.Action):
    """A flag that may be given several times: its values, separated by commas."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def metavar_of(field: "dataclasses.Field[Any]") -> str:
    """What the help shows in place of a value."""
    found = field.metadata["metavar"] or _METAVARS.get(field.name) or _METAVARS.get(field.name.rpartition("_")[2])
    return found or ("TEXT" if isinstance(field.default, str) else "N")


def from_arguments(cls: type[C], arguments: argparse.Namespace) -> C:
    """An instance of `cls` for a parsed command line; reads the environment and the file given with `--config`."""
    return load(cls, flags=vars(arguments), environment=os.environ, file=arguments.config)


def given_flags(arguments: argparse.Namespace, *, without: Container[str] = ()) -> list[str]:
    """The settings of a parsed command line, and its `--config`, as words of another command line."""
    flags = [f"--config={arguments.config}"] if arguments.config else []
    for name in (field.name for cls in GROUPS for field in dataclasses.fields(cls) if field.name not in without):
        if (value := getattr(arguments, name)) is not None:
            no = "--no-" if value is False else "--"
            flags.append(flag_of(name).replace("--", no, 1) if isinstance(value, bool) else f"{flag_of(name)}={value}")
    return flags


def load(cls: type[C], *, flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None) -> C:
    """An instance of `cls` from its defaults, then `file`, then `environment`, then `flags` (None: not given).

    Names in `flags` and keys in `file` that belong to another settings class are skipped.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    values = _from_file(fields, file) if file else {}
    for field in fields:
        if (text := environment.get(_variable(field))) is not None:
            values[field.name] = _converted(field, text, f"the environment variable {_variable(field)}")
        if (given := flags.get(field.name)) is not None:
            values[field.name] = given
    loaded = cls(**values)
    for field in fields:
        value, least = getattr(loaded, field.name), field.metadata["least"]
        if isinstance(value, int | float) and not least <= value < math.inf:
            raise ConfigError(f"{field.name} must be {least} or more, got {value}")
    return loaded


def _variable(field: "dataclasses.Field[Any]") -> str:
    return ENVIRONMENT_PREFIX + field.name.upper()


def _from_file(fields: "tuple[dataclasses.Field[Any], ...]", path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"cannot read the config file {path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise ConfigError(f"the config file {path} is not TOML: {exc}") from exc
    for key in content:
        if (name := key.replace("-", "_")) not in _KEYS:
            near = difflib.get_close_matches(name, _KEYS, n=1)
            raise ConfigError(f"unknown key {key!r} in {path}" + (f"; did you mean {near[0]}?" if near else ""))
    given = {key.replace("-", "_"): (key, value) for key, value in content.items()}
    return {
        field.name: _converted(field, given[field.name][1], f"{given[field.name][0]} in {path}")
        for field in fields
        if field.name in given
    }


def _converted(field: "dataclasses.Field[Any]", value: Any, where: str) -> Any:
    """`value` as the field's type; text is parsed, anything else must already have the type."""
    kind: type[Any] = type(field.default)
    if field.metadata["is_list"] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = ",".join(value)
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
