"""What drafts save and cost: the same texts continued with and without them, in turn, and whether the tokens agree.

The texts are agents' transcripts that repeat what was read, and prose that repeats nothing.
"""

import asyncio
import time
from dataclasses import dataclass

from holdfast.bench.gates import Gate, all_right, median_at_least
from holdfast.bench.report import Report, Results
from holdfast.bench.runner import Chart, Scenario
from holdfast.chat.tokenizer import load_tokenizer
from holdfast.config import DEFAULT_MODEL, EngineConfig, option
from holdfast.engine.factory import build_worker, has_exact_engine
from holdfast.engine.worker import Worker
from holdfast.generation import Done, Sampled, SamplingParams
from holdfast.models import open_model

SAVES, COSTS = 1.8, 0.97
TEMPERATURES = (0.0, 0.8)
INEXACT = "this engine has no --deterministic: whether drafts change the sampled tokens was not judged"

_CODE = '''
def load_settings(path, timeout=30):
    """Read the settings of a service from a file."""
    with open(path, encoding="utf-8") as file:
        settings = json.load(file)
    settings.setdefault("timeout", timeout)
    settings.setdefault("retries", 3)
    settings.setdefault("endpoint", "https://localhost:8443")
    return settings


def connect(settings):
    """Open a connection with the settings that were loaded."""
    client = Client(settings["endpoint"], timeout=settings["timeout"])
    for attempt in range(settings["retries"]):
        try:
            client.open()
            return client
        except ConnectionError as error:
            log.warning("attempt %d failed: %s", attempt, error)
    raise RuntimeError("no connection")
'''

_RECORDS = "\n".join(
    f'    {{"id": {1000 + i}, "name": "sensor-{i:02d}", "status": "ok", "reading": {20 + i % 7}.{i % 10}, '
    f'"unit": "celsius", "room": "hall-{i % 3}"}},'
    for i in range(12)
)

_LOG = "\n".join(
    f"2026-03-{1 + i:02d} 08:00:00 INFO scheduler started job backup-{i:02d} on node-{i % 4} with priority normal"
    for i in range(14)
)

_EDIT = "The whole file after renaming `timeout` to `limit`:"

_REPETITIVE = {
    "code_edit": f"The file before the edit:\n```python{_CODE}```\n{_EDIT}\n```python",
    "tool_result": f'Tool result:\n{{"records": [\n{_RECORDS}\n]}}\n\nThe same result once more:\n{{"records": [\n',
    "log": f"The log:\n{_LOG}\n\nThe log again, unchanged:\n2026-03-01 08:00:00 INFO",
}

_PROSE = {
    "story": "It was late in autumn when the old lighthouse keeper decided to write down what he had seen. That year,",
    "essay": "Few inventions changed daily life as quietly as the bicycle did. In the cities of those years,",
    "letter": "Dear Anna, I am sorry that my answer comes so late. Since we met in the mountains, much has happened:",
}

_KINDS = {"repetitive": _REPETITIVE, "prose": _PROSE}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    tokens: int = option(160, "tokens to sample after each text", least=1)
    rounds: int = option(3, "rounds, in each of which every text is continued once, with another seed", least=1)
    proposer: str = option("ngram", "source of the drafts", choices=("ngram", "draft_model"))
    draft_model: str = option("", "small model for --proposer draft_model")
    model: str = option(DEFAULT_MODEL, "model to measure")
    dtype: str = option("auto", "weights of the model")
    device: str = option("auto", "device to compute on")


@dataclass(slots=True)
class _Continuation:
    tokens: list[int]
    duration_s: float
    done: Done


async def _measure(settings: SpeculationSettings, results: Results) -> None:
    results.step("loading")
    tokenizer = load_tokenizer(open_model(settings.model))
    prompts = {kind: {title: tokenizer.encode(text) for title, text in texts.items()} for kind, texts in _KINDS.items()}
    is_exact = has_exact_engine(open_model(settings.model), EngineConfig(device=settings.device))
    if not is_exact:
        results.note(INEXACT)
    for is_deterministic in (False, True) if is_exact else (False,):
        config = EngineConfig(
            device=settings.device,
            dtype=settings.dtype,
            deterministic=is_deterministic,
            sessions=1,
            recent=512,
            proposer=settings.proposer,
            draft_model=settings.draft_model,
        )
        worker = build_worker(open_model(settings.model), config)
        worker.start()
        run = _SpeculationRun(settings, results, worker, prompts)
        try:
            for index in range(settings.rounds):
                await (run.compare(index) if is_deterministic else run.race(index))
                results.on_round()
        finally:
            worker.stop()


@dataclass(frozen=True, slots=True)
class _SpeculationRun:
    settings: SpeculationSettings
    results: Results
    worker: Worker
    prompts: dict[str, dict[str, list[int]]]  # by kind, then by title

    async def race(self, index: int) -> None:
        """Speed with and without drafts; which of the two comes first alternates."""
        for kind, texts in self.prompts.items():
            for temperature in TEMPERATURES:
                drafted: list[_Continuation] = []
                plain: list[_Continuation] = []
                for title, text in texts.items():
                    self.results.step(f"round {index + 1}, {title} at {temperature:g}")
                    ways = ((drafted, True), (plain, False))
                    for found, is_on in ways if index % 2 else reversed(ways):
                        found.append(await self._continue(text, temperature, index, speculation=is_on))
                name, figure = f"{kind}_{temperature:g}", self.results.figure
                figure(f"{name}_drafted", "tokens/s", _speed(drafted), "higher")
                figure(f"{name}_plain", "tokens/s", _speed(plain), "higher")
                self.results.ratio(f"{name}_drafted_to_plain", f"{name}_drafted", f"{name}_plain", "higher")
                num_tokens = sum(len(one.tokens) for one in drafted)
                num_accepted = sum(one.done.num_accepted for one in drafted)
                num_proposed = sum(one.done.num_proposed for one in drafted)
                figure(f"{name}_accepted", "share", num_accepted / max(1, num_proposed), "higher")
                figure(f"{name}_tokens_a_forward", "tokens", num_tokens / (num_tokens - num_accepted), "higher")

    async def compare(self, index: int) -> None:
        """With deterministic kernels no token may differ."""
        self.results.step(f"round {index + 1}, comparing tokens")
        for text in (text for texts in self.prompts.values() for text in texts.values()):
            for temperature in TEMPERATURES:
                drafted, plain = [
                    await self._continue(text, temperature, index, speculation=is_on) for is_on in (True, False)
                ]
                pairs = zip(drafted.tokens, plain.tokens, strict=False)
                num_wrong = sum(one != other for one, other in pairs) + abs(len(drafted.tokens) - len(plain.tokens))
                self.results.extend("compared", "tokens", [len(plain.tokens)])
                self.results.extend("different", "tokens", [num_wrong])
                self.results.extend("accepted_deterministic", "tokens", [drafted.done.num_accepted])

    async def _continue(self, prompt: list[int], temperature: float, seed: int, *, speculation: bool) -> _Continuation:
        num = self.settings.tokens
        params = SamplingParams(seed=seed, max_tokens=num, temperature=temperature, speculation=speculation)
        sequence = await self.worker.open()
        await self.worker.append(sequence, prompt)
        tokens, done = [], None
        started = time.perf_counter()
        async with self.worker.generate(sequence, params) as stream:
            async for batch in stream:
                tokens += [event.token for event in batch if isinstance(event, Sampled)]
                done = next((event for event in batch if isinstance(event, Done)), done)
        took_s = time.perf_counter() - started
        await self.worker.close(sequence)
        assert done is not None
        return _Continuation(tokens, took_s, done)


def _speed(continuations: list[_Continuation]) -> float:
    return sum(len(one.tokens) for one in continuations) / sum(one.duration_s for one in continuations)


def judge(report: Report) -> list[Gate]:
    required = {
        f"{kind}_{temperature:g}_drafted_to_plain": least
        for kind, least in (("repetitive", SAVES), ("prose", COSTS))
        for temperature in TEMPERATURES
    }
    gates = [median_at_least(name, report.values(name), least, "times") for name, least in required.items()]
    if INEXACT in report.notes:
        return gates
    return [*gates, all_right("same_tokens_when_deterministic", report.total("compared"), report.total("different"))]


def charts(settings: SpeculationSettings) -> list[Chart]:
    names = tuple(f"{k}_{t:g}_{way}" for k in _KINDS for t in TEMPERATURES for way in ("drafted", "plain"))
    return [Chart("with and without drafts", "bars", names, "tokens/s")]


SCENARIO = Scenario(
    name="speculation",
    about="tokens/s with and without drafts, on repetitive texts and on prose; the same tokens either way",
    settings=SpeculationSettings,
    quick={"rounds": 1, "tokens": 64},
    quick_s=45,
    num_rounds=lambda settings: 2 * settings.rounds,
    measure=lambda settings, results: asyncio.run(_measure(settings, results)),
    judge=judge,
    charts=charts,
)
