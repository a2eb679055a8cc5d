/** A real gRPC server in this process: handlers take and give plain messages, and refuse as Holdfast does. */

import {
  create,
  type DescMessage,
  fromBinary,
  type MessageInitShape,
  type MessageShape,
  toBinary,
} from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import * as grpc from "@grpc/grpc-js";
import { ErrorInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { RuntimeService } from "../src/gen/holdfast/v1/runtime_pb.js";

type Methods = typeof RuntimeService.method;
type Request<M> = M extends { input: infer I extends DescMessage } ? MessageShape<I> : never;
type Reply<M> = M extends { output: infer O extends DescMessage } ? MessageInitShape<O> : never;

/** What a handler may know about its call. */
export interface Call {
  metadata: grpc.Metadata;
  /** Aborted when the client left. */
  signal: AbortSignal;
  deadline: grpc.Deadline;
}

type Handler<M extends { methodKind: string }> = M["methodKind"] extends "unary"
  ? (request: Request<M>, call: Call) => Reply<M> | Promise<Reply<M>>
  : M["methodKind"] extends "server_streaming"
    ? (request: Request<M>, call: Call) => AsyncIterable<Reply<M>>
    : (requests: AsyncIterable<Request<M>>, call: Call) => Promise<Reply<M>>;

export type Handlers = { [K in keyof Methods]?: Handler<Methods[K]> };

/** Thrown by a handler: a status, with a code in its trailers where there is one. */
export class Refusal extends Error {
  constructor(
    readonly status: grpc.status,
    readonly reason?: string,
    readonly facts: Record<string, string> = {},
    readonly domain = "holdfast",
  ) {
    super(`refused: ${reason ?? grpc.status[status]}`);
  }

  trailers(): grpc.Metadata {
    const trailers = new grpc.Metadata();
    if (this.reason === undefined) return trailers;
    const info = create(ErrorInfoSchema, { reason: this.reason, domain: this.domain, metadata: this.facts });
    const status = create(StatusSchema, { code: this.status, details: [anyPack(ErrorInfoSchema, info)] });
    trailers.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
    return trailers;
  }
}

export interface RunningServer {
  address: string;
  port: number;
  close(): void;
}

export async function serve(
  handlers: Handlers,
  { port = 0, credentials = grpc.ServerCredentials.createInsecure() } = {},
): Promise<RunningServer> {
  const server = new grpc.Server();
  server.addService(definition(), implementation(handlers));
  const bound = await new Promise<number>((resolve, reject) => {
    server.bindAsync(`127.0.0.1:${port}`, credentials, (error, port) => (error ? reject(error) : resolve(port)));
  });
  return { address: `127.0.0.1:${bound}`, port: bound, close: () => server.forceShutdown() };
}

function definition(): grpc.ServiceDefinition {
  const entries = RuntimeService.methods.map((method): [string, grpc.MethodDefinition<unknown, unknown>] => [
    method.localName,
    {
      path: `/${RuntimeService.typeName}/${method.name}`,
      requestStream: method.methodKind === "client_streaming",
      responseStream: method.methodKind === "server_streaming",
      requestSerialize: () => Buffer.alloc(0),
      requestDeserialize: (bytes) => fromBinary(method.input, bytes),
      responseSerialize: (reply) =>
        Buffer.from(toBinary(method.output, create(method.output, reply as Record<string, unknown>))),
      responseDeserialize: (bytes) => bytes,
    },
  ]);
  return Object.fromEntries(entries);
}

function implementation(handlers: Handlers): grpc.UntypedServiceImplementation {
  const entries = RuntimeService.methods.map((method): [string, grpc.UntypedHandleCall] => {
    // biome-ignore lint/suspicious/noExplicitAny: one loop over methods of every type
    const handler = handlers[method.localName as keyof Methods] as any;
    if (method.methodKind === "server_streaming") {
      const stream: grpc.handleServerStreamingCall<unknown, unknown> = async (call) => {
        try {
          if (!handler) throw new Refusal(grpc.status.UNIMPLEMENTED);
          for await (const reply of handler(call.request, contextOf(call))) {
            if (call.cancelled) return;
            if (!call.write(reply))
              await new Promise((resolve) => call.once("drain", resolve).once("cancelled", resolve));
          }
          call.end();
        } catch (error) {
          call.emit("error", asStatus(error));
        }
      };
      return [method.localName, stream];
    }
    const answer: grpc.handleUnaryCall<unknown, unknown> = async (call, callback) => {
      try {
        if (!handler) throw new Refusal(grpc.status.UNIMPLEMENTED);
        callback(null, await handler(method.methodKind === "unary" ? call.request : call, contextOf(call)));
      } catch (error) {
        callback(asStatus(error));
      }
    };
    return [method.localName, answer as grpc.UntypedHandleCall];
  });
  return Object.fromEntries(entries);
}

function contextOf(call: grpc.ServerUnaryCall<unknown, unknown> | grpc.ServerWritableStream<unknown, unknown>): Call {
  const controller = new AbortController();
  call.on("cancelled", () => controller.abort());
  return { metadata: call.metadata, signal: controller.signal, deadline: call.getDeadline() };
}

function asStatus(error: unknown): Partial<grpc.StatusObject> {
  if (error instanceof Refusal) return { code: error.status, details: error.message, metadata: error.trailers() };
  return { code: grpc.status.INTERNAL, details: String(error) };
}

/** Resolves when the client has left the call. */
export function left(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener("abort", () => resolve(), { once: true });
  });
}
