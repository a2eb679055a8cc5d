import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { Cancelled, ConnectionFailed, Draining, HistoryConflict, JournalFailed } from "../src/index.js";
import { clientOf, connected, connectedByWire, failureOf, serving } from "./fixture.js";
import { type Handlers, Refusal } from "./server.js";

const gone = () => new Refusal(status.UNAVAILABLE);
const draining = () => new Refusal(status.UNAVAILABLE, "draining");

/** Handlers of a session with a real history, in which `before` and `after` may disturb an append. */
function history(disturb: { before?: (attempt: number) => void; after?: (attempt: number) => void } = {}) {
  const ids: number[] = [];
  const seen: { expected: bigint | undefined; attempts: number } = { expected: undefined, attempts: 0 };
  const handlers: Handlers = {
    appendTokens: ({ tokenIds, expectedHistoryLength }) => {
      const attempt = ++seen.attempts;
      seen.expected = expectedHistoryLength;
      disturb.before?.(attempt);
      if (expectedHistoryLength !== BigInt(ids.length)) {
        throw new Refusal(status.ABORTED, "history_conflict", { history_length: String(ids.length) });
      }
      ids.push(...tokenIds);
      disturb.after?.(attempt);
      return { historyLength: BigInt(ids.length), prefilledTokens: BigInt(tokenIds.length) };
    },
    getSessionInfo: () => ({ historyLength: BigInt(ids.length) }),
  };
  return { handlers, ids, seen };
}

const failFirst = (error: () => Error) => (attempt: number) => {
  if (attempt === 1) throw error();
};

test.each([
  ["the server is not available", gone],
  ["the server is draining", draining],
])("append is sent again when %s", async (_, error) => {
  const { handlers, ids, seen } = history({ before: failFirst(error) });
  const client = await connected(handlers);
  expect(await client.session("s").append([1, 2])).toMatchObject({ historyLength: 2, prefilledTokens: 2 });
  expect(ids).toEqual([1, 2]);
  expect(seen.attempts).toBe(2);
});

test("append whose answer was lost is not added twice", async () => {
  const { handlers, ids, seen } = history({ after: (attempt) => attempt === 1 && wire[1].cut() });
  const wire = await connectedByWire(handlers);
  const session = wire[0].session("s");
  expect(await session.append([1, 2, 3])).toEqual({ historyLength: 3 });
  expect(ids).toEqual([1, 2, 3]);
  expect(seen).toEqual({ attempts: 2, expected: 0n });
  expect(await session.append([4])).toMatchObject({ historyLength: 4 });
});

test("append waits for its own lost attempt to let go of the session", async () => {
  const { handlers, ids, seen } = history({
    before: (attempt) => {
      if (attempt === 2) throw new Refusal(status.ABORTED, "session_busy");
    },
    after: (attempt) => attempt === 1 && wire[1].cut(),
  });
  const wire = await connectedByWire(handlers);
  expect(await wire[0].session("s").append([1])).toEqual({ historyLength: 1 });
  expect(ids).toEqual([1]);
  expect(seen.attempts).toBe(3);
});

test("a conflict on the first attempt is a conflict, whatever its length", async () => {
  const { handlers, ids } = history();
  ids.push(9, 9);
  const client = await connected(handlers);
  const error = await failureOf(client.session("s").append([1, 2], { expectedHistoryLength: 0 }));
  expect(error).toBeInstanceOf(HistoryConflict);
  expect(error).toMatchObject({ details: { history_length: "2" } });
});

test("a conflict with another length after a lost answer is a conflict", async () => {
  const { handlers, ids } = history({
    after: (attempt) => {
      if (attempt === 1) ids.push(7);
      if (attempt === 1) wire[1].cut();
    },
  });
  const wire = await connectedByWire(handlers);
  expect(await failureOf(wire[0].session("s").append([1, 2]))).toBeInstanceOf(HistoryConflict);
});

test("append is not sent again on the server's own failures", async () => {
  const { handlers, seen } = history({ before: failFirst(() => new Refusal(status.UNAVAILABLE, "journal_failed")) });
  const client = await connected(handlers);
  expect(await failureOf(client.session("s").append([1]))).toBeInstanceOf(JournalFailed);
  expect(seen.attempts).toBe(1);
});

test("append gives up after as many retries as were allowed", async () => {
  const { handlers, seen } = history({
    before: () => {
      throw draining();
    },
  });
  const client = await connected(handlers, { retries: 1 });
  expect(await failureOf(client.session("s").append([1]))).toBeInstanceOf(Draining);
  expect(seen.attempts).toBe(2);
});

test("append finds a server that comes back on the same port", async () => {
  const first = await serving({});
  first.close();
  const client = clientOf(first.address, { retries: 8 });
  const appending = client.session("s").append([1], { expectedHistoryLength: 0 });
  expect(await failureOf(clientOf(first.address, { retries: 0 }).modelInfo())).toBeInstanceOf(ConnectionFailed);
  await serving(history().handlers, { port: first.port });
  expect(await appending).toMatchObject({ historyLength: 1 });
});

test("a signal ends the wait for the next attempt", async () => {
  const controller = new AbortController();
  const { handlers } = history({
    before: () => {
      setTimeout(() => controller.abort(), 20);
      throw draining();
    },
  });
  const client = await connected(handlers, { retries: 50 });
  const error = await failureOf(client.session("s").append([1], { signal: controller.signal }));
  expect(error).toBeInstanceOf(Cancelled);
});

test("the time limit ends the retries", async () => {
  const { handlers, seen } = history({
    before: () => {
      throw draining();
    },
  });
  const client = await connected(handlers, { retries: 50 });
  const error = await failureOf(client.session("s").append([1], { timeoutMs: 300 }));
  expect(error).toBeInstanceOf(Draining);
  expect(seen.attempts).toBeLessThan(5);
});

test("append that a draining server had taken is not sent twice", async () => {
  const { handlers, ids } = history({ after: failFirst(draining) });
  const client = await connected(handlers);
  expect((await client.session("s").append([1, 2])).historyLength).toBe(2);
  expect(ids).toEqual([1, 2]);
});
