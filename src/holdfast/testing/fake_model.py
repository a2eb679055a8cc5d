"""A language model for fakes: its next-token distribution is a fingerprint of the whole prompt."""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class DrawnToken:
    token: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest first


@dataclass(slots=True)
class FakeModel:
    """`scripted` replies come first, one list of token ids each; after them tokens are drawn."""

    name: str = "fake-model"
    vocab_size: int = 64
    eos_token_id: int | None = 2
    context: int = 4096
    logprob_kind: str = "raw"
    decode: Callable[[Sequence[int]], str] = lambda ids: "".join(f"<{i}>" for i in ids)
    scripted: deque[list[int]] = field(default_factory=deque)

    def draw(self, prompt: Sequence[int], options: Mapping[str, Any], max_tokens: int) -> list[DrawnToken]:
        """Up to `max_tokens`, ending with the first that stops."""
        script = self.scripted.popleft() if self.scripted else None
        stops = set(options.get("stop_token_ids") or ())
        if not options.get("ignore_eos") and self.eos_token_id is not None:
            stops.add(self.eos_token_id)
        drawn: list[DrawnToken] = []
        for index in range(len(script) if script is not None else max_tokens):
            history = [*prompt, *(d.token for d in drawn)]
            drawn.append(self._draw(history, options, script[index] if script is not None else None))
            if script is None and drawn[-1].token in stops:
                break
        return drawn

    def _draw(self, history: Sequence[int], options: Mapping[str, Any], forced: int | None) -> DrawnToken:
        digest = hashlib.blake2b(np.asarray(history, np.int64).tobytes(), digest_size=8).digest()
        source = np.random.Generator(np.random.PCG64(int.from_bytes(digest)))
        logits = source.standard_normal(self.vocab_size) * 2
        temperature = options.get("temperature")
        temperature = 1.0 if temperature is None else temperature
        cooled = logits / (temperature or 1.0)
        raw, sampling = (x - np.log(np.exp(x - x.max()).sum()) - x.max() for x in (logits, cooled))
        seed = options.get("seed", options.get("sampling_seed")) or 0
        noise = np.random.Generator(np.random.PCG64([seed, len(history)])).gumbel(size=self.vocab_size)
        token = int(np.argmax(cooled + noise * (temperature > 0))) if forced is None else forced
        told = raw if self.logprob_kind == "raw" else sampling
        best = np.argsort(-told)[:20]
        return DrawnToken(token, float(told[token]), [(int(i), float(told[i])) for i in best])
