/** The example and the TypeScript of docs/grpc.md, as a reader runs them: compiled against the built package. */
import { execFile } from "node:child_process";
import { existsSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { beforeAll, describe, expect, test } from "vitest";

const run = promisify(execFile);
const root = fileURLToPath(new URL("..", import.meta.url));
const guide = join(root, "../../docs/grpc.md");
const folder = join(root, "dist/documents");
const address = process.env.HOLDFAST_CONFORMANCE_SERVER;
const isRequired = process.env.HOLDFAST_REQUIRE_CONFORMANCE === "1";

const text = existsSync(guide) ? readFileSync(guide, "utf8") : "";
const blocks = [...text.matchAll(/^```ts\n(.*?)^```$/gms)].map((found) => found[1] as string);

describe.skipIf(!address && !isRequired)("documents", { timeout: 120_000 }, () => {
  beforeAll(async () => {
    await run("npm", ["run", "--silent", "build"], { cwd: root });
    mkdirSync(folder, { recursive: true });
    blocks.forEach((block, index) => {
      writeFileSync(join(folder, `block${index}.ts`), block.replaceAll("127.0.0.1:50051", address ?? "nowhere:0"));
    });
    const config = {
      extends: "../../tsconfig.example.json",
      compilerOptions: { rootDir: ".", outDir: "." },
      include: ["*.ts"],
      exclude: [], // by default what lies in outDir is
    };
    writeFileSync(join(folder, "tsconfig.json"), JSON.stringify(config));
    await run("npx", ["tsc", "-p", folder], { cwd: root });
    await run("npx", ["tsc", "-p", "tsconfig.example.json"], { cwd: root });
  }, 120_000);

  test("the guide has TypeScript in it", () => {
    expect(blocks.length).toBeGreaterThan(2);
  });

  test.each(blocks.map((block, index) => ({ block, index })))("block $index of the guide runs", async ({ index }) => {
    const { stdout } = await run("node", [join(folder, `block${index}.js`)]);
    expect(stdout.trim()).not.toBe("");
  });

  test("the example answers every line with tokens", async () => {
    const child = run("node", [join(root, "dist/examples/chat-loop.js"), address as string, "4"]);
    child.child.stdin?.end("1 9690 198\n2 198 1\n");
    const { stdout, stderr } = await child;
    expect(stdout).toMatch(/^(\d+ )+\n(\d+ )+\n$/);
    expect(stderr).toMatch(/tokens so far/);
  });
});
