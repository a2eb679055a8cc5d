import { status } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { PayloadTooLarge } from "../src/index.js";
import { connected, failureOf } from "./fixture.js";
import { left, Refusal } from "./server.js";

test("export and import carry bytes", async () => {
  const received: Uint8Array[] = [];
  const wanted: boolean[] = [];
  const client = await connected({
    exportSession: async function* ({ withoutSnapshot }) {
      wanted.push(!withoutSnapshot);
      yield { data: new Uint8Array([1, 2]) };
      yield { data: new Uint8Array([3]) };
    },
    importSession: async (chunks) => {
      for await (const { data } of chunks) received.push(data);
      return { sessionId: "new", reusedTokens: 3n, recomputedTokens: 1n, historyLength: 4n };
    },
  });
  const session = await client.importSession(client.session("s").export());
  expect(Buffer.concat(received)).toEqual(Buffer.from([1, 2, 3]));
  expect(session).toMatchObject({ id: "new", reusedTokens: 3, recomputedTokens: 1, historyLength: 4 });
  for await (const _ of client.session("s").export({ withoutSnapshot: true }));
  expect(wanted).toEqual([true, false]);
});

test("an import that is refused stops reading", async () => {
  const client = await connected({
    importSession: async () => {
      throw new Refusal(status.RESOURCE_EXHAUSTED, "payload_too_large");
    },
  });
  const endless = async function* () {
    yield new Uint8Array(10);
    await new Promise(() => {});
  };
  expect(await failureOf(client.importSession(endless()))).toBeInstanceOf(PayloadTooLarge);
});

test("an import whose source fails is cancelled, and the failure is the source's", async () => {
  const controller = new AbortController();
  const client = await connected({
    importSession: async (chunks, { signal }) => {
      for await (const _ of chunks) controller.abort();
      await left(signal);
      serverLeft.abort();
      return {};
    },
  });
  const serverLeft = new AbortController();
  const broken = async function* () {
    yield new Uint8Array(10);
    await left(controller.signal);
    throw new Error("disk");
  };
  expect(await failureOf(client.importSession(broken()))).toEqual(new Error("disk"));
  await left(serverLeft.signal);
});

test("a large import goes through", async () => {
  let size = 0;
  const client = await connected({
    importSession: async (chunks) => {
      for await (const { data } of chunks) size += data.length;
      return { sessionId: "big" };
    },
  });
  await client.importSession(Array.from({ length: 64 }, () => new Uint8Array(256 * 1024)));
  expect(size).toBe(16 * 1024 * 1024);
});
