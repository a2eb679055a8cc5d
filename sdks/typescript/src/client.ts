/** The way in: a server's address, and the sessions behind it. */
import { Connection } from "./connection.js";
import { toCluster, toCreationFacts, toModelInfo, toSessionInfo } from "./convert.js";
import { type EndpointOptions, endpointsOf } from "./endpoint.js";
import { RuntimeService, SessionState as WireState } from "./gen/holdfast/v1/runtime_pb.js";
import { fromWire } from "./integers.js";
import { type CallOptions, limitsOf } from "./limits.js";
import { Session } from "./session.js";
import { Transport } from "./transport.js";
import type { Cluster, CreationFacts, ImportFacts, ModelInfo, SessionInfo, SessionState } from "./types.js";

const rpc = RuntimeService.method;

export interface ClientOptions extends EndpointOptions {
  /** Milliseconds for a unary call, retries included (default: 60,000). Streams have none unless a call gives one. */
  timeoutMs?: number;
  /** How often a call that is safe to send again is sent again, to each address (default: 3). */
  retries?: number;
}

export interface CreateSessionOptions extends CallOptions {
  label?: string;
  /** The beginning of the history. */
  tokenIds?: Iterable<number>;
  /** How many first tokens stay visible for ever; the server's sink where absent. */
  pinTokens?: number;
  /** Tokens that end a generation; the model's own where absent. */
  eosTokenIds?: Iterable<number>;
  metadata?: Readonly<Record<string, string>>;
}

export interface ListSessionsOptions extends CallOptions {
  label?: string;
  state?: Exclude<SessionState, "UNSPECIFIED">;
  /** How many sessions to fetch at a time (default: 100). */
  pageSize?: number;
}

/** A connection to one server, or to one of several members of a cluster, opened with the first call. */
export class Client implements AsyncDisposable {
  readonly #connection: Connection;

  /** @param address - `host:port`; of several, the first is used until it is gone, then the next, round and round */
  constructor(address: string | readonly string[], options: ClientOptions = {}) {
    const transports = endpointsOf(address, options).map((each) => new Transport(each));
    this.#connection = new Connection(transports, options.retries ?? 3, options.timeoutMs ?? 60_000);
  }

  /** A new session. Sent again only where nobody had begun it: a lost answer may leave an unused session behind. */
  async createSession(options: CreateSessionOptions = {}): Promise<Session & CreationFacts> {
    const request = {
      clientLabel: options.label,
      tokenIds: [...(options.tokenIds ?? [])],
      pinTokens: options.pinTokens,
      eosTokenIds: [...(options.eosTokenIds ?? [])],
      metadata: { ...options.metadata },
    };
    const limits = this.#connection.limits(options);
    const answer = await this.#connection.once(rpc.createSession, request, limits);
    const session = new Session(this.#connection, answer.sessionId, fromWire(answer.historyLength));
    return Object.assign(session, toCreationFacts(answer));
  }

  /** A handle to a session that exists. Asks the server nothing. */
  session(id: string): Session {
    return new Session(this.#connection, id);
  }

  async modelInfo(options: CallOptions = {}): Promise<ModelInfo> {
    return toModelInfo(await this.#connection.read(rpc.getModelInfo, {}, this.#connection.limits(options)));
  }

  /** The members of the cluster, as the one that answers sees them. */
  async cluster(options: CallOptions = {}): Promise<Cluster> {
    return toCluster(await this.#connection.read(rpc.getCluster, {}, this.#connection.limits(options)));
  }

  /** Every session of this key's owner; pages are fetched as they are needed, each with its own time limit. */
  async *listSessions(options: ListSessionsOptions = {}): AsyncGenerator<SessionInfo, void> {
    const filter = {
      pageSize: options.pageSize ?? 100,
      clientLabel: options.label,
      state: options.state && WireState[options.state],
    };
    let pageToken = "";
    do {
      const request = { ...filter, pageToken };
      const page = await this.#connection.read(rpc.listSessions, request, this.#connection.limits(options));
      for (const info of page.sessions) yield toSessionInfo(info);
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
  }

  /**
   * A new session with exactly the tokens of what `session.export()` wrote: all of it, or `InvalidArgument` says why not.
   * There is no time limit unless `timeoutMs` is given.
   */
  async importSession(
    chunks: AsyncIterable<Uint8Array> | Iterable<Uint8Array>,
    options: CallOptions = {},
  ): Promise<Session & ImportFacts> {
    const answer = await this.#connection.clientStream(rpc.importSession, messages(chunks), limitsOf(options));
    const session = new Session(this.#connection, answer.sessionId, fromWire(answer.historyLength));
    const { reusedTokens, recomputedTokens } = answer;
    return Object.assign(session, {
      reusedTokens: fromWire(reusedTokens),
      recomputedTokens: fromWire(recomputedTokens),
    });
  }

  /** Cancels what is running and lets go of the connection. Sessions stay on the server. */
  close(): void {
    this.#connection.close();
  }

  /** As `close()`, at the end of an `await using` block. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }
}

async function* messages(
  chunks: AsyncIterable<Uint8Array> | Iterable<Uint8Array>,
): AsyncGenerator<{ data: Uint8Array }> {
  for await (const data of chunks) yield { data };
}
