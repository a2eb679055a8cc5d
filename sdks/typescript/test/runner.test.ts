/** The conformance runner itself, against sessions in memory: it passes what is right and fails what is not. */
import { fileURLToPath } from "node:url";
import { expect, test } from "vitest";
import { run } from "./conformance/runner.js";
import { countingRuntime } from "./conformance/runtime.js";
import { type Step, scenariosIn } from "./conformance/scenario.js";
import { connected } from "./fixture.js";

const scenarios = scenariosIn(fileURLToPath(new URL("conformance/scenarios", import.meta.url)));

test.each(scenarios)("%s passes", async (_, scenario) => {
  await run(await connected(countingRuntime()), scenario);
});

const create: Step = { call: "create_session", as: "a", with: { token_ids: [10] } };

test.each<[string, Step]>([
  ["another value", { call: "info", session: "a", expect: { history_length: 2 } }],
  ["a field that is not there", { call: "info", session: "a", expect: { no_such_field: 1 } }],
  ["an error that does not come", { call: "info", session: "a", error: "session_busy" }],
  ["another error", { call: "info", session_id: "x", error: "session_busy" }],
  ["other details", { call: "info", session_id: "x", error: "session_not_found", details: { detail: "closed" } }],
  ["an error that was not expected", { call: "info", session_id: "x" }],
  ["other tokens", { call: "history", session: "a", expect: { same_tokens_as: "nothing" } }],
  ["a longer history", { call: "history", session: "a", expect: { min_length: 2 } }],
  ["a call that does not exist", { call: "dance", session: "a" }],
])("%s fails the scenario", async (_, step) => {
  const client = await connected(countingRuntime());
  await expect(run(client, { name: "wrong", why: "", steps: [create, step] })).rejects.toThrow();
});

test("a scenario's sessions are closed whatever happens", async () => {
  const client = await connected(countingRuntime());
  const steps = [create, { call: "dance", session: "a" }];
  await expect(run(client, { name: "wrong", why: "", steps })).rejects.toThrow("dance");
  expect((await client.listSessions().next()).done).toBe(true);
});
