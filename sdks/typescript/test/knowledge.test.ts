import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { Cancelled, type Generation, HistoryConflict, SessionBusy } from "../src/index.js";
import { done, token } from "./events.js";
import { connected, failureOf } from "./fixture.js";
import { left, Refusal } from "./server.js";

test("append expects the length of the last answer", async () => {
  const expected: (bigint | undefined)[] = [];
  const client = await connected({
    createSession: ({ tokenIds }) => ({ sessionId: "s", historyLength: BigInt(tokenIds.length) }),
    appendTokens: (request) => {
      expected.push(request.expectedHistoryLength);
      return { historyLength: 5n };
    },
    generate: async function* () {
      yield done({ historyLength: 8n });
    },
    rewindSession: ({ toPosition }) => ({ historyLength: toPosition, recomputedTokens: 2n }),
    getSessionInfo: () => ({ historyLength: 40n }),
  });
  const session = await client.createSession({ tokenIds: [1, 2, 3] });
  await session.append([4, 5]);
  await session.append([6]);
  await session.generate({ maxTokens: 3 }).done;
  await session.append([7]);
  expect(await session.rewind(2)).toEqual({ historyLength: 2, recomputedTokens: 2 });
  await session.append([8]);
  await session.info();
  await session.append([9]);
  await session.append([10], { expectedHistoryLength: 99 });
  expect(expected).toEqual([3n, 5n, 8n, 2n, 40n, 99n]);
});

test("a handle that knows nothing asks before it appends", async () => {
  const expected: (bigint | undefined)[] = [];
  const client = await connected({
    getSessionInfo: () => ({ historyLength: 12n }),
    appendTokens: (request) => {
      expected.push(request.expectedHistoryLength);
      return { historyLength: 13n };
    },
  });
  const session = client.session("s");
  expect(session.historyLength).toBeUndefined();
  await session.append([1]);
  expect(expected).toEqual([12n]);
  expect(session.historyLength).toBe(13);
});

test.each([
  [
    "the loop",
    async (generation: Generation) => {
      for await (const _ of generation) break;
    },
  ],
  [
    "cancel()",
    async (generation: Generation) => {
      await generation[Symbol.asyncIterator]().next();
      generation.cancel();
    },
  ],
])("what follows a generation that was left by %s waits until the server let go of it", async (_, leave) => {
  let looks = 0;
  const expected: (bigint | undefined)[] = [];
  const client = await connected({
    generate: async function* (_, { signal }) {
      yield token(1);
      await left(signal);
    },
    getSessionInfo: () => ({ busy: ++looks < 3, historyLength: BigInt(10 + looks) }),
    appendTokens: (request) => {
      expected.push(request.expectedHistoryLength);
      return { historyLength: 99n };
    },
  });
  const session = client.session("s");
  await leave(session.generate({ maxTokens: 9 }));
  await session.append([1]);
  expect(looks).toBe(3);
  expect(expected).toEqual([13n]);
});

test("a generation that was refused changes nothing that the handle knows", async () => {
  let looks = 0;
  const client = await connected({
    createSession: () => ({ sessionId: "s", historyLength: 4n }),
    generate: () => {
      throw new Refusal(status.ABORTED, "session_busy");
    },
    getSessionInfo: () => ({ historyLength: BigInt(++looks) }),
    appendTokens: ({ expectedHistoryLength }) => ({ historyLength: expectedHistoryLength }),
  });
  const session = await client.createSession();
  expect(await failureOf(session.generate({ maxTokens: 1 }).done)).toBeInstanceOf(SessionBusy);
  await session.append([1]);
  expect(session.historyLength).toBe(4);
  expect(looks).toBe(0);
});

test("tokens of a turn that was left before its first event are not appended a second time", async () => {
  let length = 4n;
  const controller = new AbortController();
  const client = await connected({
    createSession: () => ({ sessionId: "s", historyLength: length }),
    // biome-ignore lint/correctness/useYield: it never comes to its first event
    turn: async function* ({ tokenIds }, { signal }) {
      length += BigInt(tokenIds.length);
      controller.abort();
      await left(signal);
    },
    getSessionInfo: () => ({ historyLength: length }),
    appendTokens: ({ expectedHistoryLength }) => {
      if (expectedHistoryLength === length) return { historyLength: length };
      throw new Refusal(status.ABORTED, "history_conflict", { history_length: String(length) });
    },
  });
  const session = await client.createSession();
  const turn = session.turn([1, 2], { maxTokens: 1, signal: controller.signal });
  expect(await failureOf(turn.done)).toBeInstanceOf(Cancelled);
  expect(await failureOf(session.append([1, 2]))).toBeInstanceOf(HistoryConflict);
  await session.info();
  expect(await session.append([])).toMatchObject({ historyLength: 6 });
});

test("a generation that broke off makes the next append ask", async () => {
  const expected: (bigint | undefined)[] = [];
  const client = await connected({
    createSession: () => ({ sessionId: "s", historyLength: 4n }),
    generate: async function* () {
      yield token(1);
      throw new Refusal(status.UNAVAILABLE, "upstream_aborted");
    },
    getSessionInfo: () => ({ historyLength: 5n }),
    appendTokens: (request) => {
      expected.push(request.expectedHistoryLength);
      return { historyLength: 6n };
    },
  });
  const session = await client.createSession();
  await failureOf(session.generate({ maxTokens: 9 }).done);
  expect(session.historyLength).toBeUndefined();
  await session.append([1]);
  expect(expected).toEqual([5n]);
});

test("a conflict is not forgotten by trying again", async () => {
  const client = await connected({
    createSession: () => ({ sessionId: "s", historyLength: 4n }),
    getSessionInfo: () => ({ historyLength: 9n }),
    appendTokens: ({ expectedHistoryLength }) => {
      if (expectedHistoryLength === 9n) return { historyLength: 10n };
      throw new Refusal(status.ABORTED, "history_conflict", { history_length: "9" });
    },
  });
  const session = await client.createSession();
  expect(await failureOf(session.append([1]))).toBeInstanceOf(HistoryConflict);
  expect(await failureOf(session.append([1]))).toBeInstanceOf(HistoryConflict);
  await session.info();
  expect(await session.append([1])).toMatchObject({ historyLength: 10 });
});
