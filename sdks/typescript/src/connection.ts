/** Transports to all addresses, and the client's rules on top: which one, how long to wait, what may be sent again. */
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import type { Method } from "./codec.js";
import { DeadlineExceeded } from "./errors.js";
import { RuntimeService } from "./gen/holdfast/v1/runtime_pb.js";
import { type CallOptions, type Limits, limitsOf } from "./limits.js";
import { isTransient, isUntouched, mayRepeat, type Policy, retrying } from "./retry.js";
import type { Transport } from "./transport.js";

export class Connection {
  /** One transport is used until it is gone, then the next, round and round. */
  #current = 0;

  constructor(
    readonly transports: readonly Transport[],
    readonly retries: number,
    readonly timeoutMs: number,
  ) {}

  close(): void {
    for (const transport of this.transports) transport.close();
  }

  /** The limits of a unary call. */
  limits(options: CallOptions): Limits {
    return limitsOf(options, this.timeoutMs);
  }

  policy(limits: Limits, isSafe: (error: unknown) => boolean): Policy {
    return { retries: this.retries, numAddresses: this.transports.length, limits, isSafe };
  }

  /** Sends a call that changes nothing, again where the server was not there. */
  read<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    return retrying(() => this.unary(method, request, limits), this.policy(limits, isTransient));
  }

  /** Sends a call that must not be carried out twice: again only where nobody had begun it. */
  once<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    return retrying(() => this.unary(method, request, limits), this.policy(limits, isUntouched));
  }

  /** As `read`, for an answer in many messages; once the first has come it is not begun again. */
  readStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    return this.#stream(method, request, this.policy(limits, isTransient));
  }

  /** As `once`, for an answer in many messages. */
  onceStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    return this.#stream(method, request, this.policy(limits, isUntouched));
  }

  /** Sends many messages, once. What was read of them cannot be sent again: an address that answers is found first. */
  async clientStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"client_streaming", I, O>,
    requests: AsyncIterator<MessageInitShape<I>>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    if (this.transports.length > 1) await this.read(RuntimeService.method.getModelInfo, {}, limits);
    return this.#using((transport) => transport.clientStream(method, requests, limits));
  }

  /** Sends a call to the address in use. */
  unary<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    return this.#using((transport) => transport.unary(method, request, limits));
  }

  async *#stream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    policy: Policy,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    for (let failed = 1; ; failed++) {
      const [used, transport] = this.#inUse();
      let hasBegun = false;
      try {
        for await (const message of transport.serverStream(method, request, policy.limits)) {
          hasBegun = true;
          yield message;
        }
        return;
      } catch (error) {
        this.#leaveIfGone(used, error, hasBegun);
        if (hasBegun || !(await mayRepeat(failed, error, policy))) throw error;
      }
    }
  }

  async #using<T>(call: (transport: Transport) => Promise<T>): Promise<T> {
    const [used, transport] = this.#inUse();
    try {
      return await call(transport);
    } catch (error) {
      this.#leaveIfGone(used, error, false);
      throw error;
    }
  }

  #inUse(): [number, Transport] {
    return [this.#current, this.transports[this.#current] as Transport];
  }

  #leaveIfGone(used: number, error: unknown, hasBegun: boolean): void {
    const isGone = isTransient(error) || (error instanceof DeadlineExceeded && !hasBegun);
    if (isGone && this.#current === used) this.#current = (used + 1) % this.transports.length;
  }
}
