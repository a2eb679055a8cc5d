"""Help in two lengths, answers to flags and environment variables that are almost right, and a question."""

import argparse
import difflib
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from holdfast.config import ENVIRONMENT_PREFIX, VARIABLES
from holdfast.errors import ConfigError

MODEL_HELP = "a bundled name, a GGUF file, a directory, or ORG/NAME[@REVISION] on the Hugging Face hub"

_WINDOW = "a session keeps a window of --recent TOKENS, and its history has no limit"
_MEMORY = "--sessions N and --recent TOKENS decide how much memory is used; `holdfast doctor` shows how many fit"
_ONE_DEVICE = "the embedded engine uses one device; start vLLM or SGLang with it, and pass --backend and --upstream URL"
_NOT_NEEDED = "it is not needed, as the model's own template decides; leave it out"
_ANSWERS = {  # flags of vLLM, SGLang, llama.cpp and Ollama
    "--api-key": "write OWNER:KEY into a file and pass --keys-file FILE",
    **dict.fromkeys(("--max-model-len", "--ctx-size", "-c", "--context-length", "--num-ctx", "--n-ctx"), _WINDOW),
    **dict.fromkeys(("--gpu-memory-utilization", "--mem-fraction-static"), _MEMORY),
    **dict.fromkeys(("--max-num-seqs", "--max-running-requests", "--parallel", "-np"), "use --sessions N"),
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--tensor-split", "-ts"), _ONE_DEVICE),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp", "--dp-size"), _ONE_DEVICE),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), "use --device cuda, or --device mlx on a Mac"),
    **dict.fromkeys(("--quantization", "-q"), "use --dtype int8, or pass a quantised GGUF file as MODEL"),
    **dict.fromkeys(("--max-num-batched-tokens", "--chunked-prefill-size"), "use --prefill-chunk TOKENS"),
    **dict.fromkeys(("--batch-size", "-b", "--ubatch-size", "-ub"), "use --prefill-chunk TOKENS and --max-batch N"),
    **dict.fromkeys(("--ssl-certfile", "--ssl-cert-file"), "use --tls-cert FILE"),
    **dict.fromkeys(("--ssl-keyfile", "--ssl-key-file"), "use --tls-key FILE"),
    **dict.fromkeys(("--alias", "-a"), "use --served-model-name NAME"),
    **dict.fromkeys(
        ("--chat-template-file", "--jinja"), "use --chat-template FILE; without it the model's own is used"
    ),
    **dict.fromkeys(
        ("--speculative-config", "--speculative-model", "--model-draft", "-md"),
        "use --proposer draft_model and --draft-model MODEL",
    ),
    **dict.fromkeys(("--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser"), _NOT_NEEDED),
    "--trust-remote-code": "it is not needed, as code in a model's directory is never run; leave it out",
    "--revision": "pass the model as ORG/NAME@REVISION",
    "--hf-token": "set the environment variable HF_TOKEN",
    "--download-dir": "set the environment variable HF_HOME",
    "--keep-alive": "use --idle-ttl-s SECONDS",
    "--seed": "each request has its own seed",
}
NO_VARIABLES = {
    **dict.fromkeys(("HOLDFAST_HOST", "HOLDFAST_PORT"), "set HOLDFAST_HTTP=HOST:PORT"),
    **dict.fromkeys(("HOLDFAST_MODEL", "HOLDFAST_CONFIG", "HOLDFAST_LOG_LEVEL"), "pass it on the command line"),
}
_FEW_FLAGS = 6
# What Kubernetes puts into every container beside a service whose name begins with `holdfast`.
_SERVICE = re.compile(r"HOLDFAST_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


class HelpAll(argparse.Action):
    """Shows the help of a parser that `fill` has given all its flags."""

    def __init__(self, *args: Any, fill: Callable[[argparse.ArgumentParser], None], **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"nargs": 0}))
        self._fill = fill

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        full = argparse.ArgumentParser(prog=parser.prog, usage=parser.usage, description=parser.description)
        full.epilog = parser.epilog
        self._fill(full)
        full.print_help()
        parser.exit()


def shorten(parser: argparse.ArgumentParser) -> None:
    """Leave the flags out of the usage of every command that has many; its help has them anyway."""
    for command in _commands(parser).values():
        shorten(command)
    flags = [action for action in parser._actions if action.option_strings]
    if parser.usage is None and len(flags) > _FEW_FLAGS:
        words = [action for action in parser._actions if not action.option_strings]
        shown = [f"[{word.metavar or word.dest}]" if word.nargs == "?" else word.metavar or word.dest for word in words]
        parser.usage = " ".join(map(str, (parser.prog, *shown, "[OPTIONS]")))


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return found[0].choices if found else {}


def refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str]) -> NoReturn:
    """Exit with the usage of the command in `words` and a sentence about its first unknown argument."""
    for word in words:
        parser = _commands(parser).get(word, parser)
    flag = next((word for word in unknown if word.startswith("-")), unknown[0]).partition("=")[0]
    if not flag.startswith("-"):
        parser.error(f"unexpected argument {flag!r}")
    if "--sessions" in parser._option_string_actions and flag in _ANSWERS:
        parser.error(f"there is no flag {flag}: {_ANSWERS[flag]}")
    parser.error(f"there is no flag {flag}{_nearest(flag, parser._option_string_actions, '--')}")


def check_environment(environment: Mapping[str, str]) -> None:
    """ConfigError if there is a variable with our prefix that is none of ours."""
    for name, value in sorted(environment.items()):
        is_service = _SERVICE.fullmatch(name) or (name.endswith("_PORT") and "://" in value)
        if not name.startswith(ENVIRONMENT_PREFIX) or name in VARIABLES or is_service:
            continue
        answer = f": {NO_VARIABLES[name]}" if name in NO_VARIABLES else _nearest(name, VARIABLES, ENVIRONMENT_PREFIX)
        raise ConfigError(f"there is no environment variable {name}{answer or ': unset it'}")


def _nearest(name: str, known: Iterable[str], prefix: str) -> str:
    """The known name that is most like `name`, compared without what they all begin with."""
    words = {each.removeprefix(prefix): each for each in known}
    near = difflib.get_close_matches(name.removeprefix(prefix), list(words), n=1)
    return f"; did you mean {words[near[0]]}?" if near else ""


def is_agreed(question: str) -> bool:
    """The user's answer. Raises ConfigError where nobody can be asked."""
    if not sys.stdin.isatty():
        raise ConfigError("stdin is not a terminal; pass --yes to confirm")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def own_command() -> str:
    """The command that runs this program here."""
    if sys.argv[0].endswith(".py"):
        return f"{shlex.quote(sys.executable)} -m holdfast.cli"
    found = shutil.which("holdfast")  # which may be another program of that name
    is_this = found and Path(found).resolve() == Path(sys.argv[0]).resolve()
    return "holdfast" if is_this else shlex.quote(sys.argv[0])
