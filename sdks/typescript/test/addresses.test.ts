import { type AddressInfo, createServer } from "node:net";
import { status } from "@grpc/grpc-js";
import { expect, onTestFinished, test } from "vitest";
import { endpointOf } from "../src/endpoint.js";
import { RuntimeService } from "../src/gen/holdfast/v1/runtime_pb.js";
import { Client, ConnectionFailed, DeadlineExceeded, HistoryConflict, SessionElsewhere } from "../src/index.js";
import { Transport } from "../src/transport.js";
import { done, token } from "./events.js";
import { clientOf, failureOf, gathered, serving } from "./fixture.js";
import { type Handlers, left, Refusal } from "./server.js";

const dead = "127.0.0.1:1";
const gone = () => new Refusal(status.UNAVAILABLE);
const turnedAway = () => new Refusal(status.UNAVAILABLE, "draining", { accepted: "false" });
const elsewhere = () => new Refusal(status.UNAVAILABLE, "session_elsewhere");
const draining = () => new Refusal(status.UNAVAILABLE, "draining");
const fenced = () => new Refusal(status.UNAVAILABLE, "fenced");

/** Two members of one cluster: every call is written down, and fails at a member while that has a refusal planned. */
async function cluster() {
  const planned: (() => Refusal)[][] = [[], []];
  const calls: string[][] = [[], []];
  const member = (index: number): Handlers => {
    const came = <T>(name: string, answer: T): T => {
      calls[index]?.push(name);
      const refusal = planned[index]?.shift();
      if (refusal) throw refusal();
      return answer;
    };
    return {
      createSession: () => came("create", { sessionId: "s", historyLength: 1n }),
      getModelInfo: () => came("model", { name: "m" }),
      getSessionInfo: () => came("info", { historyLength: 1n }),
      listSessions: () => came("list", { sessions: [{}] }),
      appendTokens: () => came("append", { historyLength: 2n, prefilledTokens: 1n }),
      forkSession: () => came("fork", { sessionId: "f" }),
      rewindSession: () => came("rewind", {}),
      closeSession: () => came("close", {}),
      importSession: async (chunks) => {
        for await (const _ of chunks);
        return came("import", { sessionId: "i" });
      },
      getHistory: async function* () {
        yield came("history", {});
      },
      exportSession: async function* () {
        yield came("export", { data: new Uint8Array([1]) });
      },
      generate: async function* () {
        yield came("generate", token(1));
        yield done();
      },
      turn: async function* () {
        yield came("turn", token(1));
        yield done();
      },
    };
  };
  const servers = await Promise.all([serving(member(0)), serving(member(1))]);
  return { servers, addresses: servers.map((each) => each.address), planned, calls };
}

/** Each call once, in an order in which all can succeed. */
const everyCall = (client: Client): [string, () => Promise<unknown>][] => {
  const session = client.session("s");
  return [
    ["create", () => client.createSession()],
    ["info", () => session.info()],
    ["append", () => session.append([1], { expectedHistoryLength: 1 })],
    ["turn", () => session.turn([1], { maxTokens: 1 }).done],
    ["generate", () => session.generate({ maxTokens: 1 }).done],
    ["rewind", () => session.rewind(1)],
    ["history", () => gathered(session.history())],
    ["fork", () => session.fork()],
    ["export", () => gathered(session.export())],
    ["close", () => session.close()],
    ["model", () => client.modelInfo()],
    ["list", () => gathered(client.listSessions())],
  ];
};

test("a dead address is passed over by every call", async () => {
  const { addresses, calls } = await cluster();
  for (const index of everyCall(clientOf(dead)).keys()) {
    const client = clientOf([dead, "127.0.0.1:2", ...addresses], { retries: 0 });
    await everyCall(client)[index]?.[1]();
  }
  await clientOf([dead, ...addresses], { retries: 0 }).importSession([new Uint8Array([1])]);
  expect(calls).toEqual([[...everyCall(clientOf(dead)).map(([name]) => name), "model", "import"], []]);
});

test("an address that accepts and says nothing is given up after a short time, and nothing was sent", async () => {
  const silent = createServer().listen(0, "127.0.0.1");
  onTestFinished(() => void silent.close());
  await new Promise((resolve) => silent.once("listening", resolve));
  const address = `127.0.0.1:${(silent.address() as AddressInfo).port}`;
  const transport = new Transport({ ...endpointOf(address, {}), connectMs: 100 });
  onTestFinished(() => transport.close());
  const send = (deadline: number) =>
    failureOf(transport.unary(RuntimeService.method.getModelInfo, {}, { signal: undefined, deadline }));
  const error = await send(Date.now() + 60_000);
  expect(error).toBeInstanceOf(ConnectionFailed);
  expect(error).toMatchObject({ isUntouched: true });
  expect(await send(Date.now() + 50)).toBeInstanceOf(DeadlineExceeded);
});

test("a member that goes away between calls is passed over, and the next one stays in use", async () => {
  const { addresses, servers, calls } = await cluster();
  const client = clientOf(addresses, { retries: 0 });
  await client.modelInfo();
  servers[0]?.close();
  for (const [, call] of everyCall(client)) await call();
  expect(calls).toEqual([["model"], everyCall(client).map(([name]) => name)]);
});

test.each([gone, turnedAway, elsewhere, draining, fenced])(
  "reads go to the next address, and round and round",
  async (refusal) => {
    const { addresses, planned, calls } = await cluster();
    const client = clientOf(addresses, { retries: 0 });
    planned[0]?.push(refusal);
    await gathered(client.session("s").history());
    await client.modelInfo();
    planned[1]?.push(refusal);
    await client.session("s").info();
    expect(calls).toEqual([
      ["history", "info"],
      ["history", "model", "info"],
    ]);
  },
);

test.each([turnedAway, elsewhere])(
  "what nobody has begun is sent to the next address, whatever it is",
  async (refusal) => {
    const { addresses, planned, calls } = await cluster();
    const client = clientOf(addresses, { retries: 0 });
    let member = 0;
    for (const [name, call] of everyCall(client)) {
      planned[member]?.push(refusal);
      await call();
      member = 1 - member;
      expect(calls[member]?.at(-1)).toBe(name);
    }
  },
);

test.each([gone, draining, fenced])("what may have arrived is not sent to the next address", async (refusal) => {
  for (const name of ["create", "turn", "generate", "rewind", "fork", "export", "close"]) {
    const { addresses, planned, calls } = await cluster();
    const client = clientOf(addresses);
    planned[0]?.push(refusal);
    const call = everyCall(client).find((each) => each[0] === name)?.[1] as () => Promise<unknown>;
    expect(await failureOf(call())).toMatchObject({ isUntouched: false });
    expect(calls).toEqual([[name], []]);
    await call(); // the caller decides; the next address is in use
    expect([calls[0], calls[1]?.at(-1)]).toEqual([[name], name]);
  }
});

test("a stream that has begun is not begun again", async () => {
  const { addresses, calls } = await cluster();
  const first = await serving({
    generate: async function* () {
      yield token(1);
      throw elsewhere();
    },
  });
  const generation = clientOf([first.address, ...addresses])
    .session("s")
    .generate({ maxTokens: 2 });
  expect(await failureOf(generation.done)).toBeInstanceOf(SessionElsewhere);
  expect(calls).toEqual([[], []]);
});

test("an append whose answer was lost is not added twice elsewhere, and a conflict without a lost answer is told", async () => {
  const lost = await serving({
    appendTokens: () => {
      throw gone();
    },
  });
  const conflict = await serving({
    appendTokens: () => {
      throw new Refusal(status.ABORTED, "history_conflict", { history_length: "2" });
    },
  });
  const append = (addresses: string[]) =>
    clientOf(addresses, { retries: 0 }).session("s").append([7], { expectedHistoryLength: 1 });
  expect(await append([lost.address, conflict.address])).toEqual({ historyLength: 2 });
  expect(await failureOf(append([dead, conflict.address]))).toBeInstanceOf(HistoryConflict);
});

test("all addresses are tried in every round", async () => {
  const { addresses, planned, calls } = await cluster();
  for (const each of planned) each.push(...Array.from({ length: 9 }, () => gone));
  expect(await failureOf(clientOf(addresses, { retries: 1 }).modelInfo())).toBeInstanceOf(ConnectionFailed);
  expect(calls).toEqual([
    ["model", "model"],
    ["model", "model"],
  ]);
});

test("where nobody answers the error says that nothing was sent", async () => {
  const error = await failureOf(clientOf([dead, "nobody.invalid:1"], { retries: 0 }).createSession());
  expect(error).toBeInstanceOf(ConnectionFailed);
  expect(error).toMatchObject({ isUntouched: true, grpcStatus: status.UNAVAILABLE });
});

test("an address that does not answer in time is left", async () => {
  const { addresses, calls } = await cluster();
  const stalled = await serving({
    getModelInfo: async (_, { signal }) => {
      await left(signal);
      return {};
    },
  });
  const client = clientOf([stalled.address, ...addresses], { timeoutMs: 200 });
  expect(await failureOf(client.modelInfo())).toBeInstanceOf(DeadlineExceeded);
  expect((await client.modelInfo()).name).toBe("m");
  expect(calls).toEqual([["model"], []]);
});

test("the members of a cluster are told", async () => {
  const facts = { state: "serving", sessions: 1, room: 3, version: "1", http: "h:1", grpc: "g:1" };
  const members = [{ name: "a", leaseLeftSeconds: 7.5, epoch: 2n, ...facts }, { name: "b" }];
  const { address } = await serving({ getCluster: () => ({ members, thisMember: "a", isCluster: true }) });
  const cluster = await clientOf([dead, address], { retries: 0 }).cluster();
  expect(cluster).toMatchObject({ thisMember: "a", isCluster: true });
  expect(cluster.members[0]).toEqual({ name: "a", leaseLeftSeconds: 7.5, epoch: 2, ...facts });
  expect(cluster.members[1]?.leaseLeftSeconds).toBeUndefined();
});

test("a list of addresses is checked whole", () => {
  expect(() => new Client([])).toThrow("empty");
  expect(() => new Client(["127.0.0.1:1", "http://127.0.0.1:2"])).toThrow("is not host:port");
  expect(() => new Client(["127.0.0.1:1", "10.0.0.1:1"], { apiKey: "k" })).toThrow("plain text to 10.0.0.1:1");
});

test("closing closes every connection", async () => {
  const { addresses } = await cluster();
  const client = clientOf(addresses);
  await client.modelInfo();
  client.close();
  expect(await failureOf(client.modelInfo())).toMatchObject({ message: "the client is closed" });
});
