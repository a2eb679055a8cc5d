"""Real agent programs against a real server: `python -m tests.agents --list`. Not part of `make test`."""
