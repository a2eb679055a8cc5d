"""The `holdfast` command. Each subcommand has a file; this one runs it and prints its error as one sentence."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from holdfast import __version__
from holdfast.cli import usage
from holdfast.errors import HoldfastError, InvalidArgument

_COMMANDS = ("serve", "run", "chat", "sessions", "samples", "journal", "models", "cluster", "bench", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 success, 1 failure, 2 wrong usage, settings or input file, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="holdfast", description="LLM inference in sessions: each turn computes only its new tokens."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    named = [word for word in words[:1] if word in _COMMANDS]
    for command in named or _COMMANDS:  # the others need not be imported, which takes longer than most commands
        import_module(f"holdfast.cli.{command}").register(commands)
    usage.shorten(parser)
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        usage.refuse_unknown(parser, words, unknown)
    try:
        usage.check_environment(os.environ)
        status: int = arguments.run(arguments)
    except InvalidArgument as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return 2
    except HoldfastError as exc:
        print(f"holdfast: {exc}", file=sys.stderr)
        return 1
    except MemoryError:
        print("holdfast: not enough memory; `holdfast doctor` shows how many sessions fit", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
