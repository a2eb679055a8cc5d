/** One channel: requests to calls, statuses to errors, signals and deadlines. Sends everything exactly once. */
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { asIs, decoder, encode, type Method, pathOf } from "./codec.js";
import type { Endpoint } from "./endpoint.js";
import { Cancelled, ConnectionFailed } from "./errors.js";
import type { Limits } from "./limits.js";
import { translate } from "./status.js";

interface Cancellable {
  cancel(): void;
}

/** How soon a call that waits for a connection notices that it was cancelled. */
const LOOK_MS = 50;
const { connectivityState: connectivity } = grpc;

type Answer<T> = (error: grpc.ServiceError | null, value?: T) => void;

export class Transport {
  readonly #client: grpc.Client;
  readonly #metadata = new grpc.Metadata();
  readonly #running = new Set<Cancellable>();
  readonly #connectMs: number;
  #isClosed = false;

  constructor({ address, credentials, apiKey, channelOptions, connectMs }: Endpoint) {
    this.#connectMs = connectMs;
    this.#client = new grpc.Client(address, credentials, channelOptions);
    if (apiKey !== undefined) this.#metadata.set("authorization", `Bearer ${apiKey}`);
  }

  /** Cancels what is running, then lets go of the connection. */
  close(): void {
    this.#isClosed = true;
    for (const call of this.#running) call.cancel();
    this.#client.close();
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    const body = encode(method.input, request);
    await this.#connect(limits);
    this.#refuseIfOver(limits);
    return new Promise((resolve, reject) => {
      const [metadata, options] = this.#with(limits);
      const decode = decoder(method.output);
      const answer = this.#answer(resolve, reject, limits, () => release());
      const call = this.#client.makeUnaryRequest(pathOf(method), asIs, decode, body, metadata, options, answer);
      const release = this.#watch(call, limits);
    });
  }

  /** The messages of the answer. Leaving the loop early cancels the call. */
  async *serverStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    const body = encode(method.input, request);
    await this.#connect(limits);
    this.#refuseIfOver(limits);
    const decode = decoder(method.output);
    const call = this.#client.makeServerStreamRequest(pathOf(method), asIs, decode, body, ...this.#with(limits));
    // Who left the loop does not listen any more; a late error must not end the process, whatever Node does about it.
    call.on("error", () => {});
    const release = this.#watch(call, limits);
    try {
      for await (const message of call) yield message as MessageShape<O>;
    } catch (error) {
      throw this.#explain(error, limits);
    } finally {
      release();
      call.cancel();
    }
  }

  async clientStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"client_streaming", I, O>,
    requests: AsyncIterator<MessageInitShape<I>>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    this.#refuseIfOver(limits);
    let call!: grpc.ClientWritableStream<Uint8Array>;
    const answered = new Promise<MessageShape<O>>((resolve, reject) => {
      const [metadata, options] = this.#with(limits);
      const decode = decoder(method.output);
      const answer = this.#answer(resolve, reject, limits, () => release());
      call = this.#client.makeClientStreamRequest(pathOf(method), asIs, decode, metadata, options, answer);
      const release = this.#watch(call, limits);
    });
    // An answer before the end is a refusal: the rest would be read and sent for nothing.
    const isOver = answered.then(
      () => "over" as const,
      () => "over" as const,
    );
    try {
      while (true) {
        const next = await Promise.race([requests.next(), isOver]);
        if (next === "over" || next.done) break;
        if (call.write(encode(method.input, next.value))) continue;
        await Promise.race([new Promise((resolve) => call.once("drain", resolve)), isOver]);
      }
      call.end();
      return await answered;
    } catch (error) {
      call.cancel();
      throw error;
    } finally {
      void requests.return?.();
    }
  }

  /** Waits for a connection, but not for long: gRPC itself would wait as long as the system does. */
  async #connect(limits: Limits): Promise<void> {
    if (this.#connectMs === Number.POSITIVE_INFINITY) return;
    const channel = this.#client.getChannel();
    const latest = Math.min(limits.deadline, Date.now() + this.#connectMs);
    while (Date.now() < latest) {
      this.#refuseIfOver(limits);
      const state = channel.getConnectivityState(true);
      // Without a connection the call fails at once, and says why there is none.
      if (state === connectivity.READY || state === connectivity.TRANSIENT_FAILURE) return;
      const soon = Math.min(latest, Date.now() + LOOK_MS);
      await new Promise((resolve) => channel.watchConnectivityState(state, soon, resolve));
    }
    if (latest === limits.deadline) return; // as above: the call fails at once
    const facts = { details: { accepted: "false" }, grpcStatus: grpc.status.UNAVAILABLE };
    throw new ConnectionFailed(`no connection to ${channel.getTarget()} within ${this.#connectMs} ms`, facts);
  }

  #answer<T>(
    resolve: (value: T) => void,
    reject: (error: unknown) => void,
    limits: Limits,
    first: () => void,
  ): Answer<T> {
    return (error, value) => {
      first();
      if (error) reject(this.#explain(error, limits));
      else resolve(value as T);
    };
  }

  /** Lets the signal and `close()` cancel the call, until the returned function is called. */
  #watch(call: Cancellable, limits: Limits): () => void {
    const cancel = () => call.cancel();
    this.#running.add(call);
    limits.signal?.addEventListener("abort", cancel, { once: true });
    return () => {
      this.#running.delete(call);
      limits.signal?.removeEventListener("abort", cancel);
    };
  }

  #with(limits: Limits): [grpc.Metadata, grpc.CallOptions] {
    return [this.#metadata, { deadline: limits.deadline }];
  }

  #refuseIfOver(limits: Limits): void {
    if (limits.signal?.aborted || this.#isClosed) throw this.#explain(new Cancelled("cancelled"), limits);
  }

  /** The translated error; a cancellation says who cancelled. */
  #explain(error: unknown, limits: Limits): unknown {
    const translated = translate(error);
    if (!(translated instanceof Cancelled)) return translated;
    const grpcStatus = grpc.status.CANCELLED;
    if (limits.signal?.aborted) return new Cancelled("cancelled", { grpcStatus, cause: limits.signal.reason });
    if (this.#isClosed) return new Cancelled("the client is closed", { grpcStatus });
    return translated;
  }
}
