/** One session and what can be done with it. */
import { appendOnce } from "./append.js";
import type { Connection } from "./connection.js";
import { toHistoryChunk, toPassage } from "./convert.js";
import { SessionNotFound } from "./errors.js";
import { type GenerateEvent, RuntimeService } from "./gen/holdfast/v1/runtime_pb.js";
import { Generation } from "./generation.js";
import { fromWire, toWire, toWireIfAny } from "./integers.js";
import { Knowledge } from "./knowledge.js";
import { type CallOptions, limitsOf } from "./limits.js";
import { type GenerateOptions, toSampling } from "./sampling.js";
import type {
  AppendResult,
  CloseResult,
  ForkFacts,
  HistoryChunk,
  Passage,
  RewindResult,
  SessionInfo,
} from "./types.js";

const rpc = RuntimeService.method;

/** Options of `append`. */
export interface AppendOptions extends CallOptions {
  /** Refused with `HistoryConflict` unless the history has this length; what the handle believes where absent. */
  expectedHistoryLength?: number;
}

/** Options of `fork`. */
export interface ForkOptions extends CallOptions {
  /** How much of the history to take; all of it where absent. */
  atPosition?: number;
  label?: string;
}

/** Options of `history`. */
export interface HistoryOptions extends CallOptions {
  /** The first position; 0 where absent. */
  from?: number;
  /** The position after the last; the end where absent. */
  to?: number;
}

/** Options of `search`. */
export interface SearchOptions extends CallOptions {
  /** Most passages in the answer, 1 to 64; 8 where absent. */
  limit?: number;
  /** Also passages that the model sees anyway. */
  includeInView?: boolean;
}

/** Options of `export`. */
export interface ExportOptions extends CallOptions {
  /** Leave the cache out: much smaller, and computed again where it is imported. */
  withoutSnapshot?: boolean;
}

/**
 * A handle to a session on the server. `await using` closes the session at the end of the block.
 *
 * The server does one operation at a time per session: a second one is refused with `SessionBusy`. After a generation
 * was left, the next call waits until the server has noticed.
 */
export class Session implements AsyncDisposable {
  readonly id: string;
  readonly #connection: Connection;
  readonly #known: Knowledge;

  /** @internal Use `client.createSession()` or `client.session(id)`. */
  constructor(connection: Connection, id: string, historyLength?: number) {
    this.id = id;
    this.#connection = connection;
    this.#known = new Knowledge(connection, id, historyLength);
  }

  /** The length of the history as of the last answer; undefined where only the server knows it. Makes no call. */
  get historyLength(): number | undefined {
    return this.#known.historyLength;
  }

  /** Adds given tokens, exactly once even if the connection is lost on the way. */
  async append(ids: Iterable<number>, options: AppendOptions = {}): Promise<AppendResult> {
    const tokenIds = [...ids];
    const limits = this.#connection.limits(options);
    await this.#known.settle(limits);
    const known = options.expectedHistoryLength ?? this.#known.historyLength;
    const expectedHistoryLength = known ?? (await this.#known.info(limits)).historyLength;
    const result = await appendOnce(this.#connection, { sessionId: this.id, tokenIds, expectedHistoryLength }, limits);
    this.#known.historyLength = result.historyLength;
    return result;
  }

  /** Samples tokens and adds them to the history. Never carried out twice. */
  generate(options: GenerateOptions): Generation {
    return new Generation((signal) => this.#sample(options, signal), options.signal);
  }

  /** `append` and `generate` in one call. Never carried out twice: give `expectedHistoryLength` to send it again yourself. */
  turn(ids: Iterable<number>, options: GenerateOptions): Generation {
    const tokenIds = [...ids];
    return new Generation((signal) => this.#sample(options, signal, tokenIds), options.signal);
  }

  /** A new session with the same history. This one stays as it is. */
  async fork(options: ForkOptions = {}): Promise<Session & ForkFacts> {
    const limits = this.#connection.limits(options);
    const atPosition = toWireIfAny(options.atPosition, "atPosition");
    const request = { sessionId: this.id, atPosition, clientLabel: options.label };
    await this.#known.settle(limits);
    const answer = await this.#connection.once(rpc.forkSession, request, limits);
    const session = new Session(this.#connection, answer.sessionId, fromWire(answer.historyLength));
    return Object.assign(session, { recomputedTokens: fromWire(answer.recomputedTokens) });
  }

  /** Forgets the tokens from position `to` on. */
  async rewind(to: number, options: CallOptions = {}): Promise<RewindResult> {
    const limits = this.#connection.limits(options);
    const request = { sessionId: this.id, toPosition: toWire(to, "to") };
    await this.#known.settle(limits);
    const answer = await this.#connection.once(rpc.rewindSession, request, limits);
    const historyLength = fromWire(answer.historyLength);
    this.#known.historyLength = historyLength;
    return { historyLength, recomputedTokens: fromWire(answer.recomputedTokens) };
  }

  /** The session as the server sees it. This handle believes its length from then on. */
  info(options: CallOptions = {}): Promise<SessionInfo> {
    return this.#known.info(this.#connection.limits(options));
  }

  /** The history in order, what left the window included. */
  async *history(options: HistoryOptions = {}): AsyncGenerator<HistoryChunk, void, undefined> {
    const limits = limitsOf(options);
    const fromPosition = toWireIfAny(options.from, "from");
    const toPosition = toWireIfAny(options.to, "to");
    await this.#known.settle(limits);
    const request = { sessionId: this.id, fromPosition, toPosition };
    for await (const chunk of this.#connection.readStream(rpc.getHistory, request, limits)) yield toHistoryChunk(chunk);
  }

  /** Passages of the history that a text, or the text of token ids, is about, the best first. */
  async search(query: string | Iterable<number>, options: SearchOptions = {}): Promise<Passage[]> {
    const limits = this.#connection.limits(options);
    const asked = typeof query === "string" ? { query } : { queryTokenIds: [...query] };
    const request = { sessionId: this.id, ...asked, limit: options.limit, includeInView: options.includeInView };
    await this.#known.settle(limits);
    return (await this.#connection.read(rpc.searchHistory, request, limits)).passages.map(toPassage);
  }

  /** The session as bytes: write them to a file, or give them to `client.importSession`. */
  async *export(options: ExportOptions = {}): AsyncGenerator<Uint8Array, void, undefined> {
    const limits = limitsOf(options);
    await this.#known.settle(limits);
    const request = { sessionId: this.id, withoutSnapshot: options.withoutSnapshot };
    const chunks = this.#connection.onceStream(rpc.exportSession, request, limits);
    for await (const chunk of chunks) yield chunk.data;
  }

  /** Ends the session, a running generation included. */
  async close(options: CallOptions = {}): Promise<CloseResult> {
    const limits = this.#connection.limits(options);
    const answer = await this.#connection.once(rpc.closeSession, { sessionId: this.id }, limits);
    return { finalHistoryLength: fromWire(answer.finalHistoryLength) };
  }

  /** Closes the session unless it is gone already. */
  async [Symbol.asyncDispose](): Promise<void> {
    try {
      await this.close();
    } catch (error) {
      if (!(error instanceof SessionNotFound)) throw error;
    }
  }

  async *#sample(options: GenerateOptions, signal: AbortSignal, tokenIds?: number[]): AsyncGenerator<GenerateEvent> {
    const limits = limitsOf({ signal, timeoutMs: options.timeoutMs });
    const request = {
      sessionId: this.id,
      maxTokens: options.maxTokens,
      expectedHistoryLength: toWireIfAny(options.expectedHistoryLength, "expectedHistoryLength"),
      sampling: toSampling(options),
      batchTokens: true,
    };
    await this.#known.settle(limits);
    const events = tokenIds
      ? this.#connection.onceStream(rpc.turn, { ...request, tokenIds }, limits)
      : this.#connection.onceStream(rpc.generate, request, limits);
    yield* this.#known.following(events, { signal, isTurn: tokenIds !== undefined });
  }
}
