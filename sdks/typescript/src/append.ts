/** Appending exactly once over a connection that may be lost. */
import type { Connection } from "./connection.js";
import { HistoryConflict, SessionBusy } from "./errors.js";
import { RuntimeService } from "./gen/holdfast/v1/runtime_pb.js";
import { fromWire, toWire } from "./integers.js";
import type { Limits } from "./limits.js";
import { isTransient, isUntouched, retrying } from "./retry.js";
import type { AppendResult } from "./types.js";

/** Tokens for the end of a history of `expectedHistoryLength`. */
export interface Append {
  sessionId: string;
  tokenIds: number[];
  expectedHistoryLength: number;
}

/**
 * Sends until answered. The expected length makes that safe: if the answer to an attempt was lost but its tokens had
 * arrived, the next attempt is refused with exactly the length that the first one made.
 */
export async function appendOnce(connection: Connection, append: Append, limits: Limits): Promise<AppendResult> {
  const { expectedHistoryLength, ...given } = append;
  const request = { ...given, expectedHistoryLength: toWire(expectedHistoryLength, "expectedHistoryLength") };
  const arrivedLength = expectedHistoryLength + append.tokenIds.length;
  let wasLost = false;

  const attempt = async (): Promise<AppendResult> => {
    try {
      const answer = await connection.unary(RuntimeService.method.appendTokens, request, limits);
      return {
        historyLength: fromWire(answer.historyLength),
        prefilledTokens: fromWire(answer.prefilledTokens),
        prefillDurationSeconds: answer.prefillDurationSeconds,
      };
    } catch (error) {
      if (wasLost && error instanceof HistoryConflict && Number(error.details.history_length) === arrivedLength) {
        return { historyLength: arrivedLength };
      }
      // A draining server may have taken the tokens before it gave up on computing them.
      if (isTransient(error) && !isUntouched(error)) wasLost = true;
      throw error;
    }
  };

  // After a lost attempt the session may be busy with that very attempt.
  const isSafe = (error: unknown) => isTransient(error) || (wasLost && error instanceof SessionBusy);
  return retrying(attempt, connection.policy(limits, isSafe));
}
