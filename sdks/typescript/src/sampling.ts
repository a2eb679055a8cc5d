/** How tokens are drawn: the options of `generate` and `turn`, and their message. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { SamplingOptionsSchema } from "./gen/holdfast/v1/runtime_pb.js";
import { toSeed } from "./integers.js";
import type { CallOptions } from "./limits.js";

/** What is left out is the server's choice. */
export interface SamplingOptions {
  /** Any of the 2^64 seeds; a bigint where a number cannot hold it. */
  seed?: number | bigint;
  /** 0 takes the likeliest token. */
  temperature?: number;
  topP?: number;
  topK?: number;
  minP?: number;
  presencePenalty?: number;
  frequencyPenalty?: number;
  repetitionPenalty?: number;
  /** Added to the logits of these token ids. */
  logitBias?: Readonly<Record<number, number>>;
  /** Tokens that end this generation, besides the session's own. */
  stopTokenIds?: Iterable<number>;
  /** How many of the likeliest tokens to report with each token. */
  topLogprobs?: number;
  /** Whether drafts may be proposed. */
  speculation?: boolean;
}

/** Options of `generate` and `turn`. There is no time limit unless `timeoutMs` is given. */
export interface GenerateOptions extends SamplingOptions, CallOptions {
  /** At least 1. */
  maxTokens: number;
  /** Refused with `HistoryConflict` unless the history has this length. */
  expectedHistoryLength?: number;
}

export function toSampling(options: SamplingOptions): MessageInitShape<typeof SamplingOptionsSchema> {
  return {
    seed: options.seed === undefined ? undefined : toSeed(options.seed),
    temperature: options.temperature,
    topP: options.topP,
    topK: options.topK,
    minP: options.minP,
    presencePenalty: options.presencePenalty,
    frequencyPenalty: options.frequencyPenalty,
    repetitionPenalty: options.repetitionPenalty,
    logitBias: { ...options.logitBias },
    stopTokenIds: [...(options.stopTokenIds ?? [])],
    topLogprobs: options.topLogprobs,
    speculation: options.speculation,
  };
}
