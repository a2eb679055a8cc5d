"""`holdfast serve` in a process of its own, in front of an upstream."""

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.agents.model import model_folder

REPOSITORY = Path(__file__).parents[2]
HOLDFAST = [sys.executable, "-m", "holdfast.cli"]


def own_env() -> dict[str, str]:
    """For our own command, which refuses variables HOLDFAST_... that are no settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    return kept | {"PYTHONPATH": str(REPOSITORY / "src")}


class HoldfastServer:
    """Runs for as long as the context lasts. `url` changes with a restart; what is in its data directory does not."""

    def __init__(self, options: Sequence[str], folder: Path) -> None:
        addresses = ["--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", str(folder / "data")]
        self._argv = ["serve", str(model_folder(folder / "qwen3")), "--backend=sglang", *addresses, *options]
        self._log = folder / "server.log"
        self.url = ""

    async def __aenter__(self) -> Self:
        with self._log.open("ab") as log:
            seen = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *HOLDFAST, *self._argv, stderr=log, stdout=log, env=own_env()
            )
        while not (found := re.search(rb"(http://\S+)/metrics", said := self._log.read_bytes()[seen:])):
            if self._process.returncode is not None:
                raise RuntimeError(f"holdfast serve ended: {said.decode()}")
            await asyncio.sleep(0.05)
        self.url = found[1].decode()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._process.terminate()
            await asyncio.wait_for(self._process.wait(), 60)
        finally:
            if self._process.returncode is None:
                self._process.kill()

    async def restart(self) -> None:
        await self.__aexit__(None, None, None)
        await self.__aenter__()
