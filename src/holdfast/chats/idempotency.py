"""Whether a request is one that we know already: it joins the turn in flight, or gets the last one again."""

import hashlib
from dataclasses import dataclass

from holdfast.errors import IdempotencyMismatch


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """What tells requests apart. `is_retry`: the client says so itself, without a key."""

    body_hash: bytes
    key: str = ""
    is_retry: bool = False

    @classmethod
    def of(cls, body: bytes, *, key: str = "", is_retry: bool = False) -> "IdempotencyKey":
        return cls(hashlib.sha256(body).digest(), key, is_retry)

    def repeats(self, earlier: "IdempotencyKey | None") -> bool:
        """Whether this is `earlier` again. The same key on another body is nobody's retry."""
        if earlier is None:
            return False
        if self.key and self.key == earlier.key:
            if self.body_hash != earlier.body_hash:
                raise IdempotencyMismatch(f"the key {self.key!r} was used for another request on this session")
            return True
        return self.is_retry and not self.key and self.body_hash == earlier.body_hash
