"""Runs a command beside a real server: `python run.py COMMAND [ARGUMENT...]`.

The command finds the server's address in HOLDFAST_CONFORMANCE_SERVER. Its exit code is ours.
"""

import os
import re
import subprocess
import sys

SERVER = [sys.executable, "-m", "holdfast.cli", "serve", "--grpc", "127.0.0.1:0", "--http", ""]
SERVER += ["--sink", "4", "--recent", "64", "--max-pin", "16", "--sessions", "4", "--dtype", "float32"]


def main(command: list[str]) -> int:
    if not command:
        print("usage: run.py COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    server = subprocess.Popen(SERVER, stderr=subprocess.PIPE, text=True)
    try:
        settings = {"HOLDFAST_CONFORMANCE_SERVER": address_of(server), "HOLDFAST_REQUIRE_CONFORMANCE": "1"}
        return subprocess.run(command, env=os.environ | settings, check=False).returncode
    finally:
        server.terminate()
        server.wait(30)


def address_of(server: "subprocess.Popen[str]") -> str:
    """Where the server listens, from its banner; its last words where it did not start."""
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        if found := re.search(r"gRPC\s+(\S+)", line):
            return found.group(1)
    raise SystemExit(f"the server did not start: {said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
