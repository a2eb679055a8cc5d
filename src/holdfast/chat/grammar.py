"""Constraints that restrict a generation to JSON, to a JSON schema or to tool calls.

Compiles schemas to masks over the model's vocabulary, by llguidance. Knows text and tokens, nothing of engines or HTTP.
A client's schema may be hostile: compiling some of them never ends, and llguidance has no option to stop it. So each
new grammar is first compiled in a child process with limited time and memory. The work for each token is limited by
llguidance itself, except for text that the grammar forces: it is tokenized for every mask, so its length is limited
here. So is the memory of all grammars together, by the length of their text: up to 0.1 MB for each KiB was measured.
"""

import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer

from holdfast.chat.tokenizer import Tokenizer
from holdfast.errors import CapacityExhausted, ConstraintFailed, HoldfastError, InvalidArgument
from holdfast.generation import Constraint, ConstraintState, Mask

SCHEMA = "response_format.json_schema.schema"

_MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_KEPT, _MAX_KEPT_BYTES = 16, 512 * 1024  # compiled grammars that are ready for the next request
_MAX_LIVE_BYTES, _MAX_OWNER_BYTES = 8 * 2**20, 2 * 2**20  # of all grammars in memory, and of one owner's
_MAX_FORCED_BYTES = 8 * 1024  # of text without a choice: about 3 ms a mask
_MAX_REASON = 300  # characters of llguidance's error, which may quote the whole schema
_TRIAL_CPU_S, _TRIAL_WALL_S, _TRIAL_BYTES = 1, 20, 512 * 2**20

_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # about 20 ms, once
    "step_lexer_fuel": 100_000,  # about 7 ms a mask
    "step_max_items": 50_000,  # about 3 ms a mask
    "max_lexer_states": 20_000,  # up to 2 kB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}

# One line break with indentation, or one space: with more white space allowed, weak models never stop writing it.
_JSON = {"whitespace_pattern": r"\n[ \t]{0,32}| "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

_TRIAL = """
import json, resource, sys
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
cpu_s, num_bytes, limits, grammars = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
tokenizer, limits = LLTokenizer("byte"), LLParserLimits(**limits)
for grammar in grammars:
    error = LLMatcher(tokenizer, grammar, log_level=0, limits=limits).get_error()
    print(json.dumps(error), flush=True)
    if error:
        break
"""


class _Part(NamedTuple):
    """A grammar as plain text, without token ids, and the request field that it comes from."""

    field: str
    grammar: str


class Trial:
    """One compilation for an owner. Another thread may cancel it, which kills its child process."""

    def __init__(self, owner: str = "") -> None:
        self.owner = owner
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def run(self, job: str) -> tuple[int, str, str]:
        """Exit status, output and errors of the child process. Blocks. Raises CapacityExhausted if cancelled."""
        command = [sys.executable, "-P", "-c", _TRIAL]
        pipe = subprocess.PIPE
        self._check()
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
            with self._lock:
                self._process = process
                if self._is_cancelled:
                    process.kill()
            try:
                output, errors = process.communicate(job, _TRIAL_WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, errors = process.communicate()
        self._check()
        return process.returncode, output, errors

    def _check(self) -> None:
        if self._is_cancelled:
            raise CapacityExhausted("the request was cancelled")


class CallFrame(NamedTuple):
    """The text around the calls of a reply. Tokens that were added to the vocabulary are spelled by their text."""

    before_name: str
    after_name: str
    after: str  # the arguments
    begin: str = ""
    separator: str = ""  # no second call without one
    end: str = ""
    quotes_name: bool = True


HERMES = CallFrame('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>", separator="\n")


class Compilation(NamedTuple):
    """A grammar to be compiled. `parts` are compiled in the child process first; later errors name the last one."""

    parts: Sequence[_Part]
    grammar: str


class Grammars:
    """Constraints for one model; create one per server. Thread-safe.

    `compiled` blocks: for a tenth of a second for a new grammar, for seconds if it is hostile or the very first. Call
    it in a thread, never on an event loop.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._kept: OrderedDict[str, _Grammar] = OrderedDict()
        self._live: WeakSet[_Grammar] = WeakSet()  # also those that are only in use
        self._lock = threading.Lock()

    def json_object(self) -> Compilation:
        """Any JSON object."""
        part = _schema_part("response_format", {"type": "object"})
        return Compilation([part], part.grammar)

    def json_schema(self, schema: Mapping[str, Any], field: str = SCHEMA) -> Compilation:
        """JSON that matches `schema`, properties in its order. Errors of the compilation name `field`."""
        part = _schema_part(field, schema)
        return Compilation([part], part.grammar)

    def tool_call(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        names: Collection[str] = (),
        is_parallel: bool = True,
        frame: CallFrame = HERMES,
    ) -> Compilation:
        """A call of one of `tools` (OpenAI's form) in the format of `frame`, or several calls, and nothing else.

        `names` are the tools that may be called, all if empty. A tag that is one token must be sampled as that token.
        """
        parts: list[_Part] = []
        called: list[tuple[int, str]] = []
        arguments: list[dict[str, Any]] = []
        for index, tool in enumerate(tools):
            where = f"tools[{index}].function"
            name, schema = _function(tool, where)
            if names and name not in names:
                continue
            parts.append(_schema_part(f"{where}.parameters", schema))
            called.append((index, json.dumps(name, ensure_ascii=False) if frame.quotes_name else name))
            arguments.append({"name": f"arguments_{index}", "json_schema": _with_options(schema)})
        if not called:
            raise InvalidArgument("tool_choice must name a function that is in tools", param="tool_choice")

        def grammar(spelled: Callable[[str], str]) -> str:
            more = f"({spelled(frame.separator)} call)*" if is_parallel and frame.separator else ""
            before, after_name, after = map(spelled, (frame.before_name, frame.after_name, frame.after))
            bodies = [f"{_quoted(name)} {after_name} @arguments_{index}" for index, name in called]
            lark = f"start: {spelled(frame.begin)} call {more} {spelled(frame.end)}\n"
            lark += f"call: {before} body {after}\nbody: {' | '.join(bodies)}\n"
            return _dump([{"lark_grammar": lark}, *arguments])

        parts.append(_Part("tools", grammar(_quoted)))
        return Compilation(parts, grammar(self._tagged))

    def kept(self, compilation: Compilation) -> Constraint | None:
        """The compiled grammar, if it is at hand. Does not block."""
        with self._lock:
            kept = self._kept.get(compilation.grammar)
            if kept is None or kept.is_spent:
                return None
            self._kept.move_to_end(compilation.grammar)
            return kept

    def compiled(self, compilation: Compilation, trial: Trial | None = None) -> Constraint:
        """The compiled grammar. Blocks. InvalidArgument, naming the field, if it cannot be enforced."""
        parts, grammar = compilation
        if kept := self.kept(compilation):
            return kept
        trial = trial or Trial()
        for part in parts:
            if len(part.grammar) > _MAX_GRAMMAR_BYTES:
                raise _refusal(part.field, f"it must not be longer than {_MAX_GRAMMAR_BYTES // 1024} KiB")
        self._check_room(trial.owner, len(grammar))
        _try_out(parts, trial)
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(**_LIMITS))
        compiled = _Grammar(matcher, self.vocab_size, self._vocabulary.eos_tokens, owner=trial.owner, size=len(grammar))
        try:
            state = compiled.start()
            can_begin = state.may_end or state.allowed().any()
        except ConstraintFailed as exc:
            raise _refusal(parts[-1].field, f"it has no valid first token ({exc})") from exc
        if not can_begin:
            raise _refusal(parts[-1].field, "no text matches it")
        with self._lock:
            self._live.add(compiled)
            for spent in [key for key, kept in self._kept.items() if kept.is_spent]:
                del self._kept[spent]
            self._kept[grammar] = compiled
            while len(self._kept) > _MAX_KEPT or sum(map(len, self._kept)) > _MAX_KEPT_BYTES:
                self._kept.popitem(last=False)
        return compiled

    def _check_room(self, owner: str, size: int) -> None:
        """Raises CapacityExhausted while grammars that are in use leave no room for another one."""
        with self._lock:
            live = set(self._live) - set(self._kept.values())
        own = sum(grammar.size for grammar in live if grammar.owner == owner)
        if own + size > _MAX_OWNER_BYTES or sum(grammar.size for grammar in live) + size > _MAX_LIVE_BYTES:
            raise CapacityExhausted("schemas of requests in progress take too much memory; try again soon")

    def _tagged(self, text: str) -> str:
        """`text` in the grammar: a token that was added to the vocabulary by its id."""
        added = {str(token.content): i for i, token in self._tokenizer.inner.get_added_tokens_decoder().items()}
        tags = sorted((tag for tag in added if tag.strip() and tag in text), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, tags))})", text) if tags else [text]
        return " ".join(f"<[{added[piece]}]>" if piece in tags else _quoted(piece) for piece in pieces if piece)

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        inner = RustTokenizer.from_str(self._tokenizer.inner.to_str())
        inner.no_padding()
        inner.no_truncation()
        size = max(self.vocab_size, 1 + max(inner.get_vocab().values()))
        return LLTokenizer(inner.to_str(), n_vocab=size, eos_token=sorted(self._tokenizer.eos_token_ids) or None)


class _Grammar:
    """A compiled grammar. Its states share llguidance's lexer, so once one reaches a limit, all are unusable."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], *, owner: str = "", size: int = 0
    ) -> None:
        self.owner = owner  # whose request it was compiled for
        self.size = size  # bytes of its text
        self.vocab_size = vocab_size
        self.ends = [token for token in ends if token < vocab_size]
        self.is_spent = False
        self._matcher = matcher

    def start(self) -> ConstraintState:
        return _State(self, self._matcher.deep_copy())


class _State:
    def __init__(self, grammar: _Grammar, matcher: LLMatcher) -> None:
        self._grammar = grammar
        self._matcher = matcher

    def allowed(self) -> Mask:
        if len(self._matcher.compute_ff_bytes()) > _MAX_FORCED_BYTES:
            limit = f"{_MAX_FORCED_BYTES // 1024} KiB"
            raise ConstraintFailed(f"the grammar leaves no choice for more than {limit} of text")
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(bits, count=self._grammar.vocab_size, bitorder="little").view(np.bool_)
        allowed[self._grammar.ends] = False
        return allowed

    @property
    def may_end(self) -> bool:
        is_accepting = self._matcher.is_accepting()
        self._check()
        return is_accepting

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            self._grammar.is_spent = True
            raise ConstraintFailed(f"the grammar failed during generation: {_first_line(self._matcher.get_error())}")


def _function(tool: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """A tool's name and the schema of its arguments, which is always an object's."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgument(f"{where}.name must be a string", param=f"{where}.name")
    schema = function.get("parameters") or _NO_ARGUMENTS
    if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
        raise _refusal(f"{where}.parameters", "its type must be object")
    return function["name"], {"type": "object", **schema}


def _schema_part(field: str, schema: Mapping[str, Any]) -> _Part:
    try:
        return _Part(field, _dump([{"json_schema": _with_options(schema)}]))
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refusal(field, str(exc)) from exc


def _with_options(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": _JSON}


def _dump(grammars: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps({"grammars": grammars}, allow_nan=False)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _refusal(field: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{field} cannot be enforced: {reason}", param=field)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:_MAX_REASON]


def _try_out(parts: Sequence[_Part], trial: Trial) -> None:
    """Compiles `parts` in a child process with limited time and memory. Blocks. Raises for the first that fails."""
    code, output, stderr = trial.run(json.dumps([_TRIAL_CPU_S, _TRIAL_BYTES, _LIMITS, [p.grammar for p in parts]]))
    errors = [json.loads(line) for line in output.splitlines()]
    for part, error in zip(parts, errors, strict=False):
        if error:
            raise _refusal(part.field, _first_line(error))
    if len(errors) == len(parts):
        return
    if code < 0:  # ended by a signal: out of time or memory
        raise _refusal(parts[len(errors)].field, "it takes too much time or memory to compile")
    raise HoldfastError(f"the process that checks grammars failed: {stderr.strip()}")
