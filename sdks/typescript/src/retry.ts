/** Sending again, where that is safe. Knows errors and clocks, not what is being sent. */
import { setTimeout as sleep } from "node:timers/promises";
import {
  Cancelled,
  ConnectionFailed,
  Draining,
  Fenced,
  HoldfastError,
  SessionBusy,
  SessionElsewhere,
} from "./errors.js";
import type { Limits } from "./limits.js";

/** How long to wait after a failed attempt: the first time, and at most. */
export interface Pauses {
  firstMs: number;
  longestMs: number;
}

/** When an attempt is followed by another: each of `retries` more rounds goes once through all addresses. */
export interface Policy {
  retries: number;
  numAddresses: number;
  limits: Limits;
  isSafe: (error: unknown) => boolean;
}

const BETWEEN_ATTEMPTS: Pauses = { firstMs: 200, longestMs: 5_000 };
const GONE = [ConnectionFailed, Draining, Fenced, SessionElsewhere];

/** Whether the server was not there, said that it is about to leave, or is the wrong one: another may do better. */
export function isTransient(error: unknown): boolean {
  return GONE.some((each) => error instanceof each);
}

/** Whether nobody has begun to carry out the call. */
export function isUntouched(error: unknown): boolean {
  return error instanceof HoldfastError && error.isUntouched;
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

/** Whether the call is to be sent again after `failed` attempts, the last with this error; waits after each round. */
export async function mayRepeat(failed: number, error: unknown, policy: Policy): Promise<boolean> {
  const rounds = Math.floor(failed / policy.numAddresses);
  if (rounds > policy.retries || !policy.isSafe(error)) return false;
  const mustWait = failed % policy.numAddresses === 0 || error instanceof SessionBusy;
  return mustWait ? pause(Math.max(0, rounds - 1), policy.limits) : Date.now() < policy.limits.deadline;
}

/** What `attempt` gives; run again while it fails in a way that the policy allows. */
export async function retrying<T>(attempt: () => Promise<T>, policy: Policy): Promise<T> {
  for (let failed = 1; ; failed++) {
    try {
      return await attempt();
    } catch (error) {
      if (!(await mayRepeat(failed, error, policy))) throw error;
    }
  }
}
