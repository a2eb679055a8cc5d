"""What the programs share: the model and task of the run, and the tool that agents have. Only the standard library."""

import os
import subprocess
import sys

MODEL = os.environ["OPENAI_MODEL"]
VARIANT, TASK = sys.argv[1], sys.argv[2]
INSTRUCTIONS = "You work in the current directory. Use the tools, one step after the other, until the task is done."
MAX_STEPS = 40


def bash(command: str) -> str:
    """Run a shell command and return what it prints.

    Args:
        command: The command, for bash.
    """
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return (done.stdout + done.stderr)[:4000] or f"exit code {done.returncode}"


SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": "The command, for bash."}},
    "required": ["command"],
    "additionalProperties": False,
}
DESCRIPTION = "Run a shell command and return what it prints."
