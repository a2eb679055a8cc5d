"""The checks of `holdfast doctor`: each finds ok, a warning, or a problem that would stop `holdfast serve`.

Binds addresses for a moment and reads headers of model files; sends nothing, reads no weights.
"""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from holdfast.chat.abilities import Abilities
from holdfast.chat.chat_model import load_chat
from holdfast.cli import machine
from holdfast.cli.machine import DataDirectory, Library, Memory
from holdfast.cli.models import RUNTIME_BYTES, Sizes, weight_bytes
from holdfast.config import ChatConfig, EngineConfig, ServeConfig, UpstreamConfig, check_upstream, flag_of
from holdfast.engine import factory
from holdfast.engine.interface import cache_dtype, engine_info, kv_bytes_per_position
from holdfast.engine.slab import SlabShape
from holdfast.engine.weights import open_weights
from holdfast.engine.window import Window
from holdfast.errors import ConfigError, HoldfastError, InvalidArgument, ModelError
from holdfast.extras import HOW_TO_BUILD, how_to_install
from holdfast.models import Architecture, ModelSource, open_model, require_plain_weights
from holdfast.serving.keys import Keys, check_bind, check_free, read_keys, split_address

Level = Literal["ok", "warning", "problem"]
Device = Literal["cpu", "cuda", "mlx", ""]  # empty: an upstream computes

_GB = 1_000_000_000
_MB = 1_000_000
_LITTLE_DISK_BYTES = _GB


@dataclass(frozen=True, slots=True)
class Finding:
    """`says` is one sentence; unless the level is ok, it includes what to do."""

    what: str
    level: Level
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    path: str
    architecture: Architecture
    num_parameters: int
    file_bytes: int
    is_quantised: bool  # in the files and, on MLX, in memory

    def sizes(self, config: EngineConfig, device: Device, memory_bytes: int | None) -> Sizes:
        dtype = factory.resolved_dtype(config.dtype, self.architecture, device)
        arch, is_native = self.architecture, device == "cpu" and factory.is_native(self.architecture, dtype)
        weights = self.file_bytes if self.is_quantised else weight_bytes(arch, dtype, device, is_native=is_native)
        token_bytes = kv_bytes_per_position(arch, cache_dtype(dtype, config.kv_dtype))
        sizes = Sizes(weight_bytes=weights, token_bytes=token_bytes, memory_bytes=memory_bytes)
        if config.proposer != "draft_model" or not config.draft_model:
            return sizes
        small = replace(factory.draft_config(config), proposer="none")
        draft = facts_of(open_model(config.draft_model)).sizes(small, device, memory_bytes)
        return replace(sizes, weight_bytes=weights + draft.weight_bytes, draft_token_bytes=draft.token_bytes)


def chosen_device(asked: str, torch: Library, mlx: Library, *, is_apple_silicon: bool) -> Device:
    """The device that `--device` selects on this machine."""
    if asked == "mlx" or (asked == "auto" and is_apple_silicon and mlx.version):
        return "mlx"
    return "cuda" if asked == "cuda" or (asked == "auto" and torch.cuda) else "cpu"


def check_native(variants: Sequence[str], device: Device) -> Finding:
    """`variants`: the builds that this machine can run, best first."""
    if variants:
        return Finding("native engine", "ok", f"built for {variants[0]}")
    level: Level = "warning" if device == "cpu" else "ok"
    says = f"not built, so the CPU uses torch, several times slower: {HOW_TO_BUILD}"
    return Finding("native engine", level, says)


def check_torch(torch: Library, device: Device, *, is_needed: bool) -> Finding:
    level: Level = "problem" if is_needed and device in ("cpu", "cuda") else "ok"
    if torch.failure:
        return Finding("torch", level, f"{torch.version} cannot be imported ({torch.failure}); reinstall it")
    if not torch.version:
        needed = "" if level == "problem" else ", and not needed for these settings"
        return Finding("torch", level, f"not installed{needed}; {how_to_install('torch')}")
    found = [f"{one.name} with {one.free_bytes / _GB:.1f} of {one.total_bytes / _GB:.1f} GB free" for one in torch.cuda]
    about = f"{torch.version}, {torch.num_threads} threads, {'; '.join(found) or 'no CUDA device'}"
    if device == "cuda" and not torch.cuda:
        return Finding("torch", "problem", f"{about}: use --device cpu, or install a driver and a torch with CUDA")
    return Finding("torch", "ok", about)


def check_mlx(mlx: Library, device: Device, *, is_apple_silicon: bool) -> Finding:
    if mlx.failure:
        level: Level = "problem" if device == "mlx" else "warning"
        return Finding("MLX", level, f"{mlx.version} cannot be imported ({mlx.failure}); reinstall it")
    install = how_to_install("mlx")
    if not mlx.version:
        if device == "mlx":
            return Finding("MLX", "problem", f"not installed, but --device mlx needs it; {install}")
        if is_apple_silicon:
            return Finding("MLX", "warning", f"not installed, so this Mac's GPU is not used; {install}")
        return Finding("MLX", "ok", "not installed; it is only useful on a Mac")
    about = f"{mlx.version} on the {mlx.default_device}"
    if not is_apple_silicon:
        level = "warning" if device == "mlx" else "ok"
        return Finding("MLX", level, f"{about}, exact but slow on this machine; --device cpu or cuda is faster")
    return Finding("MLX", "ok", f"{about}, {'selected' if device == 'mlx' else 'not selected'}")


def check_extra(extra: str, adds: str, *, is_installed: bool) -> Finding:
    if is_installed:
        return Finding(extra, "ok", f"{adds}: installed")
    return Finding(extra, "warning", f"{adds}: not installed; {how_to_install(extra)}")


def check_memory(memory: Memory) -> Finding:
    total = f"{memory.total_bytes / _GB:.1f} GB"
    if memory.available_bytes is None:
        return Finding("memory", "warning", f"{total}; the system does not report how much is free, so leave some")
    return Finding("memory", "ok", f"{memory.available_bytes / _GB:.1f} GB available of {total}")


def check_data(data: DataDirectory | None) -> Finding:
    what = "data directory"
    if data is None:
        return Finding(what, "ok", "none: sessions end with the server; pass --data-dir DIR to keep them")
    other = "or pass another --data-dir"
    if not data.is_writable:
        return Finding(what, "problem", f"{data.path} cannot be written: make it a writable directory, {other}")
    if data.is_in_use:
        return Finding(what, "problem", f"{data.path} is in use by another server: stop that server, {other}")
    if data.damage:
        advice = f"restore a backup, or run: holdfast sessions salvage {data.path} --out NEW_DIRECTORY"
        return Finding(what, "problem", f"the journal in {data.path} cannot be used ({data.damage}): {advice}")
    record = f"{data.num_open} open sessions and {data.num_closed} closed" if data.exists else "will be created"
    about = f"{data.path}: {record}, {data.free_bytes / _GB:.1f} GB free"
    if data.free_bytes < _LITTLE_DISK_BYTES:
        return Finding(what, "warning", f"{about}, which is little: free some space, {other}")
    return Finding(what, "ok", about)


def require_fit(source: ModelSource, config: EngineConfig, snapshot_bytes: int = 0) -> str:
    """What must be said before a model and its slabs are allocated. ConfigError with what fits if they do not.

    Memory that is not touched is not taken, so an allocation that is too large may succeed, and the process dies later.
    """
    device, model = factory.device_of(config), facts_of(source)
    shape, finding = check_engine(model, config, factory.resolved_dtype(config.dtype, model.architecture, device))
    if shape:
        sizes, total_bytes = model.sizes(config, device, machine.free_bytes(device)), machine.find_memory().total_bytes
        if sizes.memory_bytes is None:  # nothing to compare with, perhaps because the engine's packages are missing
            return ""
        finding = check_fit(sizes, shape, config.sessions, snapshot_bytes, device, total_bytes=total_bytes)
    if finding.level == "problem":
        raise ConfigError(finding.says)
    return finding.says if finding.level == "warning" else ""


def check_fit(
    sizes: Sizes, shape: SlabShape, num_sessions: int, snapshot_bytes: int, device: Device, *, total_bytes: int
) -> Finding:
    """`snapshot_bytes`: the host memory that snapshots of parked sessions may take later, of `total_bytes`."""
    what, slab = "sessions", sizes.slab_bytes(shape)
    need = sizes.weight_bytes + num_sessions * slab
    slabs = f"{num_sessions} {'slab' if num_sessions == 1 else 'slabs'} of {slab / _MB:,.0f} MB"
    about = f"{slabs} and {sizes.weight_bytes / _MB:,.0f} MB of weights take {need / _GB:.1f} GB"
    fitting = sizes.num_fitting(shape)
    if fitting is None or sizes.memory_bytes is None:
        return Finding(what, "warning", f"{about}: make sure that this much is free")
    free, lower = f"{sizes.memory_bytes / _GB:.1f} GB", _larger_than_usual(shape)
    if not fitting:
        says = f"{about}, and not even one slab fits into {free}: use a smaller model or lower {lower}"
        return Finding(what, "problem", says)
    if fitting < num_sessions:
        says = f"{about}, but only {fitting} fit into {free}: lower --sessions to {fitting}, or lower {lower}"
        return Finding(what, "problem", says)
    room = max(0, total_bytes - RUNTIME_BYTES - (0 if device == "cuda" else need)) // 2**20
    if snapshot_bytes > max(room, ServeConfig().snapshot_memory_mb) * 2**20:  # a small machine may keep the default
        says = f"snapshots of {snapshot_bytes / _GB:,.1f} GB do not fit into {total_bytes / _GB:.1f} GB of memory"
        return Finding(what, "problem", f"{about}, but {says}: lower --snapshot-memory-mb to {room} or less")
    if device != "cuda" and need + RUNTIME_BYTES + snapshot_bytes > sizes.memory_bytes:
        room = max(0, sizes.memory_bytes - need - RUNTIME_BYTES) // 2**20
        more = "and snapshots of parked sessions may need more than is left"
        return Finding(what, "warning", f"{about}, {more}: use --snapshot-memory-mb {room}")
    return Finding(what, "ok", f"{about}; {fitting} would fit")


def _larger_than_usual(shape: SlabShape) -> str:
    """The flags that make a slab large."""
    usual, names = factory.slab_shape(EngineConfig()), ("max_pin", "rewind_tokens", "prefill_chunk", "draft_length")
    return " or ".join(["--recent", *(flag_of(name) for name in names if getattr(shape, name) > getattr(usual, name))])


def check_server(server: ServeConfig, upstream: UpstreamConfig) -> list[Finding]:
    """Keys, TLS, addresses and the upstream; the upstream is not contacted."""
    findings = []
    keys = Keys()
    try:
        keys = read_keys(server.keys_file)
    except ConfigError as exc:
        findings.append(Finding("keys", "problem", str(exc)))
    if server.tls_cert or server.tls_key:
        findings.append(_check_certificate(server.tls_cert, server.tls_key))
    findings.append(_check_address("gRPC address", server.grpc, keys, insecure=server.insecure))
    if not server.http:
        findings.append(Finding("HTTP address", "ok", "none; pass --http HOST:PORT to serve HTTP"))
    elif server.http == server.grpc and not server.grpc.endswith(":0"):
        says = f"{server.http} is also the gRPC address: choose another address"
        findings.append(Finding("HTTP address", "problem", says))
    else:
        findings.append(_check_address("HTTP address", server.http, keys, insecure=server.insecure))
    try:
        check_upstream(server, upstream)
        if upstream.upstream:
            findings.append(
                Finding("upstream", "ok", f"{server.backend} at {', '.join(upstream.upstreams)}, not contacted")
            )
    except ConfigError as exc:
        findings.append(Finding("upstream", "problem", str(exc)))
    return findings


def _check_address(what: str, address: str, keys: Keys, *, insecure: bool) -> Finding:
    try:
        check_bind(address, keys, insecure=insecure)
        check_free(address)
    except ConfigError as exc:
        return Finding(what, "problem", str(exc))
    is_any = split_address(address)[1] == 0
    return Finding(what, "ok", f"{address} is {'any free port' if is_any else 'free'}")


def _check_certificate(chain: str, key: str) -> Finding:
    if not (chain and key):
        return Finding("TLS", "problem", "--tls-cert and --tls-key must be given together")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(chain, key)
    except ssl.SSLError:
        return Finding("TLS", "problem", f"{chain} and {key} are not a certificate and its key: pass a pair in PEM")
    except OSError as exc:
        return Finding("TLS", "problem", f"cannot read {chain} or {key}: {exc.strerror}; pass files that can be read")
    return Finding("TLS", "ok", f"{chain} and its key")


def check_model(name: str, chat: ChatConfig | None, device: Device) -> tuple[ModelFacts | None, list[Finding]]:
    """The facts, if the model can be opened and computed with here. `chat` is None without an HTTP endpoint."""
    facts = None
    try:
        source = open_model(name, tokenizer_only=not device, may_fetch=False)
        if device:
            facts = facts_of(source)
            open_weights(source, for_mlx=True)  # checks that every file is complete
        if device in ("cpu", "cuda"):
            require_plain_weights(source)
    except ModelError as exc:
        return None, [Finding("model", "problem", str(exc))]
    if facts:
        arch, size = facts.architecture, f"{facts.num_parameters / 1e6:,.0f} M parameters"
        says = f"{facts.name}: {arch.family}, {size}, context of {arch.context:,}"
    else:
        says = f"{source.name}: a vocabulary of {source.vocab_size:,}; the upstream has the weights"
    findings = [Finding("model", "ok", says)]
    if chat:
        findings.append(_check_chat(source, chat))
    return facts, findings


def check_engine(model: ModelFacts, config: EngineConfig, dtype: str) -> tuple[SlabShape | None, Finding]:
    """The shape of a slab, or None if there can be none."""
    try:
        if config.sink > config.max_pin:
            raise ConfigError(f"sink {config.sink} is more than max_pin {config.max_pin}; raise --max-pin")
        window = Window(sink=config.sink, recent=config.recent)
        shape = factory.slab_shape(config)
        engine_info(model.name, model.architecture, digest="", dtype=dtype, shape=shape)
    except InvalidArgument as exc:
        return None, Finding("window", "problem", str(exc))
    return shape, Finding("window", "ok", f"{window.sink} + {window.recent} tokens, weights in {dtype}")


def check_abilities(abilities: Abilities) -> Finding:
    """What a chat template renders by itself."""
    roles = [role for role in ("system", "developer") if role in abilities.first_roles]
    rendered = [*(["tools"] if abilities.has_tools else []), *(f"{role} messages" for role in roles)]
    says = f"the template renders {', '.join(rendered) or 'user messages only'}"
    if "developer" not in roles and "system" in roles:
        says += "; developer messages become system messages"
    if not abilities.has_tools:
        says += "; tools are written into the system prompt"
    if "system" not in roles:
        return Finding("chat", "warning", f"{says}; system messages are refused: put them into user messages")
    return Finding("chat", "ok", says)


def facts_of(source: ModelSource) -> ModelFacts:
    return ModelFacts(
        name=source.name,
        path=str(source.path),
        architecture=source.architecture,
        num_parameters=source.architecture.num_parameters,
        file_bytes=sum(file.stat().st_size for file in source.weight_files),
        is_quantised=source.is_mlx_quantised,
    )


def _check_chat(source: ModelSource, config: ChatConfig) -> Finding:
    try:
        return check_abilities(load_chat(source, config, source.vocab_size).continuation.abilities)
    except ConfigError as exc:
        return Finding("chat", "problem", str(exc))
    except ModelError as exc:
        return Finding("chat", "warning", f"no OpenAI API: {exc}; pass --chat-template FILE")
    except HoldfastError as exc:
        return Finding("chat", "problem", str(exc))
