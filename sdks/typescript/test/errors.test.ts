import { Metadata, status } from "@grpc/grpc-js";
import { describe, expect, test } from "vitest";
import * as sdk from "../src/index.js";
import { translate } from "../src/status.js";
import { clientOf, connected, failureOf } from "./fixture.js";
import { Refusal } from "./server.js";
import { wireTo } from "./wire.js";

/** The error table of the wire; codes that gRPC never carries are sent with the status nearest to their meaning. */
const table: [string, status, new (message: string) => sdk.HoldfastError][] = [
  ["session_not_found", status.NOT_FOUND, sdk.SessionNotFound],
  ["session_elsewhere", status.UNAVAILABLE, sdk.SessionElsewhere],
  ["session_busy", status.ABORTED, sdk.SessionBusy],
  ["history_conflict", status.ABORTED, sdk.HistoryConflict],
  ["message_mismatch", status.INVALID_ARGUMENT, sdk.MessageMismatch],
  ["invalid_argument", status.INVALID_ARGUMENT, sdk.InvalidArgument],
  ["unauthenticated", status.UNAUTHENTICATED, sdk.Unauthenticated],
  ["capacity_exhausted", status.RESOURCE_EXHAUSTED, sdk.CapacityExhausted],
  ["queue_timeout", status.RESOURCE_EXHAUSTED, sdk.QueueTimeout],
  ["quota_exceeded", status.RESOURCE_EXHAUSTED, sdk.QuotaExceeded],
  ["session_failed", status.FAILED_PRECONDITION, sdk.SessionFailed],
  ["tokenization_mismatch", status.INTERNAL, sdk.TokenizationMismatch],
  ["upstream_invalid", status.UNAVAILABLE, sdk.UpstreamInvalid],
  ["upstream_unreachable", status.UNAVAILABLE, sdk.UpstreamUnreachable],
  ["upstream_timeout", status.DEADLINE_EXCEEDED, sdk.UpstreamTimeout],
  ["upstream_aborted", status.UNAVAILABLE, sdk.UpstreamAborted],
  ["upstream_unavailable", status.UNAVAILABLE, sdk.UpstreamUnavailable],
  ["context_length_exceeded", status.INVALID_ARGUMENT, sdk.ContextLengthExceeded],
  ["template_error", status.INVALID_ARGUMENT, sdk.TemplateError],
  ["idempotency_mismatch", status.ABORTED, sdk.IdempotencyMismatch],
  ["journal_failed", status.UNAVAILABLE, sdk.JournalFailed],
  ["fenced", status.UNAVAILABLE, sdk.Fenced],
  ["storage_unavailable", status.UNAVAILABLE, sdk.StorageUnavailable],
  ["recompute_too_long", status.FAILED_PRECONDITION, sdk.RecomputeTooLong],
  ["payload_too_large", status.RESOURCE_EXHAUSTED, sdk.PayloadTooLarge],
  ["unimplemented", status.UNIMPLEMENTED, sdk.Unimplemented],
  ["draining", status.UNAVAILABLE, sdk.Draining],
];

async function refusedWith(refusal: Refusal): Promise<sdk.HoldfastError> {
  const closeSession = () => {
    throw refusal;
  };
  const client = await connected({ closeSession }, { retries: 0 });
  return (await failureOf(client.session("s").close())) as sdk.HoldfastError;
}

describe("a code of the table", () => {
  test.each(table)("%s is raised as its class, with its facts", async (code, grpcStatus, Class) => {
    const error = await refusedWith(new Refusal(grpcStatus, code, { fact: "7" }));
    expect(error).toBeInstanceOf(Class);
    expect(error).toMatchObject({ name: Class.name, code, grpcStatus, details: { fact: "7" } });
    expect(error.message).toBe(`refused: ${code}`);
  });

  test("every class of the SDK but the local ones is in the table", () => {
    const local = ["HoldfastError", "ConnectionFailed", "DeadlineExceeded", "Cancelled"];
    const classes = Object.values(sdk).filter((each) => each.prototype instanceof Error);
    const names = classes.map((each) => each.name).filter((name) => !local.includes(name));
    expect(names.sort()).toEqual(table.map(([, , Class]) => Class.name).sort());
  });
});

test("a code that this version does not know keeps its name on the base class", async () => {
  const error = await refusedWith(new Refusal(status.DATA_LOSS, "brand_new", { why: "later" }));
  expect(error.constructor).toBe(sdk.HoldfastError);
  expect(error).toMatchObject({ code: "brand_new", grpcStatus: status.DATA_LOSS, details: { why: "later" } });
});

test("an ErrorInfo of another domain says nothing", async () => {
  const error = await refusedWith(new Refusal(status.NOT_FOUND, "session_busy", {}, "example.org"));
  expect(error.constructor).toBe(sdk.HoldfastError);
  expect(error).toMatchObject({ code: "unknown", grpcStatus: status.NOT_FOUND });
});

test.each([
  [status.UNAVAILABLE, sdk.ConnectionFailed],
  [status.DEADLINE_EXCEEDED, sdk.DeadlineExceeded],
  [status.CANCELLED, sdk.Cancelled],
  [status.UNAUTHENTICATED, sdk.Unauthenticated],
  [status.UNIMPLEMENTED, sdk.Unimplemented],
])("status %i without a code has its own class", async (grpcStatus, Class) => {
  const error = await refusedWith(new Refusal(grpcStatus));
  expect(error).toBeInstanceOf(Class);
  expect(error).toMatchObject({ grpcStatus, details: {} });
});

test("a trailer that cannot be read leaves the status", () => {
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from([0xff, 0xff, 0xff]));
  const failed = Object.assign(new Error("x"), { code: status.UNAVAILABLE, details: "x", metadata });
  expect(translate(failed)).toBeInstanceOf(sdk.ConnectionFailed);
});

test("no server at all is ConnectionFailed", async () => {
  const nobody = await wireTo(1);
  nobody.close();
  const client = clientOf(nobody.address, { retries: 0 });
  expect(await failureOf(client.modelInfo())).toBeInstanceOf(sdk.ConnectionFailed);
});

test("a method that the server does not have is Unimplemented", async () => {
  const client = await connected({});
  expect(await failureOf(client.modelInfo())).toBeInstanceOf(sdk.Unimplemented);
});
