"""How long a draft should be: as long as it pays, judged by what became of the earlier ones."""

_START = 0.5  # chance that a drafted token is right, before anything is known
_SPEED = 0.12  # how fast that belief moves
_RETRY = 24  # a sequence that stopped drafting tries one token again after so many chances


class Pace:
    """One sequence's trust in drafts of one strength. `row_cost`: what one more row adds to a forward, in forwards."""

    def __init__(self, row_cost: float) -> None:
        self._row_cost = row_cost
        self._chance = _START
        self._skipped = 0

    def length(self, limit: int) -> int:
        """How many tokens to draft now, at most `limit`. Mutates: counts the chances let go by."""
        best = max(range(limit + 1), key=self._speed, default=0)
        if best or not limit:
            return best
        self._skipped += 1
        if self._skipped < _RETRY:
            return 0
        self._skipped = 0
        return 1

    def learn(self, num_proposed: int, num_accepted: int) -> None:
        """Every accepted token counts for drafting, the first refused one against."""
        for _ in range(num_accepted):
            self._chance += _SPEED * (1 - self._chance)
        if num_accepted < num_proposed:
            self._chance -= _SPEED * self._chance

    def _speed(self, length: int) -> float:
        """Expected tokens by the cost of the forward that verifies them."""
        tokens = sum(self._chance**i for i in range(length + 1))
        return tokens / (1 + self._row_cost * length)
