/** Servers, wires and clients of one test, let go of when it ends. */
import { onTestFinished } from "vitest";
import { Client, type ClientOptions } from "../src/index.js";
import { type Handlers, type RunningServer, serve } from "./server.js";
import { type Wire, wireTo } from "./wire.js";

export async function serving(handlers: Handlers, options: Parameters<typeof serve>[1] = {}): Promise<RunningServer> {
  const server = await serve(handlers, options);
  onTestFinished(() => server.close());
  return server;
}

export function clientOf(address: string | readonly string[], options: ClientOptions = {}): Client {
  const client = new Client(address, options);
  onTestFinished(() => client.close());
  return client;
}

/** A client of a server with these handlers. */
export async function connected(handlers: Handlers, options: ClientOptions = {}): Promise<Client> {
  return clientOf((await serving(handlers)).address, options);
}

/** As `connected`, over a wire that can be cut. */
export async function connectedByWire(handlers: Handlers, options: ClientOptions = {}): Promise<[Client, Wire]> {
  const server = await serving(handlers);
  const wire = await wireTo(server.port);
  onTestFinished(() => wire.close());
  return [clientOf(wire.address, options), wire];
}

export async function gathered<T>(items: AsyncIterable<T>): Promise<T[]> {
  const all: T[] = [];
  for await (const item of items) all.push(item);
  return all;
}

/** The error a promise is rejected with. */
export async function failureOf(promise: Promise<unknown>): Promise<unknown> {
  return promise.then(
    () => {
      throw new Error("it did not fail");
    },
    (error: unknown) => error,
  );
}
