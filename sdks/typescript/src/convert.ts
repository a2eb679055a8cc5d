/** Messages of the contract to the SDK's own types. */
import * as wire from "./gen/holdfast/v1/runtime_pb.js";
import { fromWire, fromWireIfAny } from "./integers.js";
import type {
  Cluster,
  CreationFacts,
  Done,
  HistoryChunk,
  Member,
  ModelInfo,
  Passage,
  SessionInfo,
  SessionState,
  SpanKind,
  StopReason,
  Token,
  TruncatedRange,
} from "./types.js";

export const stopReason = (value: wire.StopReason): StopReason => nameOf(wire.StopReason, value);
export const sessionState = (value: wire.SessionState): SessionState => nameOf(wire.SessionState, value);
export const spanKind = (value: wire.SpanKind): SpanKind => nameOf(wire.SpanKind, value);

export function toToken(token: wire.Token): Token {
  const top = token.top.map((each) => ({ id: each.tokenId, logprob: each.logprob }));
  return { id: token.tokenId, logprob: token.logprob, samplingLogprob: token.samplingLogprob, top };
}

export function toTruncatedRange(range: wire.HistoryTruncated): TruncatedRange {
  return { from: fromWire(range.fromPosition), to: fromWire(range.toPosition) };
}

export function toDone(done: wire.Done): Done {
  return {
    stopReason: stopReason(done.stopReason),
    generatedTokenCount: done.generatedTokenCount,
    prefillTokens: fromWire(done.prefillTokens),
    prefillDurationSeconds: done.prefillDurationSeconds,
    totalDurationSeconds: done.totalDurationSeconds,
    acceptedDraftTokens: fromWire(done.acceptedDraftTokens),
    proposedDraftTokens: fromWire(done.proposedDraftTokens),
    droppedTokenCount: fromWire(done.droppedTokenCount),
    seed: done.seed,
    historyLength: fromWire(done.historyLength),
  };
}

export function toCreationFacts(created: wire.CreateSessionResponse): CreationFacts {
  const { sink, recent, modelFingerprint } = created;
  return { sink, recent, kvReservedBytes: fromWireIfAny(created.kvReservedBytes), modelFingerprint };
}

export function toModelInfo(info: wire.GetModelInfoResponse): ModelInfo {
  const { $typeName, $unknown, ...fields } = info;
  return fields;
}

export function toCluster({ members, thisMember, isCluster }: wire.GetClusterResponse): Cluster {
  const toMember = ({ $typeName, $unknown, ...member }: wire.ClusterMember): Member => ({
    ...member,
    leaseLeftSeconds: member.leaseLeftSeconds,
    epoch: fromWire(member.epoch),
  });
  return { members: members.map(toMember), thisMember, isCluster };
}

export function toSessionInfo(info: wire.SessionInfo): SessionInfo {
  return {
    sessionId: info.sessionId,
    label: info.clientLabel,
    state: sessionState(info.state),
    busy: info.busy,
    historyLength: fromWire(info.historyLength),
    droppedTokenCount: fromWire(info.droppedTokenCount),
    kvLiveBytes: fromWireIfAny(info.kvLiveBytes),
    kvReservedBytes: fromWireIfAny(info.kvReservedBytes),
    inv1Violations: fromWire(info.inv1Violations),
    inv2Violations: fromWire(info.inv2Violations),
    idleSeconds: info.idleSeconds,
    spans: {
      givenSpans: fromWire(info.spans?.givenSpans ?? 0n),
      givenTokens: fromWire(info.spans?.givenTokens ?? 0n),
      sampledSpans: fromWire(info.spans?.sampledSpans ?? 0n),
      sampledTokens: fromWire(info.spans?.sampledTokens ?? 0n),
    },
    metadata: info.metadata,
    failure: info.failure || undefined,
    sink: info.sink,
    recent: info.recent,
    rewindCount: fromWire(info.rewindCount),
  };
}

export function toPassage({ turn, role, text, fromPosition, toPosition, score }: wire.Passage): Passage {
  return { turn: fromWire(turn), role, text, from: fromWire(fromPosition), to: fromWire(toPosition), score };
}

export function toHistoryChunk(chunk: wire.HistoryChunk): HistoryChunk {
  const { tokenIds, logprobs, samplingLogprobs } = chunk;
  const isLast = chunk.stopReason !== wire.StopReason.UNSPECIFIED;
  return {
    from: fromWire(chunk.fromPosition),
    kind: spanKind(chunk.kind),
    tokenIds,
    logprobs,
    samplingLogprobs,
    stopReason: isLast ? stopReason(chunk.stopReason) : undefined,
  };
}

/** The name of an enum's value; `UNSPECIFIED` for one that a newer server added. */
function nameOf<E extends Record<string, string | number>>(names: E, value: number): Extract<keyof E, string> {
  return (names[value] ?? "UNSPECIFIED") as Extract<keyof E, string>;
}
