/** What the server answers, as plain objects. Positions and counts are numbers, seeds are bigints. */

/** Why a generation ended. `UNSPECIFIED` is a reason that this version does not know. */
export type StopReason = "UNSPECIFIED" | "MAX_TOKENS" | "EOS" | "STOP_TOKEN" | "CANCELLED";
/** Live: its cache is in memory. Parked: on disk, or to be recomputed. Failed: see `SessionInfo.failure`. */
export type SessionState = "UNSPECIFIED" | "LIVE" | "PARKED" | "FAILED";
/** Whether a span's tokens were given by a client, sampled from the model, or are earlier passages quoted by the server. */
export type SpanKind = "UNSPECIFIED" | "GIVEN" | "SAMPLED" | "RECALLED";

/** A token and how likely it was. */
export interface TokenLogprob {
  id: number;
  logprob: number;
}

/** One sampled token. */
export interface Token extends TokenLogprob {
  /** Under the distribution that the token was drawn from; `logprob` is the model's own. */
  samplingLogprob: number;
  /** The likeliest tokens, as many as `topLogprobs` asked for. */
  top: TokenLogprob[];
}

/** Positions `[from, to)`, which the model can no longer see. `session.history()` still has them. */
export interface TruncatedRange {
  from: number;
  to: number;
}

/** The end of a generation. */
export interface Done {
  stopReason: StopReason;
  generatedTokenCount: number;
  prefillTokens: number;
  prefillDurationSeconds: number;
  totalDurationSeconds: number;
  acceptedDraftTokens: number;
  proposedDraftTokens: number;
  droppedTokenCount: number;
  /** Repeats the generation when given again on the same history. */
  seed: bigint;
  historyLength: number;
}

/** A generation from its first token to its end. */
export interface Completion {
  tokens: Token[];
  tokenIds: number[];
  truncated: TruncatedRange[];
  done: Done;
}

/** What `append` did. */
export interface AppendResult {
  historyLength: number;
  /** Absent where the answer was lost and the tokens were then found in the history. */
  prefilledTokens?: number;
  /** Absent where `prefilledTokens` is. */
  prefillDurationSeconds?: number;
}

/** Facts that come with a new session. */
export interface CreationFacts {
  sink: number;
  recent: number;
  /** Absent where the cache is not the server's to count. */
  kvReservedBytes?: number;
  modelFingerprint: string;
}

/** What `fork` cost. */
export interface ForkFacts {
  recomputedTokens: number;
}

/** What `importSession` cost. */
export interface ImportFacts {
  /** Tokens whose cache came along. */
  reusedTokens: number;
  /** Tokens that were computed again; together they are the history. */
  recomputedTokens: number;
}

/** What `rewind` did. */
export interface RewindResult {
  historyLength: number;
  recomputedTokens: number;
}

/** What `close` ended. */
export interface CloseResult {
  finalHistoryLength: number;
}

/** A server of a cluster. */
export interface Member {
  name: string;
  /** `serving`, `draining`, or `dead`: others may take over its sessions. */
  state: string;
  /** Absent without a cluster; 0 or less: it has expired. */
  leaseLeftSeconds: number | undefined;
  /** How often a server has joined under this name. */
  epoch: number;
  /** Sessions in its memory, and how many more it can take without parking one. */
  sessions: number;
  room: number;
  version: string;
  /** Addresses that other members reach; empty where it has none. */
  http: string;
  grpc: string;
}

export interface Cluster {
  members: Member[];
  /** The name of the member that answered. */
  thisMember: string;
  /** If not, the server is the only member and has no lease. */
  isCluster: boolean;
}

/** The model behind the server. */
export interface ModelInfo {
  name: string;
  fingerprint: string;
  vocabularySize: number;
  eosTokenIds: number[];
  tokenizerHash: string;
  chatTemplateHash: string;
  sink: number;
  recent: number;
  maxPinTokens: number;
  contextLength: number;
}

/** How much of a history was given and how much was sampled. */
export interface SpansSummary {
  givenSpans: number;
  givenTokens: number;
  sampledSpans: number;
  sampledTokens: number;
}

/** A session as the server sees it now. */
export interface SessionInfo {
  sessionId: string;
  label: string;
  state: SessionState;
  busy: boolean;
  historyLength: number;
  droppedTokenCount: number;
  /** Absent where the cache is not the server's to count. */
  kvLiveBytes?: number;
  /** Absent where the cache is not the server's to count. */
  kvReservedBytes?: number;
  inv1Violations: number;
  inv2Violations: number;
  idleSeconds: number;
  spans: SpansSummary;
  metadata: Record<string, string>;
  /** Why the session failed, where it did. */
  failure?: string;
  sink: number;
  recent: number;
  /** How often `rewind` changed this history. */
  rewindCount: number;
}

/** A part of a history that a search has found: the tokens at positions `[from, to)` hold it. */
export interface Passage {
  /** Counted from 1 along the history. */
  turn: number;
  /** `given` or `sampled` in a session of raw tokens; the role of the message in a chat. */
  role: string;
  text: string;
  from: number;
  to: number;
  /** Greater is better, within one answer. */
  score: number;
}

/** Tokens of one span, from position `from` on; a long span comes in several chunks. */
export interface HistoryChunk {
  from: number;
  kind: SpanKind;
  tokenIds: number[];
  /** One for each token of a sampled span, none for others. */
  logprobs: number[];
  /** One for each token of a sampled span, none for others. */
  samplingLogprobs: number[];
  /** Of the span, on its last chunk, where it is finished. */
  stopReason?: StopReason;
}
