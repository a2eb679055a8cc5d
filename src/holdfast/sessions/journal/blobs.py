"""Long bodies outside the database: what the journal needs of a store of them. Blocks."""

from collections.abc import Sequence
from typing import Protocol


class BlobStore(Protocol):
    """Contents by key, which are written once. Used in several threads; every method blocks and may raise OSError."""

    def put(self, key: str, content: bytes) -> None:
        """The content is durable when this returns."""

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError where there is none."""

    def delete(self, keys: Sequence[str]) -> None:
        """A key that is not there is no error."""
