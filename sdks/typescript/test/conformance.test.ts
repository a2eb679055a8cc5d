/** Every scenario of ../conformance against the server that HOLDFAST_CONFORMANCE_SERVER names. */
import { existsSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { describe, expect, test } from "vitest";
import { run } from "./conformance/runner.js";
import { scenariosIn } from "./conformance/scenario.js";
import { clientOf } from "./fixture.js";

const folder = fileURLToPath(new URL("../../conformance/scenarios", import.meta.url));
const address = process.env.HOLDFAST_CONFORMANCE_SERVER;
const isRequired = process.env.HOLDFAST_REQUIRE_CONFORMANCE === "1";
const scenarios = existsSync(folder) ? scenariosIn(folder) : [];

describe.skipIf(!address && !isRequired)("conformance", () => {
  test("has a server and scenarios to run", () => {
    if (!address) {
      expect.fail("HOLDFAST_REQUIRE_CONFORMANCE=1, but HOLDFAST_CONFORMANCE_SERVER names no server (127.0.0.1:PORT).");
    }
    expect(scenarios.length, `no scenarios in ${folder}`).toBeGreaterThan(0);
  });

  test.runIf(address).each(scenarios)("%s", { timeout: 120_000 }, async (_, scenario) => {
    await run(clientOf(address as string), scenario);
  });
});
