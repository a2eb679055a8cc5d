"""The `holdfast` command. Each subcommand has a file; this one runs it and prints its error as one sentence."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from holdfast import __version__
from holdfast.cli import usage
from holdfast.errors import HoldfastError, InvalidArgument

_COMMANDS = {  # and what the help says of them: it imports none of them, which would take seconds
    "serve": "serve sessions over gRPC and HTTP",
    "run": "run an agent on a session and show what was recorded",
    "chat": "chat with a model in the terminal",
    "sessions": "list, show, search, close, export, import and purge sessions",
    "samples": "check, show and convert exported samples",
    "journal": "check, copy and migrate a data directory or a database",
    "models": "list, pull, delete, verify and inspect models",
    "cluster": "run members of a cluster on Ray",
    "bench": "run and compare benchmarks",
    "doctor": "check what this machine can run",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 success, 1 failure, 2 wrong usage, settings or input file, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="holdfast", description="LLM inference in sessions: each turn computes only its new tokens."
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    words = sys.argv[1:] if argv is None else argv
    if (named := _named(words)) is None:
        for command, about in _COMMANDS.items():
            commands.add_parser(command, help=about)
    else:
        import_module(f"holdfast.cli.{named}").register(commands)
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


def _named(words: Sequence[str]) -> str | None:
    """The command that is to run; None if there is none, or a flag before it ends the program."""
    for word in words:
        if word in _COMMANDS:
            return word
        if word in ("-h", "--help", "--version"):
            return None
    return None
