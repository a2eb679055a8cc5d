import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { ConnectionFailed, Draining } from "../src/index.js";
import { pauseMs } from "../src/retry.js";
import { done, token } from "./events.js";
import { connected, connectedByWire, failureOf, gathered } from "./fixture.js";
import { left, Refusal } from "./server.js";

const gone = () => new Refusal(status.UNAVAILABLE);
const draining = () => new Refusal(status.UNAVAILABLE, "draining");

test("reading calls are sent again", async () => {
  let failures = 0;
  const failOnce = <T>(answer: T): T => {
    if (failures++ % 2 === 0) throw gone();
    return answer;
  };
  const client = await connected({
    getModelInfo: () => failOnce({ name: "m" }),
    getSessionInfo: () => failOnce({}),
    listSessions: () => failOnce({ sessions: [{}] }),
    getHistory: async function* () {
      yield failOnce({});
    },
  });
  expect((await client.modelInfo()).name).toBe("m");
  await client.session("s").info();
  expect(await gathered(client.listSessions())).toHaveLength(1);
  expect(await gathered(client.session("s").history())).toHaveLength(1);
  expect(failures).toBe(8);
});

test("a history that broke off is not begun again", async () => {
  let calls = 0;
  const client = await connected({
    getHistory: async function* () {
      calls++;
      yield {};
      throw gone();
    },
  });
  expect(await failureOf(gathered(client.session("s").history()))).toBeInstanceOf(ConnectionFailed);
  expect(calls).toBe(1);
});

test("calls that are not safe to repeat are sent once", async () => {
  const calls: string[] = [];
  const refuse = (name: string) => () => {
    calls.push(name);
    throw draining();
  };
  const client = await connected({
    createSession: refuse("create"),
    forkSession: refuse("fork"),
    rewindSession: refuse("rewind"),
    closeSession: refuse("close"),
    generate: refuse("generate"),
    turn: refuse("turn"),
    exportSession: refuse("export"),
    importSession: refuse("import"),
  });
  const session = client.session("s");
  for (const attempt of [
    () => client.createSession(),
    () => session.fork(),
    () => session.rewind(0),
    () => session.close(),
    () => session.generate({ maxTokens: 1 }).done,
    () => session.turn([1], { maxTokens: 1 }).done,
    () => gathered(session.export()),
    () => client.importSession([]),
  ]) {
    expect(await failureOf(attempt())).toBeInstanceOf(Draining);
  }
  expect(calls).toEqual(["create", "fork", "rewind", "close", "generate", "turn", "export", "import"]);
});

test("a generation whose connection is lost is not begun again", async () => {
  let calls = 0;
  const [client, wire] = await connectedByWire({
    generate: async function* (_, { signal }) {
      calls++;
      yield token(1);
      await left(signal);
      yield done();
    },
  });
  const generation = client.session("s").generate({ maxTokens: 9 });
  const reading = async () => {
    for await (const _ of generation) wire.cut();
  };
  expect(await failureOf(reading())).toBeInstanceOf(ConnectionFailed);
  expect(calls).toBe(1);
});

test("pauses double, with jitter, up to five seconds", () => {
  expect([0, 1, 2].map((attempt) => pauseMs(attempt, undefined, 1))).toEqual([200, 400, 800]);
  expect(pauseMs(0, undefined, 0)).toBe(100);
  expect(pauseMs(30, undefined, 1)).toBe(5_000);
});
