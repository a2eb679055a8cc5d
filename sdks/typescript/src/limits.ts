/** How long a call may take and who may stop it, fixed once however often the call is sent. */

/** Accepted by every call. */
export interface CallOptions {
  /** Stops the call; it then fails with `Cancelled`. */
  signal?: AbortSignal;
  /** Milliseconds until the call fails with `DeadlineExceeded`, retries included. */
  timeoutMs?: number;
}

/** A call's end as a moment, so that a second attempt does not start the clock again. */
export interface Limits {
  signal: AbortSignal | undefined;
  /** Milliseconds since the epoch; `Infinity` for none. */
  deadline: number;
}

export function limitsOf(options: CallOptions, defaultTimeoutMs = Number.POSITIVE_INFINITY): Limits {
  return { signal: options.signal, deadline: Date.now() + (options.timeoutMs ?? defaultTimeoutMs) };
}
