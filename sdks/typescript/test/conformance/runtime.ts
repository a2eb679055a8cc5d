/** Sessions in memory over a model that counts: each token is the one before it plus one. */
import { status } from "@grpc/grpc-js";
import {
  type GenerateRequest,
  SessionState,
  SpanKind,
  StopReason,
  type TurnRequest,
} from "../../src/gen/holdfast/v1/runtime_pb.js";
import { done, type EventInit, token } from "../events.js";
import { type Call, type Handlers, Refusal } from "../server.js";

interface Entry {
  id: number;
  kind: SpanKind;
}

interface Held {
  id: string;
  label: string;
  metadata: Record<string, string>;
  history: Entry[];
  isBusy: boolean;
}

const given = (ids: number[]): Entry[] => ids.map((id) => ({ id, kind: SpanKind.GIVEN }));

export function countingRuntime(): Handlers {
  const sessions = new Map<string, Held>();
  const closed = new Set<string>();

  const open = (label: string, history: Entry[], metadata = {}): Held => {
    const held = { id: `s${sessions.size + closed.size}`, label, metadata, history, isBusy: false };
    sessions.set(held.id, held);
    return held;
  };
  const find = (id: string): Held => {
    const held = sessions.get(id);
    if (held) return held;
    const detail = closed.has(id) ? "closed" : "unknown";
    throw new Refusal(status.NOT_FOUND, "session_not_found", { detail });
  };
  const idle = (request: { sessionId: string; expectedHistoryLength?: bigint }): Held => {
    const held = find(request.sessionId);
    if (held.isBusy) throw new Refusal(status.ABORTED, "session_busy");
    const length = BigInt(held.history.length);
    if ((request.expectedHistoryLength ?? length) === length) return held;
    throw new Refusal(status.ABORTED, "history_conflict", { history_length: String(length) });
  };
  const infoOf = (held: Held) => ({
    sessionId: held.id,
    clientLabel: held.label,
    metadata: held.metadata,
    state: SessionState.LIVE,
    busy: held.isBusy,
    historyLength: BigInt(held.history.length),
    spans: { givenTokens: BigInt(held.history.filter((each) => each.kind === SpanKind.GIVEN).length) },
  });

  async function* sample(request: GenerateRequest | TurnRequest, call: Call, ids: number[]): AsyncGenerator<EventInit> {
    const held = idle(request);
    held.history.push(...given(ids));
    held.isBusy = true;
    try {
      for (let count = 0; count < request.maxTokens && !call.signal.aborted; count++) {
        const id = (held.history.at(-1)?.id ?? 0) + 1;
        held.history.push({ id, kind: SpanKind.SAMPLED });
        yield token(id);
        await new Promise(setImmediate);
      }
      const historyLength = BigInt(held.history.length);
      yield done({ stopReason: StopReason.MAX_TOKENS, seed: request.sampling?.seed, historyLength });
    } finally {
      held.isBusy = false;
    }
  }

  return {
    getModelInfo: () => ({ name: "counting", eosTokenIds: [2] }),
    createSession: ({ clientLabel, tokenIds, metadata }) => {
      const held = open(clientLabel, given(tokenIds), metadata);
      return { sessionId: held.id, sink: 4, historyLength: BigInt(held.history.length) };
    },
    appendTokens: (request) => {
      const held = idle(request);
      held.history.push(...given(request.tokenIds));
      return { historyLength: BigInt(held.history.length), prefilledTokens: BigInt(request.tokenIds.length) };
    },
    generate: (request, call) => sample(request, call, []),
    turn: (request, call) => sample(request, call, request.tokenIds),
    forkSession: ({ sessionId, atPosition, clientLabel }) => {
      const { history } = idle({ sessionId });
      const fork = open(clientLabel, history.slice(0, Number(atPosition ?? history.length)));
      return { sessionId: fork.id, historyLength: BigInt(fork.history.length) };
    },
    rewindSession: ({ sessionId, toPosition }) => {
      const held = idle({ sessionId });
      held.history.length = Number(toPosition);
      return { historyLength: toPosition };
    },
    getSessionInfo: ({ sessionId }) => infoOf(find(sessionId)),
    listSessions: ({ clientLabel, pageSize, pageToken }) => {
      const all = [...sessions.values()].filter((each) => clientLabel === undefined || each.label === clientLabel);
      const end = Number(pageToken) + pageSize;
      const page = all.slice(Number(pageToken), end).map(infoOf);
      return { sessions: page, nextPageToken: end < all.length ? String(end) : "" };
    },
    getHistory: async function* ({ sessionId, fromPosition = 0n, toPosition }) {
      const { history } = find(sessionId);
      for (let at = Number(fromPosition); at < Number(toPosition ?? history.length); at++) {
        const { id, kind } = history[at] as Entry;
        const logprobs = kind === SpanKind.SAMPLED ? [-0.5] : [];
        yield { fromPosition: BigInt(at), kind, tokenIds: [id], logprobs, samplingLogprobs: logprobs };
      }
    },
    closeSession: ({ sessionId }) => {
      const { history } = find(sessionId);
      sessions.delete(sessionId);
      closed.add(sessionId);
      return { finalHistoryLength: BigInt(history.length) };
    },
  };
}
