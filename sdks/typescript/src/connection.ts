/** A transport, and the client's rules on top: how long to wait, and what may be sent again. */
import type { DescMessage, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import type { Method } from "./codec.js";
import { type CallOptions, type Limits, limitsOf } from "./limits.js";
import { isTransient, pause, retrying } from "./retry.js";
import type { Transport } from "./transport.js";

export class Connection {
  constructor(
    readonly transport: Transport,
    readonly retries: number,
    readonly timeoutMs: number,
  ) {}

  /** The limits of a unary call. */
  limits(options: CallOptions): Limits {
    return limitsOf(options, this.timeoutMs);
  }

  /** Sends a call that changes nothing, again where the server was not there. */
  read<I extends DescMessage, O extends DescMessage>(
    method: Method<"unary", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): Promise<MessageShape<O>> {
    return retrying(() => this.transport.unary(method, request, limits), { retries: this.retries, limits });
  }

  /** As `read`, for an answer in many messages; once the first has come it is not begun again. */
  async *readStream<I extends DescMessage, O extends DescMessage>(
    method: Method<"server_streaming", I, O>,
    request: MessageInitShape<I>,
    limits: Limits,
  ): AsyncGenerator<MessageShape<O>, void, undefined> {
    for (let failed = 0; ; failed++) {
      let hasBegun = false;
      try {
        for await (const message of this.transport.serverStream(method, request, limits)) {
          hasBegun = true;
          yield message;
        }
        return;
      } catch (error) {
        const isSafe = !hasBegun && failed < this.retries && isTransient(error);
        if (!isSafe || !(await pause(failed, limits))) throw error;
      }
    }
  }
}
