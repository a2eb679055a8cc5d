import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { InvalidArgument, SessionNotFound } from "../src/index.js";
import { done } from "./events.js";
import { connected, failureOf, gathered } from "./fixture.js";
import { left, Refusal } from "./server.js";

test("turn sends tokens and sampling options in one call", async () => {
  let request: unknown;
  const client = await connected({
    turn: async function* (received) {
      request = received;
      yield done({ historyLength: 7n });
    },
  });
  const session = client.session("s");
  await session.turn(new Int32Array([1, 2]), {
    maxTokens: 5,
    expectedHistoryLength: 3,
    seed: 2n ** 63n,
    temperature: 0,
    topP: 0.5,
    topK: 7,
    minP: 0.25,
    presencePenalty: 1,
    frequencyPenalty: 2,
    repetitionPenalty: 1.5,
    logitBias: { 11: -1 },
    stopTokenIds: new Set([8]),
    topLogprobs: 2,
    speculation: false,
  }).done;
  expect(request).toMatchObject({
    sessionId: "s",
    tokenIds: [1, 2],
    maxTokens: 5,
    expectedHistoryLength: 3n,
    sampling: {
      seed: 2n ** 63n,
      temperature: 0,
      topP: 0.5,
      topK: 7,
      minP: 0.25,
      presencePenalty: 1,
      frequencyPenalty: 2,
      repetitionPenalty: 1.5,
      logitBias: { 11: -1 },
      stopTokenIds: [8],
      topLogprobs: 2,
      speculation: false,
    },
  });
  expect(session.historyLength).toBe(7);
});

test("options that were not given are not sent", async () => {
  let sampling: object | undefined;
  const client = await connected({
    generate: async function* (request) {
      sampling = request.sampling;
      yield done();
    },
  });
  await client.session("s").generate({ maxTokens: 1 }).done;
  expect(sampling).not.toHaveProperty("seed", expect.anything());
  expect(sampling).not.toHaveProperty("temperature", expect.anything());
  expect(sampling).not.toHaveProperty("speculation", expect.anything());
});

test("fork gives a session of its own", async () => {
  let request: unknown;
  const client = await connected({
    forkSession: (received) => {
      request = received;
      return { sessionId: "child", historyLength: 3n, recomputedTokens: 1n };
    },
  });
  const child = await client.session("s").fork({ atPosition: 3, label: "try" });
  expect(request).toMatchObject({ sessionId: "s", atPosition: 3n, clientLabel: "try" });
  expect(child).toMatchObject({ id: "child", historyLength: 3, recomputedTokens: 1 });
});

test("history comes in chunks", async () => {
  let request: unknown;
  const client = await connected({
    getHistory: async function* (received) {
      request = received;
      yield { fromPosition: 2n, kind: 1, tokenIds: [5, 6] };
      yield { fromPosition: 4n, kind: 2, tokenIds: [7], logprobs: [-1], samplingLogprobs: [-2], stopReason: 1 };
    },
  });
  const chunks = await gathered(client.session("s").history({ from: 2, to: 5 }));
  expect(request).toMatchObject({ fromPosition: 2n, toPosition: 5n });
  expect(chunks).toEqual([
    { from: 2, kind: "GIVEN", tokenIds: [5, 6], logprobs: [], samplingLogprobs: [], stopReason: undefined },
    { from: 4, kind: "SAMPLED", tokenIds: [7], logprobs: [-1], samplingLogprobs: [-2], stopReason: "MAX_TOKENS" },
  ]);
});

test("leaving a history early cancels it on the server", async () => {
  const server = new AbortController();
  const client = await connected({
    getHistory: async function* (_, { signal }) {
      yield { tokenIds: [1] };
      await left(signal);
      server.abort();
    },
  });
  for await (const _ of client.session("s").history()) break;
  await left(server.signal);
});

test("a token id that is no integer is refused before anything is sent", async () => {
  const client = await connected({});
  const appending = client.session("s").append([1.5], { expectedHistoryLength: 0 });
  expect(await failureOf(appending)).toBeInstanceOf(InvalidArgument);
});

test("a session that is already closed is disposed of in silence", async () => {
  let closes = 0;
  const client = await connected({
    createSession: () => ({ sessionId: "s" }),
    closeSession: () => {
      if (closes++ > 0) throw new Refusal(status.NOT_FOUND, "session_not_found", { detail: "closed" });
      return { finalHistoryLength: 7n };
    },
  });
  {
    await using session = await client.createSession();
    expect(await session.close()).toEqual({ finalHistoryLength: 7 });
  }
  expect(closes).toBe(2);
  expect(await failureOf(client.session("s").close())).toBeInstanceOf(SessionNotFound);
});
