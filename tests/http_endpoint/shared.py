"""What tests of the HTTP endpoint share, beside the fixtures in conftest.py."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.serving import Server, default_chat, serving, wordy_engine

CHAT = "/v1/chat/completions"
DEPRECATION = ("deprecation", "sunset", "link")


@contextlib.asynccontextmanager
async def guarded(tmp_path: Path) -> AsyncIterator[Server]:
    keys = tmp_path / "keys"
    keys.write_text("alice:key-a\nbob:key-b\n")
    async with serving(wordy_engine(forward_s=0), default_chat(), keys_file=str(keys)) as server:
        yield server
