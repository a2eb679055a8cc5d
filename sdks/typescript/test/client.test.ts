import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { Cancelled, DeadlineExceeded, HoldfastError } from "../src/index.js";
import { connected, failureOf, gathered } from "./fixture.js";
import { left } from "./server.js";

test("createSession sends what it was given, and knows what it was answered", async () => {
  let request: unknown;
  const client = await connected({
    createSession: (received) => {
      request = received;
      return {
        sessionId: "s",
        sink: 4,
        recent: 64,
        kvReservedBytes: 2n ** 40n,
        modelFingerprint: "f",
        historyLength: 1n,
      };
    },
  });
  const metadata = { who: "me" };
  const session = await client.createSession({ label: "l", tokenIds: [9], pinTokens: 1, eosTokenIds: [2], metadata });
  expect(request).toMatchObject({ clientLabel: "l", tokenIds: [9], pinTokens: 1, eosTokenIds: [2], metadata });
  const facts = { sink: 4, recent: 64, kvReservedBytes: 2 ** 40, modelFingerprint: "f" };
  expect(session).toMatchObject({ id: "s", historyLength: 1, ...facts });
});

test("bytes that the server cannot count are absent, not 0", async () => {
  const client = await connected({ createSession: () => ({ sessionId: "s" }), getSessionInfo: () => ({}) });
  const session = await client.createSession();
  expect(session.kvReservedBytes).toBeUndefined();
  expect((await session.info()).kvLiveBytes).toBeUndefined();
});

test("listSessions fetches every page, as it is needed", async () => {
  const requests: unknown[] = [];
  const client = await connected({
    listSessions: (request) => {
      requests.push(request);
      const page = Number(request.pageToken || "0");
      const sessions = [
        { sessionId: `${page}a`, state: 1 },
        { sessionId: `${page}b`, state: 99 as 1 },
      ];
      return { sessions, nextPageToken: page < 2 ? String(page + 1) : "" };
    },
  });
  const listing = client.listSessions({ label: "l", state: "LIVE", pageSize: 2 });
  expect((await listing.next()).value).toMatchObject({ sessionId: "0a", state: "LIVE" });
  expect(requests).toHaveLength(1);
  const rest = await gathered(listing);
  expect(rest.map((each) => each.sessionId)).toEqual(["0b", "1a", "1b", "2a", "2b"]);
  expect(rest[0]?.state).toBe("UNSPECIFIED");
  expect(requests).toMatchObject(
    ["", "1", "2"].map((pageToken) => ({ pageToken, clientLabel: "l", state: 1, pageSize: 2 })),
  );
});

test("modelInfo is a plain object", async () => {
  const client = await connected({ getModelInfo: () => ({ name: "m", eosTokenIds: [2], contextLength: 8192 }) });
  expect(await client.modelInfo()).toEqual({
    name: "m",
    fingerprint: "",
    vocabularySize: 0,
    eosTokenIds: [2],
    tokenizerHash: "",
    chatTemplateHash: "",
    sink: 0,
    recent: 0,
    maxPinTokens: 0,
    contextLength: 8192,
  });
});

test("a length that a number cannot hold is refused", async () => {
  const client = await connected({ getSessionInfo: () => ({ historyLength: 2n ** 53n }) });
  const error = await failureOf(client.session("s").info());
  expect(error).toBeInstanceOf(HoldfastError);
  expect(error).toMatchObject({ grpcStatus: status.OUT_OF_RANGE });
});

test.each([2 ** 53, 1.5, Number.NaN])("position %d is refused before anything is sent", async (position) => {
  const client = await connected({});
  expect(await failureOf(client.session("s").rewind(position))).toMatchObject({ code: "invalid_argument" });
});

test("unary calls have the client's time limit, or their own; streams have none", async () => {
  const deadlines: unknown[] = [];
  const client = await connected(
    {
      getModelInfo: async (_, { signal, deadline }) => {
        deadlines.push(deadline);
        await left(signal);
        return {};
      },
      exportSession: async function* (_, { deadline }) {
        deadlines.push(deadline);
        yield {};
      },
    },
    { timeoutMs: 150 },
  );
  expect(await failureOf(client.modelInfo())).toBeInstanceOf(DeadlineExceeded);
  expect(await failureOf(client.modelInfo({ timeoutMs: 50 }))).toBeInstanceOf(DeadlineExceeded);
  await gathered(client.session("s").export());
  expect(deadlines.at(-1)).toBe(Number.POSITIVE_INFINITY);
});

test("a signal stops a unary call", async () => {
  const controller = new AbortController();
  const client = await connected({
    getModelInfo: async (_, { signal }) => {
      controller.abort("why");
      await left(signal);
      return {};
    },
  });
  const error = await failureOf(client.modelInfo({ signal: controller.signal }));
  expect(error).toBeInstanceOf(Cancelled);
  expect(error).toMatchObject({ cause: "why" });
});

test("close() cancels what is running and refuses what comes later", async () => {
  const client = await connected({
    getModelInfo: async (_, { signal }) => {
      client.close();
      await left(signal);
      return {};
    },
  });
  expect(await failureOf(client.modelInfo())).toMatchObject({ code: "cancelled", message: "the client is closed" });
  expect(await failureOf(client.modelInfo())).toBeInstanceOf(Cancelled);
  expect(await failureOf(client.session("s").generate({ maxTokens: 1 }).done)).toBeInstanceOf(Cancelled);
});
