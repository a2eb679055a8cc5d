import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { Cancelled, ConnectionFailed, DeadlineExceeded, InvalidArgument, SessionFailed } from "../src/index.js";
import { batch, done, type EventInit, token, truncated } from "./events.js";
import { connected, failureOf, gathered } from "./fixture.js";
import { left, Refusal } from "./server.js";

/** A session whose every generation is these events. */
async function sampling(...events: EventInit[]) {
  const client = await connected({
    generate: async function* () {
      yield* events;
    },
  });
  return client.session("s");
}

/** A session that samples for ever; `whenLeft` resolves once the server saw the client leave. */
async function endless() {
  let seen: () => void;
  const whenLeft = new Promise<void>((resolve) => {
    seen = resolve;
  });
  const client = await connected({
    generate: async function* (_, { signal }) {
      void left(signal).then(seen);
      yield token(0);
      yield token(1);
      await left(signal);
    },
  });
  return { session: client.session("s"), whenLeft };
}

test("tokens come one by one, with their logprobs", async () => {
  const session = await sampling(token(5), token(6), done());
  const tokens = await gathered(session.generate({ maxTokens: 2 }));
  expect(tokens).toEqual([
    { id: 5, logprob: -0.5, samplingLogprob: -0.25, top: [] },
    { id: 6, logprob: -0.5, samplingLogprob: -0.25, top: [] },
  ]);
});

test("tokens that come together are read one by one", async () => {
  const session = await sampling(token(5), batch(6, 7), truncated(4n, 5n), batch(8), done());
  const tokens = await gathered(session.generate({ maxTokens: 4 }));
  expect(tokens.map(({ id }) => id)).toEqual([5, 6, 7, 8]);
  expect(tokens[2]).toEqual({ id: 7, logprob: -0.5, samplingLogprob: -0.25, top: [] });
});

test("done carries the whole end, the seed as a bigint", async () => {
  const seed = 2n ** 64n - 1n;
  const session = await sampling(done({ stopReason: 2, generatedTokenCount: 1, seed, historyLength: 9n }));
  expect(await session.generate({ maxTokens: 1 }).done).toEqual({
    stopReason: "EOS",
    generatedTokenCount: 1,
    prefillTokens: 0,
    prefillDurationSeconds: 0,
    totalDurationSeconds: 0,
    acceptedDraftTokens: 0,
    proposedDraftTokens: 0,
    droppedTokenCount: 0,
    seed,
    historyLength: 9,
  });
});

test("done needs no reader, and tokens can be read late and again", async () => {
  const session = await sampling(token(5), token(6), done());
  const generation = session.generate({ maxTokens: 2 });
  await generation.done;
  expect(await gathered(generation)).toHaveLength(2);
  expect(await gathered(generation)).toHaveLength(2);
});

test("collect gives tokens, truncated ranges and the end", async () => {
  const session = await sampling(truncated(4n, 10n), token(5), done({ historyLength: 3n }));
  const generation = session.generate({ maxTokens: 1 });
  const all = await generation.collect();
  expect(all).toMatchObject({ tokenIds: [5], truncated: [{ from: 4, to: 10 }], done: { historyLength: 3 } });
  expect(generation.truncated).toEqual([{ from: 4, to: 10 }]);
});

test("leaving the loop early cancels on the server", async () => {
  const { session, whenLeft } = await endless();
  const generation = session.generate({ maxTokens: 100 });
  for await (const _ of generation) break;
  await whenLeft;
  expect(await failureOf(generation.done)).toBeInstanceOf(Cancelled);
});

test("an exception in the loop cancels on the server and is not replaced", async () => {
  const { session, whenLeft } = await endless();
  const reading = async () => {
    for await (const _ of session.generate({ maxTokens: 100 })) throw new Error("mine");
  };
  await expect(reading()).rejects.toThrow("mine");
  await whenLeft;
});

test("an AbortSignal cancels on the server and says why", async () => {
  const { session, whenLeft } = await endless();
  const controller = new AbortController();
  const generation = session.generate({ maxTokens: 100, signal: controller.signal });
  const seen: number[] = [];
  const reading = async () => {
    for await (const { id } of generation) {
      seen.push(id);
      if (id === 1) controller.abort(new Error("enough"));
    }
  };
  const error = (await failureOf(reading())) as Cancelled;
  expect(error).toBeInstanceOf(Cancelled);
  expect(error).toMatchObject({ code: "cancelled", grpcStatus: status.CANCELLED, cause: new Error("enough") });
  expect(seen).toEqual([0, 1]);
  await whenLeft;
});

test("what was received before an abort is not handed out after it", async () => {
  const { session } = await endless();
  const controller = new AbortController();
  const generation = session.generate({ maxTokens: 100, signal: controller.signal });
  const ahead = generation[Symbol.asyncIterator]();
  await ahead.next();
  await ahead.next();
  controller.abort();
  const behind = generation[Symbol.asyncIterator]();
  expect(await failureOf(behind.next())).toBeInstanceOf(Cancelled);
});

test("a signal that was aborted before sends nothing", async () => {
  let calls = 0;
  const client = await connected({
    generate: async function* () {
      calls++;
      yield done();
    },
  });
  const generation = client.session("s").generate({ maxTokens: 1, signal: AbortSignal.abort() });
  expect(await failureOf(generation.collect())).toBeInstanceOf(Cancelled);
  expect(calls).toBe(0);
});

test("cancel() ends loops that are waiting, and those that come later", async () => {
  const { session, whenLeft } = await endless();
  const generation = session.generate({ maxTokens: 100 });
  const tokens = generation[Symbol.asyncIterator]();
  await tokens.next();
  await tokens.next();
  const waiting = tokens.next();
  generation.cancel();
  expect(await waiting).toEqual({ done: true, value: undefined });
  expect(await gathered(generation)).toEqual([]);
  expect(await failureOf(generation.done)).toBeInstanceOf(Cancelled);
  expect(await failureOf(generation.collect())).toBeInstanceOf(Cancelled);
  await whenLeft;
});

test("cancel() after the end changes nothing", async () => {
  const session = await sampling(token(5), done());
  const generation = session.generate({ maxTokens: 1 });
  await generation.done;
  generation.cancel();
  expect((await generation.collect()).tokenIds).toEqual([5]);
});

test("a failure in mid-stream is raised after the tokens before it", async () => {
  const client = await connected({
    generate: async function* () {
      yield token(5);
      throw new Refusal(status.FAILED_PRECONDITION, "session_failed");
    },
  });
  const generation = client.session("s").generate({ maxTokens: 2 });
  const seen: number[] = [];
  const reading = async () => {
    for await (const { id } of generation) seen.push(id);
  };
  expect(await failureOf(reading())).toBeInstanceOf(SessionFailed);
  expect(seen).toEqual([5]);
  expect(await failureOf(generation.done)).toBeInstanceOf(SessionFailed);
});

test("a stream without a final event is an error", async () => {
  const session = await sampling(token(5));
  const error = await failureOf(session.generate({ maxTokens: 1 }).collect());
  expect(error).toBeInstanceOf(ConnectionFailed);
});

test("a time limit is kept where one is given", async () => {
  const { session, whenLeft } = await endless();
  expect(await failureOf(session.generate({ maxTokens: 9, timeoutMs: 200 }).done)).toBeInstanceOf(DeadlineExceeded);
  await whenLeft;
});

test.each([-1, 1.5, 2 ** 53, -1n, 2n ** 64n])("seed %s is refused before anything is sent", async (seed) => {
  const session = await sampling(done());
  expect(await failureOf(session.generate({ maxTokens: 1, seed }).done)).toBeInstanceOf(InvalidArgument);
});
