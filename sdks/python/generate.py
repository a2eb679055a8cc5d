"""Makes the protobuf and gRPC stubs of a package from proto/holdfast/v1/runtime.proto.

    python generate.py            write this SDK's stubs
    python generate.py --check    fail unless they are up to date
    python generate.py --out DIR  the same for another package's folder

Inside the descriptor the file keeps its one name, holdfast/v1/runtime.proto: the stubs of a client and of a server
may then live in one process. Needs grpcio-tools, in the version that pyproject.toml names.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
PROTO_ROOT = HERE.parents[1] / "proto"
PROTO = "holdfast/v1/runtime.proto"
DEFAULT_OUT = HERE / "src" / "holdfast_sdk" / "gen"

PROTOC_IMPORT = "from holdfast.v1 import runtime_pb2 as holdfast_dot_v1_dot_runtime__pb2"
RELATIVE_IMPORT = "from . import runtime_pb2 as holdfast_dot_v1_dot_runtime__pb2"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the gRPC stubs from the proto.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the folder of the stubs (default: this SDK's)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the stubs differ")
    options = parser.parse_args(arguments)
    made = make_stubs()
    if not options.check:
        write(made, options.out)
        return 0
    if differing := compare(made, options.out):
        rerun = "python sdks/python/generate.py" + ("" if options.out == DEFAULT_OUT else f" --out {options.out}")
        print(f"the stubs differ from {PROTO} in {', '.join(differing)}; make them again: {rerun}", file=sys.stderr)
        return 1
    return 0


def make_stubs() -> dict[str, str]:
    """The text of every generated file, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"--proto_path={PROTO_ROOT}", *outputs, PROTO]) != 0:
            raise SystemExit(f"protoc refused {PROTO}; its message is above")
        made = {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).rglob("*.py*"))}
    made["__init__.py"] = f'"""Made by generate.py from {PROTO}; not edited by hand."""\n'
    service = made["runtime_pb2_grpc.py"]
    if service.count(PROTOC_IMPORT) != 1:
        raise SystemExit("this protoc writes its imports in another way; adapt PROTOC_IMPORT in generate.py")
    made["runtime_pb2_grpc.py"] = service.replace(PROTOC_IMPORT, RELATIVE_IMPORT)
    return made


def write(made: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, text in made.items():
        (out / name).write_text(text, encoding="utf-8")


def compare(made: dict[str, str], out: Path) -> list[str]:
    """The names of files that are missing, differ, or should not be there."""
    found = {path.name: path.read_text(encoding="utf-8") for path in out.glob("*.py*")} if out.is_dir() else {}
    return sorted(name for name in made.keys() | found.keys() if made.get(name) != found.get(name))


if __name__ == "__main__":
    sys.exit(main())
