/** gRPC statuses to errors, in one place, most specific first: the server's own code, then the status. */
import { fromBinary } from "@bufbuild/protobuf";
import { type Metadata, type ServiceError, status } from "@grpc/grpc-js";
import * as errors from "./errors.js";
import { type ErrorInfo, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "./gen/google/rpc/status_pb.js";

const byCode = new Map(Object.values(errors).map((each) => [each.code, each]));

/** For statuses that came without a code: from gRPC itself, or from something in between. */
const byStatus = new Map<status, typeof errors.HoldfastError>([
  [status.UNAVAILABLE, errors.ConnectionFailed],
  [status.DEADLINE_EXCEEDED, errors.DeadlineExceeded],
  [status.CANCELLED, errors.Cancelled],
  [status.UNAUTHENTICATED, errors.Unauthenticated],
  [status.UNIMPLEMENTED, errors.Unimplemented],
]);

/**
 * How gRPC begins to say that a call found no connection, and so was never sent. A text that is not here is taken as a
 * call that may have arrived: then it is not sent again, unless that is safe.
 */
const neverSent = /^(No connection established|Name resolution failed)/;

/** The error that a failed call means. Anything but a gRPC status is returned as it is. */
export function translate(error: unknown): unknown {
  if (!isServiceError(error)) return error;
  const facts = { grpcStatus: error.code, cause: error };
  const info = error.metadata && errorInfo(error.metadata);
  if (info) {
    const Class = byCode.get(info.reason) ?? errors.HoldfastError;
    return new Class(error.details, { ...facts, code: info.reason, details: info.metadata });
  }
  const Class = byStatus.get(error.code) ?? errors.HoldfastError;
  const isUnsent = error.code === status.UNAVAILABLE && neverSent.test(error.details);
  return new Class(error.details, isUnsent ? { ...facts, details: { accepted: "false" } } : facts);
}

function isServiceError(error: unknown): error is ServiceError {
  return error instanceof Error && "code" in error && typeof error.code === "number" && "details" in error;
}

/** Holdfast's `ErrorInfo` out of the `grpc-status-details-bin` trailer, where there is a readable one. */
function errorInfo(trailers: Metadata): ErrorInfo | undefined {
  for (const value of trailers.get("grpc-status-details-bin")) {
    if (typeof value === "string") continue;
    try {
      for (const detail of fromBinary(StatusSchema, value).details) {
        if (!detail.typeUrl.endsWith("/google.rpc.ErrorInfo")) continue;
        const info = fromBinary(ErrorInfoSchema, detail.value);
        if (info.domain === "holdfast") return info;
      }
    } catch {
      // A trailer that cannot be read says nothing; the gRPC status still does.
    }
  }
  return undefined;
}
