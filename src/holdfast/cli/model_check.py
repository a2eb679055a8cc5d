"""Whether a model can be served: its files, its chat template, its window. Reads headers, never weights."""

from dataclasses import dataclass

from holdfast.chat.chat_model import load_chat
from holdfast.chat.probe import Abilities
from holdfast.cli.diagnosis import Device, Finding
from holdfast.cli.sizing import Sizes, token_bytes, weight_bytes
from holdfast.config import ChatConfig, EngineConfig
from holdfast.engine import factory
from holdfast.engine.interface import engine_info
from holdfast.engine.slab import SlabShape
from holdfast.engine.weights import open_weights
from holdfast.engine.window import Window
from holdfast.errors import ConfigError, HoldfastError, InvalidArgument, ModelError
from holdfast.models import Architecture, ModelSource, open_model, require_plain_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    name: str
    path: str
    architecture: Architecture
    num_parameters: int
    file_bytes: int
    is_quantised: bool  # in the files and, by MLX, in memory

    def sizes(self, dtype: str, device: Device, memory_bytes: int | None) -> Sizes:
        arch, is_native = self.architecture, device == "cpu" and factory.is_native(self.architecture, dtype)
        weights = self.file_bytes if self.is_quantised else weight_bytes(arch, dtype, device, is_native=is_native)
        return Sizes(weight_bytes=weights, token_bytes=token_bytes(self.architecture, dtype), memory_bytes=memory_bytes)


def check_model(name: str, chat: ChatConfig | None, device: Device) -> tuple[ModelFacts | None, list[Finding]]:
    """The facts, where the model could be opened. `chat` None: nobody will chat with it."""
    try:
        source = open_model(name)
        facts = _facts(source, has_weights=bool(device))
        if device in ("cpu", "cuda"):
            require_plain_weights(source)
    except ModelError as exc:
        return None, [Finding("model", "problem", str(exc))]
    arch = facts.architecture
    says = f"{facts.name}: {arch.family}, {facts.num_parameters / 1e6:,.0f} M parameters, context of {arch.context:,}"
    findings = [Finding("model", "ok", says)]
    if chat:
        findings.append(_check_chat(source, chat))
    return facts, findings


def check_engine(model: ModelFacts, config: EngineConfig, dtype: str) -> tuple[SlabShape | None, list[Finding]]:
    """The shape of a slab, or why there cannot be one."""
    try:
        if config.sink > config.max_pin:
            raise ConfigError(f"sink {config.sink} is more than max_pin {config.max_pin}; raise --max-pin")
        window = Window(sink=config.sink, recent=config.recent)
        shape = factory.slab_shape(config)
        engine_info(model.name, model.architecture, digest="", dtype=dtype, shape=shape)
    except InvalidArgument as exc:
        return None, [Finding("window", "problem", str(exc))]
    return shape, [Finding("window", "ok", f"{window.sink} + {window.recent} tokens, weights in {dtype}")]


def judge_abilities(abilities: Abilities) -> Finding:
    """What a template shows by itself."""
    roles = [role for role in ("system", "developer") if role in abilities.first_roles]
    shown = [*(["tools"] if abilities.has_tools else []), *(f"{role} messages" for role in roles)]
    says = f"shows {', '.join(shown) or 'user messages only'}"
    if "developer" not in roles and "system" in roles:
        says += "; developer messages go in as system ones"
    if not abilities.has_tools:
        says += "; tools go into the system prompt"
    if "system" not in roles:
        return Finding("chat", "warning", f"{says}; system messages are refused: put them into user messages")
    return Finding("chat", "ok", says)


def _facts(source: ModelSource, *, has_weights: bool) -> ModelFacts:
    architecture, is_quantised, file_bytes = source.architecture, False, 0
    if has_weights:
        file_bytes = sum(file.stat().st_size for file in source.weight_files)
        is_quantised = source.is_mlx_quantised
        open_weights(source, for_mlx=True)  # checks that every file is complete
    return ModelFacts(
        name=source.name,
        path=str(source.path),
        architecture=architecture,
        num_parameters=architecture.num_parameters,
        file_bytes=file_bytes,
        is_quantised=is_quantised,
    )


def _check_chat(source: ModelSource, config: ChatConfig) -> Finding:
    try:
        return judge_abilities(load_chat(source, config, source.architecture.vocab_size).continuation.abilities)
    except ConfigError as exc:
        return Finding("chat", "problem", str(exc))
    except ModelError as exc:
        return Finding("chat", "warning", f"no OpenAI door: {exc}; give --chat-template FILE")
    except HoldfastError as exc:
        return Finding("chat", "problem", str(exc))
