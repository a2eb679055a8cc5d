/** Sending again, where that is safe. Knows errors and clocks, not what is being sent. */
import { setTimeout as sleep } from "node:timers/promises";
import { Cancelled, ConnectionFailed, Draining } from "./errors.js";
import type { Limits } from "./limits.js";

/** How long to wait after a failed attempt: the first time, and at most. */
export interface Pauses {
  firstMs: number;
  longestMs: number;
}

const BETWEEN_ATTEMPTS: Pauses = { firstMs: 200, longestMs: 5_000 };

/** Whether the server was not there, or said that it is about to leave. */
export function isTransient(error: unknown): boolean {
  return error instanceof ConnectionFailed || error instanceof Draining;
}

/** Milliseconds before attempt `attempt + 1`: doubled each time, and anywhere in the upper half of that. */
export function pauseMs(attempt: number, pauses = BETWEEN_ATTEMPTS, random = Math.random()): number {
  const longest = Math.min(pauses.longestMs, pauses.firstMs * 2 ** attempt);
  return longest * (0.5 + random / 2);
}

/** Waits before another attempt; false, at once, where the deadline would pass meanwhile. */
export async function pause(attempt: number, limits: Limits, pauses?: Pauses): Promise<boolean> {
  const ms = pauseMs(attempt, pauses);
  if (Date.now() + ms >= limits.deadline) return false;
  try {
    await sleep(ms, undefined, { signal: limits.signal });
  } catch (error) {
    throw new Cancelled("cancelled while waiting to try again", { cause: limits.signal?.reason ?? error });
  }
  return true;
}

/** What `attempt` gives; run up to `retries` more times while it fails in a way that `isSafe` names. */
export async function retrying<T>(
  attempt: () => Promise<T>,
  policy: { retries: number; limits: Limits; isSafe?: (error: unknown) => boolean },
): Promise<T> {
  const isSafe = policy.isSafe ?? isTransient;
  for (let failed = 0; ; failed++) {
    try {
      return await attempt();
    } catch (error) {
      if (failed >= policy.retries || !isSafe(error) || !(await pause(failed, policy.limits))) throw error;
    }
  }
}
