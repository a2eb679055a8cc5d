"""Whether a session answers from what has left its window: facts told long ago, asked through a server with recall,
without it, and with the fact in view; and questions about what nobody told."""

import random
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from holdfast.bench.gates import Gate, control, share_at_least
from holdfast.bench.load import ask
from holdfast.bench.processes import RunningServer, serving
from holdfast.bench.report import Report, Results

if TYPE_CHECKING:
    from holdfast.bench.quality import QualitySettings

OF_IN_VIEW = 0.8  # of the answers with the fact in view that recall must reach
CHANCE = 0.1  # answers without recall that are more than guesses

_SYSTEM = {"role": "system", "content": "You answer briefly."}
_NOTED = {"role": "assistant", "content": "Noted."}
_REPLY_TOKENS = 24
_FILLER_CHARS = 600
_QUOTES = 0.5  # of the window
_KEYS = 0.9  # of a long history through which pass keys are spread
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


def is_false(text: str) -> bool:
    """Whether a text answers a question that nothing on record answers."""
    return not _ADMITS.search(text)


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
        info = self._send("GET", self._path)
        return info["kv_live_bytes"], info["kv_reserved_bytes"]

    def close(self) -> None:
        self._send("DELETE", self._path)

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
        return ask(method, self._address, path, b"" if body is None else msgspec.json.encode(body))


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
    flags = ("--recent", str(recent), "--max-rollback", "-1", "--device", settings.device)
    with serving(settings.model, *flags) as server:
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
                for wording in one.wordings:
                    for name, is_on in (("on", True), ("off", False)):
                        answer, num_recalled = talk.ask(wording, recall=is_on)
                        results.count(f"{name}/{distance}/answered", one.is_answered_by(answer))
                        results.count(f"{name}/recalled_tokens", num_recalled)
        for number, one in enumerate(unknown):
            results.step(f"question {number + 1} of {len(unknown)} that nobody can answer")
            for name, is_on in (("on", True), ("off", False)):
                answer, _ = talk.ask(one.wordings[number % len(one.wordings)], recall=is_on)
                results.count(f"{name}/false", is_false(answer))
                results.count(f"{name}/false_told", not told.isdisjoint(_words(answer)))
        talk.close()
    for name in [name for name in results.report.series if name.endswith(("/answered", "/false", "/false_told"))]:
        values = results.report.values(name)
        results.figure(f"{name}_share", "", sum(values) / len(values))


def judge(report: Report) -> list[Gate]:
    def share(name: str, series: str, least: float) -> Gate:
        return share_at_least(name, report.values(series), least)

    seen = report.values("in_view/answered")
    least = OF_IN_VIEW * sum(seen) / len(seen) if seen else 1.0
    gates = [share("recall_in_view", "in_view/answered", 0.5)]
    for distance in numbers(str(report.settings.get("windows", ""))):
        gates.append(share(f"recall_after_{distance}_windows", f"on/{distance}/answered", least))
        without = report.values(f"off/{distance}/answered")
        gates.append(control(f"control_without_recall_{distance}", share_at_least("", without, CHANCE), len(without)))
    for name in ("false", "false_told"):
        on, off = report.values(f"on/{name}"), report.values(f"off/{name}")
        reason = f"{sum(on):g} of {len(on)} with recall, {sum(off):g} of {len(off)} without"
        gates.append(Gate(f"recall_{name}", bool(on) and sum(on) <= sum(off), reason))
    return gates


def numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]


def _fillers(text: str) -> Iterator[str]:
    while True:
        for start in range(0, len(text) - _FILLER_CHARS, _FILLER_CHARS):
            yield f"Read this: {text[start : start + _FILLER_CHARS]}"


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))
