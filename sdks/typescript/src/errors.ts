/**
 * Every error the SDK raises. One class per stable code; what has no code, or one that this
 * version does not know, is a plain `HoldfastError`.
 *
 * ```text
 * HoldfastError
 * ├── SessionNotFound        no such session, or closed, expired, evicted (details.detail)
 * ├── SessionElsewhere       another member of the cluster owns it; nothing was done. Ask another address
 * ├── SessionBusy            one operation at a time
 * ├── HistoryConflict        the history has another length (details.history_length)
 * ├── MessageMismatch        chat history is not append-only
 * ├── InvalidArgument        the request cannot be; nothing was changed
 * ├── Unauthenticated        no key, or a wrong one
 * ├── CapacityExhausted      no free place
 * ├── QueueTimeout           waited too long for a place
 * ├── QuotaExceeded          you have as much as one owner may have; `details` names the setting
 * ├── SessionFailed          this session is broken; its neighbours are not
 * ├── TokenizationMismatch   text and tokens disagree
 * ├── UpstreamInvalid        the backend's answer cannot be used
 * ├── UpstreamUnreachable    the backend is not there
 * ├── UpstreamTimeout        the backend took too long
 * ├── UpstreamAborted        the backend gave up
 * ├── UpstreamUnavailable    the backend is not there at this moment
 * ├── ContextLengthExceeded  the new tokens alone exceed the window
 * ├── TemplateError          the chat template cannot render this
 * ├── IdempotencyMismatch    one idempotency key, two requests
 * ├── JournalFailed          the history could not be made durable
 * ├── Fenced                 the server lost its lease and stops; another member has its sessions
 * ├── StorageUnavailable     the disk is not there
 * ├── RecomputeTooLong       more tokens to recompute than the server allows
 * ├── PayloadTooLarge        the request is too big
 * ├── Unimplemented          this server cannot do that
 * ├── Draining               the server is shutting down
 * ├── ConnectionFailed       no server, or the connection was lost: the call may have arrived, unless `isUntouched`
 * ├── DeadlineExceeded       the time ran out: the call may or may not have arrived
 * └── Cancelled              by an AbortSignal, by `cancel()`, or by closing the client
 * ```
 */
import { status } from "@grpc/grpc-js";

/** What an error knows besides its message. */
export interface ErrorFacts {
  /** The stable code, where it is not the one of the class. */
  code?: string;
  details?: Readonly<Record<string, string>>;
  grpcStatus?: status;
  cause?: unknown;
}

/** Base of all. `code` is stable: programs may depend on it; the message is for people. */
export class HoldfastError extends Error {
  static readonly code: string = "unknown";
  /** The stable code, for example `history_conflict`. */
  readonly code: string;
  /** The facts that came with the code, for example `{ history_length: "7" }`. */
  readonly details: Readonly<Record<string, string>>;
  /** The gRPC status number (`status` of `@grpc/grpc-js`). */
  readonly grpcStatus: status;

  constructor(message: string, facts: ErrorFacts = {}) {
    super(message, facts.cause === undefined ? undefined : { cause: facts.cause });
    this.name = new.target.name;
    this.code = facts.code ?? new.target.code;
    this.details = facts.details ?? {};
    this.grpcStatus = facts.grpcStatus ?? status.UNKNOWN;
  }

  /** Whether nobody has begun to carry out the call: it never left, or was turned away at once. */
  get isUntouched(): boolean {
    return this.details.accepted === "false";
  }
}

export class SessionNotFound extends HoldfastError {
  static override readonly code = "session_not_found";
}
export class SessionElsewhere extends HoldfastError {
  static override readonly code = "session_elsewhere";
  override get isUntouched(): boolean {
    return true;
  }
}
export class SessionBusy extends HoldfastError {
  static override readonly code = "session_busy";
}
export class HistoryConflict extends HoldfastError {
  static override readonly code = "history_conflict";
}
export class MessageMismatch extends HoldfastError {
  static override readonly code = "message_mismatch";
}
export class InvalidArgument extends HoldfastError {
  static override readonly code = "invalid_argument";
}
export class Unauthenticated extends HoldfastError {
  static override readonly code = "unauthenticated";
}
export class CapacityExhausted extends HoldfastError {
  static override readonly code = "capacity_exhausted";
}
export class QueueTimeout extends HoldfastError {
  static override readonly code = "queue_timeout";
}
export class QuotaExceeded extends HoldfastError {
  static override readonly code = "quota_exceeded";
}
export class SessionFailed extends HoldfastError {
  static override readonly code = "session_failed";
}
export class TokenizationMismatch extends HoldfastError {
  static override readonly code = "tokenization_mismatch";
}
export class UpstreamInvalid extends HoldfastError {
  static override readonly code = "upstream_invalid";
}
export class UpstreamUnreachable extends HoldfastError {
  static override readonly code = "upstream_unreachable";
}
export class UpstreamTimeout extends HoldfastError {
  static override readonly code = "upstream_timeout";
}
export class UpstreamAborted extends HoldfastError {
  static override readonly code = "upstream_aborted";
}
export class UpstreamUnavailable extends HoldfastError {
  static override readonly code = "upstream_unavailable";
}
export class ContextLengthExceeded extends HoldfastError {
  static override readonly code = "context_length_exceeded";
}
export class TemplateError extends HoldfastError {
  static override readonly code = "template_error";
}
export class IdempotencyMismatch extends HoldfastError {
  static override readonly code = "idempotency_mismatch";
}
export class JournalFailed extends HoldfastError {
  static override readonly code = "journal_failed";
}
export class Fenced extends HoldfastError {
  static override readonly code = "fenced";
}
export class StorageUnavailable extends HoldfastError {
  static override readonly code = "storage_unavailable";
}
export class RecomputeTooLong extends HoldfastError {
  static override readonly code = "recompute_too_long";
}
export class PayloadTooLarge extends HoldfastError {
  static override readonly code = "payload_too_large";
}
export class Unimplemented extends HoldfastError {
  static override readonly code = "unimplemented";
}
export class Draining extends HoldfastError {
  static override readonly code = "draining";
}
export class ConnectionFailed extends HoldfastError {
  static override readonly code = "connection_failed";
}
export class DeadlineExceeded extends HoldfastError {
  static override readonly code = "deadline_exceeded";
}
export class Cancelled extends HoldfastError {
  static override readonly code = "cancelled";
}
