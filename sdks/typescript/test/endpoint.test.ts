import { readFileSync } from "node:fs";
import { ServerCredentials } from "@grpc/grpc-js";
import { expect, test } from "vitest";
import { endpointOf } from "../src/endpoint.js";
import { Client, ConnectionFailed, InvalidArgument } from "../src/index.js";
import { VERSION } from "../src/version.js";
import { selfSigned } from "./certificate.js";
import { clientOf, connected, failureOf, gathered, serving } from "./fixture.js";

test("the key goes with every call", async () => {
  const keys: unknown[] = [];
  const client = await connected(
    {
      getModelInfo: (_, { metadata }) => {
        keys.push(...metadata.get("authorization"));
        return {};
      },
      getHistory: async function* (_, { metadata }) {
        keys.push(...metadata.get("authorization"));
        yield {};
      },
    },
    { apiKey: "secret" },
  );
  await client.modelInfo();
  await gathered(client.session("s").history());
  expect(keys).toEqual(["Bearer secret", "Bearer secret"]);
});

test("without a key none is sent", async () => {
  let keys: unknown[] | undefined;
  const client = await connected({
    getModelInfo: (_, { metadata }) => {
      keys = metadata.get("authorization");
      return {};
    },
  });
  await client.modelInfo();
  expect(keys).toEqual([]);
});

test("TLS trusts the given roots, and only them", async () => {
  const serverName = "holdfast.test";
  const { certificate, privateKey } = selfSigned(serverName);
  const pair = { cert_chain: Buffer.from(certificate), private_key: Buffer.from(privateKey) };
  const handlers = { getModelInfo: () => ({ name: "m" }) };
  const server = await serving(handlers, { credentials: ServerCredentials.createSsl(null, [pair]) });
  const trusting = clientOf(server.address, { tls: { rootCertificates: certificate, serverName } });
  expect((await trusting.modelInfo()).name).toBe("m");
  const strict = clientOf(server.address, { tls: { serverName }, retries: 0 });
  const error = await failureOf(strict.modelInfo());
  expect(error).toBeInstanceOf(ConnectionFailed);
  expect(String(error)).toMatch(/self-signed certificate/);
});

test("a key that cannot be sent is refused without being shown", () => {
  for (const apiKey of ["", "white space", "line\nbreak"]) {
    expect(() => new Client("127.0.0.1:1", { apiKey })).toThrow("the API key is empty or holds characters");
  }
});

test("a key does not travel in plain text to another machine unless that is wanted", () => {
  const apiKey = "secret";
  expect(() => endpointOf("example.org:50051", { apiKey })).toThrow(InvalidArgument);
  expect(() => endpointOf("10.0.0.1:50051", { apiKey })).toThrow("plain text");
  for (const address of ["127.0.0.1:1", "localhost:1", "[::1]:1", "dns:///localhost:1", "unix:socket"])
    endpointOf(address, { apiKey });
  endpointOf("example.org:50051", { apiKey, tls: true });
  endpointOf("example.org:50051", { apiKey, insecure: true });
});

test.each(["http://127.0.0.1:8000", "127.0.0.1", "", "host:port"])("%j is not an address", (address) => {
  expect(() => new Client(address)).toThrow("is not host:port");
});

test("the server sees who calls", async () => {
  let agent = "";
  const client = await connected({
    getModelInfo: (_, { metadata }) => {
      agent = String(metadata.get("user-agent"));
      return {};
    },
  });
  await client.modelInfo();
  const { version } = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8"));
  expect(agent).toContain(`holdfast-sdk-typescript/${version}`);
  expect(VERSION).toBe(version);
});
