"""`python -m tests.fuzz requests|replies --count N`: bad requests, or bad upstream replies, at a real server.

Prints a report as JSON; exit status 1 where anything was wrong: a crash, a hang, a 5xx that is not explained, something
on record that should not be, a slab or a session that was lost, an error in the log, memory that grows.
"""

import argparse
import asyncio
import json
import sys
from typing import Any

from tests.fuzz.campaign import ServerProcess


async def run(what: str, kind: str, count: int, seed: int, only: str) -> dict[str, Any]:
    if what == "requests":
        from tests.fuzz.requests import BadRequests

        async with ServerProcess("embedded") as server:
            campaign = BadRequests(server, count=count, seed=seed)
            campaign.only = only
            return await campaign.run()
    from tests.fuzz.replies import BadReplies, LyingUpstream

    async with LyingUpstream(kind, seed) as upstream, ServerProcess(kind, upstream.url) as server:
        return await BadReplies(server, upstream, count=count, seed=seed).run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("what", choices=("requests", "replies"))
    parser.add_argument("--upstream", choices=("sglang", "vllm"), default="sglang", help="whose replies")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="of the requests, bodies for paths that contain this"
    )
    parser.add_argument("--count", type=int, default=500_000, help="cases (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="another seed, other cases (default: %(default)s)")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.what, arguments.upstream, arguments.count, arguments.seed, arguments.only))
    print(json.dumps(report, indent=2))
    return 1 if report["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
