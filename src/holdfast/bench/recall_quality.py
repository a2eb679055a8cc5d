"""Whether a session answers from what has left its window: facts told long ago, asked through a server with recall,
without it, and with the fact in view; and questions about what nobody told."""

import contextlib
import math
import os
import random
import re
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.bench.conversation import TIMEOUT_S
from holdfast.bench.gates import Gate, all_right, control, median_at_most, share_at_least
from holdfast.bench.load import ask
from holdfast.bench.machine import resident_bytes
from holdfast.bench.processes import RunningServer, serving
from holdfast.bench.report import Report, Results
from holdfast.chat.messages import Message
from holdfast.chat.tokenizer import Tokenizer
from holdfast.chats.recall import Recall, RecallLimits
from holdfast.chats.tree import Tree
from holdfast.sessions.record import View

if TYPE_CHECKING:
    from holdfast.bench.quality import QualitySettings

OF_IN_VIEW = 0.8  # of the answers with the fact in view that recall must reach
CHANCE = 0.1  # answers without recall that are more than guesses

_SYSTEM = {"role": "system", "content": "You answer briefly."}
_NOTED = {"role": "assistant", "content": "Noted."}
_REPLY_TOKENS = 24
_FILLER_CHARS = 600
_QUOTES = 0.5  # of the window
_ASKED = 40  # searches that are timed
_LIMITS_MS = {200_000: 5.0, 2_000_000: 20.0}  # of a search, by the length of the history
_PLACES = (
    "beacon",
    "orchard",
    "monastery",
    "shipyard",
    "reservoir",
    "vineyard",
    "quarry",
    "aquarium",
    "mill",
    "zoo",
)
_UNKNOWN = ("fortress", "stadium", "chapel", "factory", "palace", "cinema", "embassy", "gallery", "prison", "dairy")
_KINDS = (
    (
        "The password of the {place} is {answer}.",
        ("What is the password of the {place}?", "I forgot the {place} password. Can you tell me what it was?"),
        ("walnut", "comet", "saddle", "trumpet", "glacier", "lantern", "pirate", "cactus", "velvet", "magnet"),
    ),
    (
        "The guard of the {place} is called {answer}.",
        ("What is the guard of the {place} called?", "Do you remember the name of the {place}'s guard?"),
        ("Oscar", "Ingrid", "Bruno", "Matilda", "Felix", "Greta", "Hugo", "Selma", "Anton", "Lydia"),
    ),
    (
        "A ticket for the {place} costs {answer} crowns.",
        ("How many crowns does a ticket for the {place} cost?", "What did I say about the cost of {place} tickets?"),
        ("17", "23", "31", "46", "58", "64", "72", "85", "93", "39"),
    ),
    (
        "The {place} belongs to a family from {answer}.",
        ("Where is the family from that the {place} belongs to?", "From which city is the {place} family?"),
        ("Oslo", "Lisbon", "Cairo", "Vienna", "Dublin", "Prague", "Madrid", "Athens", "Warsaw", "Lima"),
    ),
)
_DISTRACTORS = (
    "The password of the {place} was changed twice last year.",
    "Nobody has seen the guard of the {place} today.",
    "I lost my ticket for the {place}.",
    "A family from the south visited the {place}.",
)
_ADMITS = re.compile(r"(?i)sorry|don't|do not|not sure|no information|can't|cannot|unable|unknown|didn't|not mentioned")


class Question(NamedTuple):
    statement: str
    wordings: tuple[str, ...]
    answer: str

    def is_answered_by(self, text: str) -> bool:
        return self.answer.lower() in _words(text)


def questions(places: Sequence[str] = _PLACES) -> list[Question]:
    """One for each kind of fact and each place: every word of a question is in many facts, all of them in one."""
    found = []
    for offset, place in enumerate(places):
        for statement, wordings, answers in _KINDS:
            answer = answers[offset]
            texts = tuple(wording.format(place=place) for wording in wordings)
            found.append(Question(statement.format(place=place, answer=answer), texts, answer))
    return found


def is_false(text: str, told: Collection[str]) -> bool:
    """Whether a text answers a question that nothing on record answers, neither admitting it nor beginning with a
    sentence that was told."""
    return not _ADMITS.search(text) and not text.lstrip(' "').startswith(tuple(told))


class Talk:
    """A session that is asked, and goes on as if it had not been."""

    def __init__(self, server: RunningServer, recall_tokens: int) -> None:
        self._address = server.http.partition("://")[2]
        self._recall = {"tokens": recall_tokens}
        self._path = f"/sessions/{self._send('POST', '/sessions', {})['session_id']}"
        self._messages: list[dict[str, Any]] = [_SYSTEM]
        self.num_tokens = 0

    def tell(self, texts: Sequence[str]) -> None:
        """Say all of it; each text is answered with a word."""
        told = [message for text in texts for message in ({"role": "user", "content": text}, _NOTED)][:-1]
        body = self._complete([*self._messages, *told], 1, recall=False)
        self._messages += [*told, body["choices"][0]["message"]]
        self.num_tokens = body["usage"]["total_tokens"]

    def ask(self, *texts: str, recall: bool = False) -> tuple[str, int]:
        """The answer to the last of the texts, and how many tokens were recalled. Leaves no trace in what follows."""
        told = [message for text in texts for message in ({"role": "user", "content": text}, _NOTED)][:-1]
        body = self._complete([*self._messages, *told], _REPLY_TOKENS, recall=self._recall if recall else False)
        return body["choices"][0]["message"]["content"] or "", body["usage"]["holdfast"]["recalled_tokens"]

    def kv_bytes(self) -> tuple[int, int]:
        """The cache's bytes in use, and those that are reserved for it."""
        listed = self._send("GET", "/sessions")["data"]
        info = next(one for one in listed if self._path.endswith(one["session_id"]))
        return info["kv_live_bytes"], info["kv_reserved_bytes"]

    def _complete(self, messages: list[dict[str, Any]], max_tokens: int, *, recall: Any) -> Any:
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "truncation": "auto",
            "recall": recall,
        }
        return self._send("POST", f"{self._path}/v1/chat/completions", body)

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        content = b"" if body is None else msgspec.json.encode(body)
        return ask(method, self._address, path, content, timeout_s=TIMEOUT_S)


def measure(results: Results, text: str, settings: "QualitySettings") -> None:
    """Ask the same questions while their facts are in view, and ever more windows after they were told."""
    num, recent = settings.questions, settings.served_recent
    chance = random.Random(0)
    known, unknown = questions(), questions(_UNKNOWN)
    chance.shuffle(known)
    chance.shuffle(unknown)
    known, unknown, told = known[:num], unknown[:num], {word for one in known for word in _words(one.answer)}
    others = [text.format(place=place) for place in (*_PLACES, *_UNKNOWN[:5]) for text in _DISTRACTORS]
    statements = [*(one.statement for one in known), *others]
    chance.shuffle(statements)
    fillers = _fillers(text)
    with _served(settings) as server:
        talk = Talk(server, round(_QUOTES * recent))
        talk.tell([next(fillers)])
        for number, one in enumerate(known):
            results.step(f"fact {number + 1} of {len(known)}, in view")
            for wording in one.wordings:
                results.count("in_view/answered", one.is_answered_by(talk.ask(one.statement, wording)[0]))
        talk.tell(statements)
        start = talk.num_tokens
        for distance in numbers(settings.windows):
            while talk.num_tokens - start < distance * recent:
                results.step(f"telling, {talk.num_tokens - start} of {distance * recent} tokens")
                talk.tell([next(fillers)])
            for number, one in enumerate(known):
                results.step(f"fact {number + 1} of {len(known)}, {distance} windows ago")
                asked = [*((True, wording) for wording in one.wordings), (False, one.wordings[number % 2])]
                for is_on, wording in asked:
                    answer, num_recalled = talk.ask(wording, recall=is_on)
                    results.count(f"{'on' if is_on else 'off'}/{distance}/answered", one.is_answered_by(answer))
                    results.count("recalled_tokens", num_recalled)
        for number, one in enumerate(unknown):
            results.step(f"question {number + 1} of {len(unknown)} that nobody can answer")
            for name, is_on in (("on", True), ("off", False)):
                answer, _ = talk.ask(one.wordings[number % len(one.wordings)], recall=is_on)
                results.count(f"{name}/false", is_false(answer, others))
                results.count(f"{name}/not_admitted", is_false(answer, ()))
                results.count(f"{name}/false_told", not told.isdisjoint(_words(answer)))


def measure_pass_keys(results: Results, text: str, settings: "QualitySettings") -> None:
    """Tell keys in the course of a long history, and ask for all of them at its end."""
    num, recent, length = settings.pass_keys, settings.served_recent, settings.history_tokens
    keys, fillers = _pass_keys(num), _fillers(text)
    with _served(settings) as server:
        talk = Talk(server, round(_QUOTES * recent))
        talk.tell([next(fillers)])
        for one in keys:
            results.count("pass_keys_in_view/answered", one.is_answered_by(talk.ask(one.statement, *one.wordings)[0]))
        told = 0
        while talk.num_tokens < length:
            results.step(f"telling, {talk.num_tokens} of {length} tokens")
            if told < num and talk.num_tokens >= told * length / (num + 1):
                talk.tell([keys[told].statement])
                told += 1
            talk.tell([next(fillers) for _ in range(max(1, recent // 256))])
            if talk.num_tokens > 2 * recent:
                for name, value in zip(("live", "reserved"), talk.kv_bytes(), strict=True):
                    results.extend(f"pass_keys/kv_{name}_bytes", "bytes", [value])
        for number, one in enumerate(keys):
            results.step(f"pass key {number + 1} of {num}")
            for name, is_on in (("on", True), ("off", False)):
                answer, _ = talk.ask(*one.wordings, recall=is_on)
                results.count(f"pass_keys_{name}/answered", one.is_answered_by(answer))
        results.figure("pass_keys/history_tokens", "tokens", talk.num_tokens)


def _pass_keys(num: int) -> list[Question]:
    chance, found = random.Random(1), []
    for place in [*_PLACES, *_UNKNOWN][:num]:
        key = str(chance.randrange(10_000, 100_000))
        asked = (f"What is the pass key of the {place}?",)
        found.append(Question(f"The pass key of the {place} is {key}.", asked, key))
    return found


def measure_search(results: Results, text: str, tokenizer: Tokenizer, num_tokens: int) -> None:
    """How long it takes to search a history of that length, and to make its index; and whether a question recalls first
    what was told once in its course."""
    results.step(f"writing {num_tokens} tokens")
    tree, fillers, keys = Tree(), _fillers(text), _pass_keys(len(_PLACES))
    left = list(keys)
    while tree.tip.end < num_tokens:
        is_key = len(left) > len(keys) * (1 - tree.tip.end / num_tokens)
        told = left.pop().statement if is_key else next(fillers)
        message, reply = {"role": "user", "content": told}, {"role": "assistant", "content": "Noted."}
        ids = tokenizer.encode_plain(told)
        tree.add(tree.new_turn(tree.tip, messages=[message], reply=reply, given=ids, sampled=[], finish_reason="stop"))
    recall, view = Recall(), View(0, tree.tip.end)  # nothing is in view
    before, started = resident_bytes(os.getpid()), time.perf_counter()
    recall.update(tree, tokenizer)
    results.figure(f"search/{num_tokens}/index_s", "s", time.perf_counter() - started, "lower")
    grown = resident_bytes(os.getpid()) - before
    results.figure(f"search/{num_tokens}/index_bytes_a_token", "bytes", grown / tree.tip.end, "lower")
    for number in range(_ASKED):
        start = number * len(text) // _ASKED
        query = text[start : start + (60, 400)[number % 2]]
        started = time.perf_counter()
        recall.search(tree.tip, view, query)
        results.extend(f"search/{num_tokens}/ms", "ms", [(time.perf_counter() - started) * 1000])
    for one in keys:
        asked: list[Message] = [{"role": "user", "content": one.wordings[0]}]
        found = recall.choose(tree.tip, view, asked, RecallLimits(512), tokenizer)
        results.count(f"search/{num_tokens}/found", bool(found) and found[0].text == one.statement)


def judge(report: Report) -> list[Gate]:
    settings, gates = report.settings, []
    if settings.get("questions"):
        gates += _judge_answers(report)
    if settings.get("pass_keys"):
        gates += [_like_in_view(report, "pass_keys", "pass_keys_in_view", "pass_keys_on")]
        kv = report.values("pass_keys/kv_live_bytes")
        gates += [
            Gate("pass_keys_memory", bool(kv) and min(kv) == max(kv) > 0, f"{len({*kv})} different sizes of the cache")
        ]
    for num_tokens in numbers(settings.get("search_tokens", "")):
        limit = min([most for length, most in _LIMITS_MS.items() if num_tokens <= length], default=math.inf)
        gates.append(median_at_most(f"search_{num_tokens}", report.values(f"search/{num_tokens}/ms"), limit, "ms"))
        found = report.values(f"search/{num_tokens}/found")
        gates.append(all_right(f"found_among_{num_tokens}", len(found), found.count(0.0)))
    return gates


def _judge_answers(report: Report) -> list[Gate]:
    gates = [share_at_least("recall_in_view", report.values("in_view/answered"), 0.5)]
    for distance in numbers(report.settings["windows"]):
        gates.append(_like_in_view(report, f"recall_after_{distance}_windows", "in_view", f"on/{distance}"))
        without = report.values(f"off/{distance}/answered")
        gates.append(control(f"control_without_recall_{distance}", share_at_least("", without, CHANCE), len(without)))
    for name in ("false", "false_told"):
        on, off = report.values(f"on/{name}"), report.values(f"off/{name}")
        reason = f"{sum(on):g} of {len(on)} with recall, {sum(off):g} of {len(off)} without"
        gates.append(Gate(f"recall_{name}", bool(on) and sum(on) <= sum(off), reason))
    return gates


def _like_in_view(report: Report, name: str, in_view: str, recalled: str) -> Gate:
    seen = report.values(f"{in_view}/answered")
    least = OF_IN_VIEW * sum(seen) / len(seen) if sum(seen) else 1.0
    return share_at_least(name, report.values(f"{recalled}/answered"), least)


def _served(settings: "QualitySettings") -> contextlib.AbstractContextManager[RunningServer]:
    flags = ("--recent", str(settings.served_recent), "--max-rollback", "-1", "--device", settings.device)
    return serving(settings.model, *flags)


def numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


def _fillers(text: str) -> Iterator[str]:
    while True:
        for start in range(0, len(text) - _FILLER_CHARS, _FILLER_CHARS):
            yield f"Read this: {text[start : start + _FILLER_CHARS]}"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
