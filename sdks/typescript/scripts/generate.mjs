// Writes src/gen from the contract. PROTOC_PYTHON names a Python that has grpcio-tools (default: python3).
import { spawnSync } from "node:child_process";
import { mkdirSync, readFileSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const root = dirname(dirname(fileURLToPath(import.meta.url)));
const python = process.env.PROTOC_PYTHON || "python3";
const wanted = JSON.parse(readFileSync(join(root, "package.json"), "utf8")).config.protoc;

/** What protoc printed; ends the process with a sentence where it failed. */
function protoc(...args) {
  const ran = spawnSync(python, ["-m", "grpc_tools.protoc", ...args], { cwd: root, encoding: "utf8" });
  if (ran.error || ran.status !== 0) {
    console.error(ran.error?.message ?? ran.stderr);
    console.error("generate: set PROTOC_PYTHON to a Python that has grpcio-tools.");
    process.exit(1);
  }
  return ran.stdout.trim();
}

const found = protoc("--version").split(" ").at(-1);
if (found !== wanted) {
  console.error(`generate: package.json pins protoc ${wanted} (config.protoc), but ${python} has ${found}.`);
  process.exit(1);
}

const plugin = join("node_modules", ".bin", process.platform === "win32" ? "protoc-gen-es.cmd" : "protoc-gen-es");
rmSync(join(root, "src/gen"), { recursive: true, force: true });
mkdirSync(join(root, "src/gen"), { recursive: true });
protoc(
  "-I../../proto",
  "-Iproto",
  `--plugin=protoc-gen-es=${plugin}`,
  "--es_out=src/gen",
  "--es_opt=target=ts,import_extension=js",
  "holdfast/v1/runtime.proto",
  "google/rpc/status.proto",
  "google/rpc/error_details.proto",
);
