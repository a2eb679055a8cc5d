"""Constrained generation, from the schema to the token: what may be said, what is drawn, who fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from holdfast.backends.embedded import EmbeddedBackend
from holdfast.chat import grammar
from holdfast.chat.chat_model import ChatModel
from holdfast.chat.continuation import Continuation
from holdfast.chat.grammar import Grammars, Trial
from holdfast.chat.template import ChatTemplate, Renderer
from holdfast.chat.tokenizer import Tokenizer, load_tokenizer
from holdfast.engine.interface import Logits
from holdfast.engine.sampling import Pick, sample_rows
from holdfast.engine.slab import SlabShape
from holdfast.engine.torch import TorchEngine
from holdfast.engine.window import Window
from holdfast.engine.worker import Worker
from holdfast.errors import CapacityExhausted, ConstraintFailed, HoldfastError, InvalidArgument, NonFiniteLogits
from holdfast.generation import Constraint, Done, Event, Mask, Sampled, SamplingParams, StopReason
from holdfast.models import GGUFSource
from holdfast.sessions.runtime import Runtime
from holdfast.testing.fake_engine import FakeEngine
from tests.effort import examples
from tests.serving import model_of

Schema = dict[str, Any]
Small = tuple[Tokenizer, Grammars]

SHAPE = SlabShape(recent=64, max_pin=4, prefill_chunk=8, rewind_tokens=8)
SURPLUS = 40  # logits beyond what the tokenizer knows


def record(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Schema] = {
    "flat": record(ok={"type": "boolean"}, count={"type": "integer", "minimum": 0, "maximum": 99}),
    "names": record(name={"type": "string", "maxLength": 12}, kind={"enum": ["cat", "dog", None, 7]}),
    "list": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 1, "maxItems": 4},
    "nested": record(at={"$ref": "#/$defs/point"}, tags={"type": "array", "items": {"const": "a"}, "maxItems": 2})
    | {"$defs": {"point": record(x={"enum": [0, 1]}, y={"type": "null"})}},
    "union": {"anyOf": [record(day={"type": "string", "format": "date"}), {"type": "boolean"}]},
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": record(at={"enum": ["left", "right"]})}},
    {"type": "function", "function": {"name": "look_up", "parameters": record(n={"type": "integer", "maximum": 9})}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.fixture(scope="session")
def tokenizer(default_source: GGUFSource) -> Tokenizer:
    return load_tokenizer(default_source)


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.inner.get_vocab_size() + SURPLUS)


@pytest.fixture(scope="session")
def exact(tokenizer: Tokenizer, default_engine: TorchEngine) -> Grammars:
    return Grammars(tokenizer, default_engine.info.vocab_size)


async def run(worker: Worker, params: SamplingParams, prompt: Sequence[int]) -> list[Event]:
    sequence = await worker.open()
    try:
        async with worker.generate(sequence, params, prompt) as stream:
            return [event async for batch in stream for event in batch]
    finally:
        await worker.close(sequence)


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, Sampled)]


def reason_of(events: Sequence[Event]) -> StopReason | None:
    assert isinstance(events[-1], Done)
    return events[-1].stop_reason


def check_allowed(constraint: Constraint, tokens: Sequence[int], eos: frozenset[int]) -> None:
    """Every token was allowed where it stands."""
    state = constraint.start()
    for token in tokens:
        if token in eos:
            assert state.may_end
            return
        assert state.allowed()[token]
        state.accept(token)


@pytest.mark.parametrize("name", SCHEMAS)
async def test_the_default_model_writes_what_the_schema_asks(
    name: str, exact: Grammars, tokenizer: Tokenizer, default_engine: TorchEngine
) -> None:
    constraint = exact.compiled(exact.json_schema(SCHEMAS[name]))
    prompt = tokenizer.encode("<|im_start|>user\nAnswer in JSON.<|im_end|>\n<|im_start|>assistant\n")
    base = SamplingParams(seed=0, max_tokens=80, eos_token_ids=tokenizer.eos_token_ids, constraint=constraint)
    worker = Worker(default_engine)
    worker.start()
    try:
        choices = [replace(base, temperature=0.0), replace(base, seed=1), replace(base, seed=2), replace(base, seed=3)]
        answers = await asyncio.gather(*(run(worker, params, prompt) for params in choices))
    finally:
        worker.stop()
    for events in answers:
        tokens = tokens_of(events)
        assert reason_of(events) == StopReason.EOS
        check_allowed(constraint, tokens, tokenizer.eos_token_ids)
        value = json.loads(tokenizer.decode(tokens, skip_special=True))
        assert jsonschema_rs.is_valid(SCHEMAS[name], value), value


async def test_the_default_model_calls_a_tool_when_it_must(
    exact: Grammars, tokenizer: Tokenizer, default_engine: TorchEngine
) -> None:
    constraint = exact.compiled(exact.tool_call(TOOLS, is_parallel=False))
    prompt = tokenizer.encode("<|im_start|>user\nLook to the left!<|im_end|>\n<|im_start|>assistant\n")
    worker = Worker(default_engine)
    worker.start()
    try:
        params = SamplingParams(
            seed=0, temperature=0, max_tokens=80, eos_token_ids=tokenizer.eos_token_ids, constraint=constraint
        )
        events = await run(worker, params, prompt)
    finally:
        worker.stop()
    text = tokenizer.decode(tokens_of(events), skip_special=True)
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(body)["name"] in ("look", "look_up", "wait")


# What a grammar allows


def spell(constraint: Constraint, tokenizer: Tokenizer, text: str) -> tuple[Mask, bool]:
    """What may follow `text`, and whether it may be over there."""
    state = constraint.start()
    for token in tokenizer.encode(text):
        assert state.allowed()[token], tokenizer.decode([token])
        state.accept(token)
    return state.allowed(), state.may_end


def test_the_surplus_of_the_vocabulary_and_control_tokens_are_never_allowed(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    constraint = grammars.compiled(grammars.json_object())
    assert constraint.vocab_size == tokenizer.inner.get_vocab_size() + SURPLUS
    for text, may_end in (("", False), ('{"a', False), ('{"a": [1, ', False), ("{}", True)):
        allowed, ends = spell(constraint, tokenizer, text)
        assert allowed.shape == (constraint.vocab_size,)
        assert not allowed[-SURPLUS:].any()
        assert not any(allowed[token] for token in tokenizer.inner.get_added_tokens_decoder())
        assert ends is may_end


def test_after_the_last_brace_there_is_only_the_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    allowed, may_end = spell(grammars.compiled(grammars.json_object()), tokenizer, '{"a": {}}')
    assert may_end
    assert not allowed.any()


def test_white_space_is_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    allowed, _ = spell(grammars.compiled(grammars.json_object()), tokenizer, "{\n" + 32 * " ")
    spaces = [token for token in np.flatnonzero(allowed) if not tokenizer.decode([int(token)]).strip()]
    assert spaces == []


def test_a_model_with_fewer_logits_than_tokens_gets_a_mask_that_fits(tokenizer: Tokenizer) -> None:
    small = Grammars(tokenizer, 1000)
    assert small.compiled(small.json_object()).start().allowed().shape == (1000,)


TAGS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize("special", [True, False, None])
def test_tags_of_tool_calls_are_added_tokens_where_there_are_such(tokenizer: Tokenizer, special: bool | None) -> None:
    inner = RustTokenizer.from_str(tokenizer.inner.to_str())
    if special is not None:
        inner.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in TAGS])
    ours = replace(tokenizer, inner=inner)
    grammars = Grammars(ours, inner.get_vocab_size() + SURPLUS)
    constraint = grammars.compiled(grammars.tool_call(TOOLS))
    allowed, _ = spell(constraint, ours, "")
    first = {ours.decode([int(token)]) for token in np.flatnonzero(allowed)}
    assert first == ({"<tool_call>"} if special is not None else {"<"})
    one = '<tool_call>\n{"name": "look", "arguments": {"at": "left"}}\n</tool_call>'
    none = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    allowed, may_end = spell(constraint, ours, one)
    assert may_end
    assert [ours.decode([int(token)]) for token in np.flatnonzero(allowed)] == ["\n"]
    assert spell(constraint, ours, f"{one}\n{none}\n{one}")[1]
    allowed, may_end = spell(grammars.compiled(grammars.tool_call(TOOLS, is_parallel=False)), ours, one)
    assert may_end
    assert not allowed.any()


@pytest.mark.parametrize("name", ["look_up", "wait"])
def test_a_named_tool_is_the_only_one(grammars: Grammars, tokenizer: Tokenizer, name: str) -> None:
    constraint = grammars.compiled(grammars.tool_call(TOOLS, names=[name]))
    allowed, _ = spell(constraint, tokenizer, '<tool_call>\n{"name": "')
    assert all(name.startswith(tokenizer.decode([int(token)])[:1]) for token in np.flatnonzero(allowed))


def test_a_tool_may_have_any_name(grammars: Grammars, tokenizer: Tokenizer) -> None:
    name = 'fünf "x" \\ /\n'
    constraint = grammars.compiled(grammars.tool_call([{"type": "function", "function": {"name": name}}]))
    written = json.dumps({"name": name, "arguments": {}}, ensure_ascii=False)
    assert spell(constraint, tokenizer, f"<tool_call>\n{written}\n</tool_call>")[1]


# Against a plain check: try every token of a small vocabulary by its text

PIECES = [
    '{"',
    '":',
    '": ',
    '", "',
    "true",
    "false",
    '"}',
    "\n  ",
    "  ",
    " 1",
    "10",
    "}}",
    "ok",
    '{"ok": t',
    "rue,",
    "1}",
]
PLAIN = record(ok={"type": "boolean"}, n={"enum": [1, 10, 11]}) | {"required": ["ok"]}
SPACE = r"(?:\n[ \t]{0,32}| )?"
PLAIN_REGEX = regex.compile(r'\{_"ok"_:_(?:true|false)(?:_,_"n"_:_(?:1|10|11))?_\}'.replace("_", SPACE))


def small_tokenizer() -> Tokenizer:
    """All bytes, some pieces, one end."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = [byte_level.pre_tokenize_str(piece)[0][0] for piece in PIECES]
    vocabulary = {text: index for index, text in enumerate([*alphabet, *spelled])}
    inner = RustTokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    inner.pre_tokenizer, inner.decoder = byte_level, decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return Tokenizer(inner, frozenset({inner.get_vocab()["<end>"]}))


@pytest.fixture(scope="session")
def small() -> Small:
    tokenizer = small_tokenizer()
    return tokenizer, Grammars(tokenizer, tokenizer.inner.get_vocab_size())


def test_masks_agree_with_trying_every_token_by_its_text(small: Small) -> None:
    tokenizer, grammars = small
    end = grammars.vocab_size - 1
    constraint = grammars.compiled(grammars.json_schema(PLAIN))
    source = np.random.default_rng(0)
    num_free = 0
    for _ in range(examples(12)):
        state, text = constraint.start(), ""
        while True:
            possible = {token for token in range(end) if _is_beginning(text + tokenizer.decode([token]))}
            allowed = set(np.flatnonzero(state.allowed()).tolist())
            if allowed != possible:  # text without a choice is spelled in one way, the tokenizer's own
                assert len(allowed) == 1, text
                assert allowed < possible, text
                assert len({tokenizer.decode([token])[0] for token in possible}) == 1, text
            num_free += allowed == possible
            assert state.may_end == bool(PLAIN_REGEX.fullmatch(text)), text
            if not allowed:
                break
            token = int(source.choice(sorted(allowed)))
            state.accept(token)
            text += tokenizer.decode([token])
        json.loads(text)
    assert num_free > 50


def _is_beginning(text: str) -> bool:
    return PLAIN_REGEX.fullmatch(text, partial=True) is not None


# What is refused


def chained(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"not": {"type": "string"}}, "not"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#"}, "no valid first token"),
        ({"$ref": "https://example.com/schema"}, "retriev"),
        ({"type": "string", "format": "nonsense"}, "nonsense"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"minimum": float("nan")}, "JSON"),
        ({"const": "\ud800"}, "escape"),
        ({"type": "integer", "multipleOf": 12345678}, "too much time"),
        ({"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(2, 40)]}, "too much time"),
        ({"allOf": [{"anyOf": [record(a={}), record(b={"const": i})]} for i in range(40)]}, ""),
        ({"enum": [f"value {i}" for i in range(30000)]}, "longer than"),
        (chained(400), "recursion"),
        (chained(100_000), "recursion"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schema_that_cannot_be_enforced_is_refused_in_time(grammars: Grammars, schema: Schema, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"response_format.json_schema.schema.*{reason}") as caught:
        grammars.compiled(grammars.json_schema(schema))
    assert caught.value.param == "response_format.json_schema.schema"


def test_the_tool_that_cannot_be_enforced_is_named(grammars: Grammars) -> None:
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(InvalidArgument, match=r"tools\[3\].function.parameters.*not"):
        grammars.compiled(grammars.tool_call([*TOOLS, bad]))
    with pytest.raises(InvalidArgument, match=r"tools\[0\].function.parameters.*object"):
        grammars.compiled(
            grammars.tool_call([{"type": "function", "function": {"name": "bad", "parameters": {"type": "string"}}}])
        )
    with pytest.raises(InvalidArgument, match="tool_choice"):
        grammars.compiled(grammars.tool_call(TOOLS, names=["nobody"]))


def test_a_forced_call_in_llamas_format_that_cannot_be_enforced_names_the_tools(
    tokenizer: Tokenizer, grammars: Grammars
) -> None:
    template = ChatTemplate(
        """{% if tools %}Answer with {"name": ..., "parameters": ...}: {{ tools | tojson }}{% endif %}"""
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    chat = ChatModel(tokenizer, template, Continuation(Renderer(template, tokenizer)), grammars)
    call = '{"name": "look", "parameters": {"at": "left"}}'
    assert spell(chat.grammars.compiled(chat.forced_call(TOOLS[:1], is_one=True)), tokenizer, call)[1]
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}}
    with pytest.raises(InvalidArgument, match=r"tools cannot be enforced: .*not") as caught:
        chat.grammars.compiled(chat.forced_call([bad], is_one=True))
    assert caught.value.param == "tools"


def test_options_of_the_grammar_library_cannot_be_set_from_outside(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "z+"}}
    allowed, _ = spell(grammars.compiled(grammars.json_schema(schema)), tokenizer, "{")
    assert not any(allowed[token] for token in tokenizer.encode("z"))


def test_a_grammar_that_met_its_limit_is_compiled_anew(grammars: Grammars) -> None:
    schema = {"type": "string", "pattern": "^(.*a.{20}){20}$"}
    constraint = grammars.compiled(grammars.json_schema(schema))
    assert grammars.compiled(grammars.json_schema(schema)) is constraint
    source = np.random.default_rng(0)
    state = constraint.start()
    with pytest.raises(ConstraintFailed):  # noqa: PT012
        while True:
            state.accept(int(source.choice(np.flatnonzero(state.allowed()))))
    with pytest.raises(ConstraintFailed):
        state.allowed()
    assert grammars.compiled(grammars.json_schema(schema)).start().allowed().any()


@pytest.mark.parametrize(
    "schema",
    [{"const": "a" * 9000}, {"enum": ["b" * 9000, "c"]}, {"type": "string", "pattern": "^(abcdefghij){900}$"}],
    ids=["text", "one of two", "pattern"],
)
def test_long_text_without_a_choice_is_refused_since_every_mask_would_tokenize_it(
    grammars: Grammars, tokenizer: Tokenizer, schema: Schema
) -> None:
    with pytest.raises((InvalidArgument, ConstraintFailed), match="no choice for more than 8 KiB"):  # noqa: PT012
        state = grammars.compiled(grammars.json_schema(schema)).start()
        for token in tokenizer.encode('"bbbb'):
            state.allowed()
            state.accept(token)


def test_grammars_are_bounded_in_memory_for_each_owner(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in {"_MAX_KEPT_BYTES": 500, "_MAX_OWNER_BYTES": 900, "_MAX_LIVE_BYTES": 2000}.items():
        monkeypatch.setattr(grammar, name, limit)
    grammars = Grammars(tokenizer, tokenizer.inner.get_vocab_size())

    def compiled(owner: str, number: int) -> Constraint:
        schema = {"enum": [f"{number} {'x' * 90}"]}  # 200 bytes
        return grammars.compiled(grammars.json_schema(schema), Trial(owner))

    compiled("a", 0)
    in_use = [compiled("a", number) for number in range(1, 7)]  # the last two are also ready for the next request
    assert len(grammars._kept) == 2
    with pytest.raises(CapacityExhausted, match="try again soon"):
        compiled("a", 7)
    assert compiled("b", 100).start().allowed().any()
    in_use.clear()
    assert compiled("a", 7).start().allowed().any()


leaves = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[a-c]{2}$"},
        {"type": "integer"},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
        {"type": ["boolean", "null"]},
        {"enum": ["a", 1, None, [2]]},
        {"const": {"k": "ü"}},
        {},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.text('ab"\\é ', max_size=3), inner, max_size=3).map(lambda fields: record(**fields)),
        st.dictionaries(st.text("ab", max_size=2), inner, max_size=2).map(
            lambda fields: {"type": "object", "properties": fields}
        ),
        st.builds(lambda items, num: {"type": "array", "items": items, "maxItems": num}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda items: {"type": "array", "prefixItems": items, "items": False}
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=examples(25))
@given(schemas, st.integers(0, 2**32 - 1))
def test_whatever_is_spelled_under_a_small_schema_fits_it(small: Small, schema: Schema, seed: int) -> None:
    tokenizer, grammars = small
    try:
        constraint = grammars.compiled(grammars.json_schema(schema))
    except InvalidArgument:
        return
    source, state = np.random.default_rng(seed), constraint.start()
    tokens: list[int] = []
    for _ in range(60):
        if state.may_end:
            text = tokenizer.decode(tokens)
            assert jsonschema_rs.is_valid(schema, json.loads(text)), text
        allowed = np.flatnonzero(state.allowed())
        assert allowed.size or state.may_end
        if not allowed.size:
            break
        tokens.append(int(source.choice(allowed)))
        state.accept(tokens[-1])


# Masks in the sampler


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
)
def test_sampling_logprobs_are_of_the_allowed_tokens_alone(seed: int, ids: list[int], temperature: float) -> None:
    logits = np.random.default_rng(seed).normal(0, 2, 40).astype(np.float32)
    allowed = np.zeros(40, np.bool_)
    allowed[ids] = True
    params = SamplingParams(seed=seed, temperature=temperature, top_logprobs=3)
    drawn = sample_rows(logits[None], [Pick(row=0, position=3, params=params, allowed=allowed)])[0]
    assert isinstance(drawn, Sampled)
    assert allowed[drawn.token]
    raw = special.log_softmax(logits.astype(np.float64))
    assert drawn.logprob == pytest.approx(raw[drawn.token], abs=1e-5)
    assert [token for token, _ in drawn.top] == np.argsort(-logits, kind="stable")[:3].tolist()
    if temperature == 0:
        assert drawn.token == min(ids, key=lambda token: (-logits[token], token))
        assert drawn.sampling_logprob == 0
    else:
        among = special.log_softmax(logits[sorted(ids)].astype(np.float64) / temperature)
        assert drawn.sampling_logprob == pytest.approx(among[sorted(ids).index(drawn.token)], abs=1e-6)


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 39), min_size=1, max_size=6, unique=True),
    st.integers(0, 45),
    st.floats(0.05, 1),
    st.floats(0, 1),
)
def test_filters_never_bring_back_what_is_not_allowed(
    seed: int, ids: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """With the forbidden tokens left out of the vocabulary the same ones survive with the same logprobs."""
    logits = np.random.default_rng(seed).normal(0, 2, 40).astype(np.float32)
    allowed = np.zeros(40, np.bool_)
    allowed[ids] = True
    params = SamplingParams(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p)
    masked = sample_rows(logits[None], [Pick(row=0, position=0, params=params, allowed=allowed)])[0]
    floor = np.where(allowed, logits, np.float32(-1e4))
    plain = sample_rows(floor[None], [Pick(row=0, position=0, params=params)])[0]
    assert isinstance(masked, Sampled)
    assert isinstance(plain, Sampled)
    assert (masked.token, masked.sampling_logprob) == pytest.approx((plain.token, plain.sampling_logprob))


# Runs under a constraint, on an engine of 64 tokens

EOS = frozenset({62, 63})


class Counting:
    """Allows `word`, token by token, then the end: a constraint that can be checked by eye."""

    def __init__(self, *word: set[int], vocab_size: int = 64, has_end: bool = True) -> None:
        self.word = word
        self.vocab_size = vocab_size
        self.has_end = has_end
        self.accepted: list[list[int]] = []

    def start(self) -> "CountingState":
        self.accepted.append([])
        return CountingState(self, self.accepted[-1])


class CountingState:
    def __init__(self, constraint: Counting, accepted: list[int]) -> None:
        self._constraint = constraint
        self._accepted = accepted

    def allowed(self) -> Mask:
        mask = np.zeros(self._constraint.vocab_size, np.bool_)
        mask[list(self._rest()[0] if self._rest() else ())] = True
        return mask

    @property
    def may_end(self) -> bool:
        return not self._rest() and self._constraint.has_end

    def accept(self, token: int) -> None:
        self._accepted.append(token)

    def _rest(self) -> Sequence[set[int]]:
        return self._constraint.word[len(self._accepted) :]


class FragileEngine(FakeEngine):
    """Drawing for more than one row raises, so that each row is forwarded and drawn again, alone."""

    def sample(self, logits: Logits, picks: Sequence[Pick]) -> list[Sampled | NonFiniteLogits]:
        if len(picks) > 1:
            raise FloatingPointError("more than one")
        return super().sample(logits, picks)


@pytest.fixture
async def make_worker() -> AsyncIterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(kind: type[FakeEngine] = FakeEngine, vocab_size: int = 64) -> Worker:
        workers.append(Worker(kind(num_slabs=8, shape=SHAPE, vocab_size=vocab_size)))
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


MakeWorker = Callable[..., Worker]


def drawing(seed: int = 0, **options: object) -> SamplingParams:
    return SamplingParams(**{"seed": seed, "max_tokens": 12, "eos_token_ids": EOS, **options})  # type: ignore[arg-type]


async def test_a_run_ends_with_eos_where_its_constraint_does(make_worker: MakeWorker) -> None:
    constraint = Counting({1, 2, 3}, {4}, {5, 63})  # an end of ours counts as one only where the constraint ends
    events = await run(make_worker(), drawing(constraint=constraint), [7, 8])
    tokens = tokens_of(events)
    assert tokens[0] in {1, 2, 3}
    assert tokens[1:3] == [4, 5]
    assert tokens[3] in EOS
    assert len(tokens) == 4
    assert reason_of(events) == StopReason.EOS


async def test_constrained_logprobs_are_those_of_the_plain_recomputation(make_worker: MakeWorker) -> None:
    worker = make_worker()
    constraint = Counting(*[set(range(start, start + 9)) for start in range(0, 45, 5)])
    events = await run(worker, drawing(constraint=constraint, temperature=0.7), [7, 8])
    assert isinstance(worker.engine, FakeEngine)
    history = [7, 8, *tokens_of(events)]
    logits = worker.engine.expected_logits(history, Window(sink=4, recent=64)).astype(np.float64)
    for index, event in enumerate(event for event in events if isinstance(event, Sampled)):
        row = logits[index + 1]
        ids = sorted(constraint.word[index]) if index < len(constraint.word) else sorted(EOS)
        expected = special.log_softmax(row[ids] / 0.7)[ids.index(event.token)]
        assert event.sampling_logprob == pytest.approx(expected, abs=1e-6)
        assert event.logprob == pytest.approx(special.log_softmax(row)[event.token], abs=1e-5)


@pytest.mark.parametrize("kind", [FakeEngine, FragileEngine])
async def test_neighbours_change_nothing_and_no_state_advances_twice(
    make_worker: MakeWorker, kind: type[FakeEngine]
) -> None:
    constraints = [Counting(*[set(range(10)) for _ in range(6)]), None, Counting({1}, {2, 3}), None, None]
    asked = [drawing(seed, constraint=constraint) for seed, constraint in enumerate(constraints)]
    prompts = [[9], [9], list(range(20)), [9], [3, 4]]
    alone = [await run(make_worker(), params, prompt) for params, prompt in zip(asked, prompts, strict=True)]
    worker = make_worker(kind)
    together = await asyncio.gather(
        *(run(worker, params, prompt) for params, prompt in zip(asked, prompts, strict=True))
    )
    for one, other, constraint in zip(alone, together, constraints, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert [e.sampling_logprob for e in one if isinstance(e, Sampled)] == [
            e.sampling_logprob for e in other if isinstance(e, Sampled)
        ]
        if constraint:
            assert constraint.accepted == 2 * [tokens_of(one)[:-1]]  # the end itself is not shown to the state


async def test_real_grammars_share_a_batch_with_free_runs(
    make_worker: MakeWorker, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    """A model that babbles, held to JSON: tokens in company are those alone, all of them allowed."""
    constraints = [
        grammars.compiled(grammars.json_object()),
        None,
        grammars.compiled(grammars.json_schema(SCHEMAS["flat"])),
        grammars.compiled(grammars.json_object()),
    ]
    asked = [
        drawing(seed, constraint=constraint, eos_token_ids=tokenizer.eos_token_ids, max_tokens=25)
        for seed, constraint in enumerate(constraints)
    ]
    alone = [await run(make_worker(vocab_size=grammars.vocab_size), params, [5]) for params in asked]
    worker = make_worker(vocab_size=grammars.vocab_size)
    together = await asyncio.gather(*(run(worker, params, [5]) for params in asked))
    for params, one, other in zip(asked, alone, together, strict=True):
        assert tokens_of(one) == tokens_of(other)
        if params.constraint:
            check_allowed(params.constraint, tokens_of(one), tokenizer.eos_token_ids)


async def test_a_dead_end_fails_alone_and_its_sequence_goes_on(make_worker: MakeWorker) -> None:
    worker = make_worker()
    sequence = await worker.open()
    neighbour = asyncio.create_task(run(worker, drawing(max_tokens=30, eos_token_ids=frozenset()), [1, 2]))
    with pytest.raises(ConstraintFailed, match="no token may follow the 2 sampled"):
        async with worker.generate(sequence, drawing(constraint=Counting({1}, {2}, has_end=False)), [7, 8]) as stream:
            await stream.done()
    assert len(tokens_of(await neighbour)) == 30
    info = worker.info(sequence)
    assert info.failure is None
    assert (info.inv1_violations, info.inv2_violations) == (0, 0)
    assert await worker.tokens(sequence) == [7, 8, 1, 2]
    async with worker.generate(sequence, drawing(temperature=0, max_tokens=3)) as stream:
        assert (await stream.done()).num_generated == 3
    after = await worker.tokens(sequence)
    assert after[4:] == tokens_of(await run(worker, drawing(temperature=0, max_tokens=3), [7, 8, 1, 2]))


async def test_a_constraint_that_breaks_fails_alone(make_worker: MakeWorker) -> None:
    class Broken(Counting):
        def start(self) -> CountingState:
            raise ZeroDivisionError("broken")

    worker = make_worker()
    asked = [drawing(constraint=Broken({1})), drawing(1), drawing(2, constraint=Counting({1}, {2}))]
    broken, free, held = await asyncio.gather(*(run(worker, p, [7, 8]) for p in asked), return_exceptions=True)
    assert isinstance(broken, HoldfastError)
    assert isinstance(free, list)
    assert isinstance(held, list)
    assert tokens_of(held)[:2] == [1, 2]


async def test_a_turn_that_came_to_a_dead_end_leaves_its_session_whole() -> None:
    worker = Worker(FakeEngine(num_slabs=2, shape=SHAPE))
    backend = EmbeddedBackend(worker, model_of(worker.engine))
    backend.start()
    try:
        runtime = Runtime(backend)
        session = (await runtime.create("ann")).session_id
        stuck = drawing(constraint=Counting({1}, has_end=False))
        with pytest.raises(ConstraintFailed):
            async for _ in runtime.generate(session, "ann", stuck, tokens=[7, 8]):
                pass
        batches = [batch async for batch in runtime.generate(session, "ann", drawing(), tokens=[9])]
        assert isinstance(batches[-1][-1], Done)
        pieces = runtime.history(session, "ann")
        assert [token for piece in pieces for token in piece.tokens][:4] == [7, 8, 1, 9]
    finally:
        backend.stop()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"constraint": Counting({1}, vocab_size=65)}, "vocabulary of 65"),
        ({"constraint": Counting({1}), "eos_token_ids": frozenset()}, "EOS"),
    ],
)
async def test_a_constraint_that_cannot_work_is_refused_at_once(
    make_worker: MakeWorker, options: dict[str, Any], reason: str
) -> None:
    worker = make_worker()
    sequence = await worker.open()
    with pytest.raises(InvalidArgument, match=reason):
        worker.generate(sequence, drawing(**options), [1])
