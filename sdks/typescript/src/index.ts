/** Holdfast sessions of raw token ids, over gRPC. */
export * from "./client.js";
export type { EndpointOptions, TlsOptions } from "./endpoint.js";
export * from "./errors.js";
export type { Generation } from "./generation.js";
export type { CallOptions } from "./limits.js";
export type { GenerateOptions, SamplingOptions } from "./sampling.js";
export type { AppendOptions, ExportOptions, ForkOptions, HistoryOptions, SearchOptions, Session } from "./session.js";
export type * from "./types.js";
