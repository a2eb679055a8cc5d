/** Events of a generation, as a server sends them. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { DoneSchema, GenerateEventSchema } from "../src/gen/holdfast/v1/runtime_pb.js";

export type EventInit = MessageInitShape<typeof GenerateEventSchema>;

export function token(tokenId: number): EventInit {
  return { event: { case: "token", value: { tokenId, logprob: -0.5, samplingLogprob: -0.25 } } };
}

export function batch(...tokenIds: number[]): EventInit {
  const tokens = tokenIds.map((tokenId) => ({ tokenId, logprob: -0.5, samplingLogprob: -0.25 }));
  return { event: { case: "tokens", value: { tokens } } };
}

export function truncated(from: bigint, to: bigint): EventInit {
  return { event: { case: "truncated", value: { fromPosition: from, toPosition: to } } };
}

export function done(fields: MessageInitShape<typeof DoneSchema> = {}): EventInit {
  return { event: { case: "done", value: fields } };
}
