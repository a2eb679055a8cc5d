/** What a handle knows about its session's history, and how it finds out what it does not know. */
import type { Connection } from "./connection.js";
import { toSessionInfo } from "./convert.js";
import { Cancelled, ConnectionFailed, DeadlineExceeded } from "./errors.js";
import { type GenerateEvent, RuntimeService } from "./gen/holdfast/v1/runtime_pb.js";
import { fromWire } from "./integers.js";
import type { Limits } from "./limits.js";
import { isUntouched, pause } from "./retry.js";
import type { SessionInfo } from "./types.js";

// A server notices at its next step that a generation was left: soon, unless that step is a long prefill.
const BETWEEN_LOOKS = { firstMs: 5, longestMs: 200 };
const PATIENCE_MS = 10_000;

export class Knowledge {
  /** As of the last answer; undefined where only the server knows. */
  historyLength: number | undefined;
  /** Whether the server may still be busy with a generation that was left. */
  #isUnsettled = false;

  constructor(
    readonly connection: Connection,
    readonly sessionId: string,
    historyLength: number | undefined,
  ) {
    this.historyLength = historyLength;
  }

  /** Asks the server, and believes it from then on. */
  async info(limits: Limits): Promise<SessionInfo> {
    const request = { sessionId: this.sessionId };
    const info = toSessionInfo(await this.connection.read(RuntimeService.method.getSessionInfo, request, limits));
    this.historyLength = info.historyLength;
    if (!info.busy) this.#isUnsettled = false;
    return info;
  }

  /** Waits for the server to let go of a generation that was left; where it does not, the next call finds it busy. */
  async settle(limits: Limits): Promise<void> {
    const patience = { ...limits, deadline: Math.min(limits.deadline, Date.now() + PATIENCE_MS) };
    for (let look = 0; this.#isUnsettled; look++) {
      const kept = this.historyLength;
      const info = await this.info(limits);
      this.historyLength = kept ?? (info.busy ? undefined : info.historyLength);
      if (info.busy && !(await pause(look, patience, BETWEEN_LOOKS))) return;
    }
  }

  /** The same events, learned from on the way. `isTurn`: the call gave tokens before it sampled. */
  async *following(
    events: AsyncIterable<GenerateEvent>,
    { signal, isTurn }: { signal: AbortSignal; isTurn: boolean },
  ): AsyncGenerator<GenerateEvent, void> {
    let hasBegun = false;
    let isOver = false;
    const leave = () => {
      if (isOver) return;
      isOver = true;
      this.#isUnsettled = true;
      // Whether a turn's tokens arrived is not known before its first event: the length is then kept, so that
      // giving them again is refused with HistoryConflict instead of adding them twice.
      if (hasBegun || !isTurn) this.historyLength = undefined;
    };
    // At once, not when the cancelled stream comes to its end: the very next call must know.
    signal.addEventListener("abort", leave, { once: true });
    try {
      for await (const event of events) {
        hasBegun = true;
        yield event;
        if (event.event.case !== "done") continue;
        this.historyLength = fromWire(event.event.value.historyLength);
        isOver = true;
      }
    } catch (error) {
      // The server refused it before it began: nothing changed.
      if (!hasBegun && !wasLost(error)) isOver = true;
      throw error;
    } finally {
      leave();
      signal.removeEventListener("abort", leave);
    }
  }
}

/** Whether the server may have gone on after this error, as opposed to having said it itself. */
function wasLost(error: unknown): boolean {
  if (isUntouched(error)) return false;
  return error instanceof DeadlineExceeded || error instanceof ConnectionFailed || error instanceof Cancelled;
}
