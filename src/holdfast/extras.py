"""How to install an optional part of Holdfast: our packages are on no package index, so the command names files."""

import importlib.util
import json
import shlex
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

DISTRIBUTION = "holdfast-llm"
HOW_TO_BUILD = "install a C++ compiler, then install Holdfast from its checkout again"  # the native engine
_NEED_SDK = ("bench", "client")
_ROOT = Path(__file__).parents[2]  # of the checkout, if this is one


def how_to_install(extra: str) -> str:
    """A sentence with the command that adds `extra` to this installation."""
    origin = _origin()
    if origin is None:
        packages = [f"'{DISTRIBUTION}[{extra}]'"]
    elif origin.suffix == ".whl":
        folder = f"{origin.parent}/" if origin.is_file() else "./"
        packages = [shlex.quote(f"{folder}{origin.name}[{extra}]"), f"{shlex.quote(folder)}holdfast_llm_sdk-*.whl"]
    else:
        packages = [f"-e {shlex.quote(f'{origin}[{extra}]')}", f"-e {shlex.quote(f'{origin}/sdks/python')}"]
    needed = packages if extra in _NEED_SDK else packages[:1]
    python = shlex.quote(sys.executable)
    install = f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"
    return f"to install it, run: {install} {' '.join(needed)}"


def _origin() -> Path | None:
    """The checkout or the wheel file that this was installed from. None if it came from a package index."""
    if (_ROOT / "pyproject.toml").is_file():
        return _ROOT
    try:
        url = json.loads(metadata.distribution(DISTRIBUTION).read_text("direct_url.json") or "{}").get("url", "")
    except metadata.PackageNotFoundError:
        return None
    return Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
