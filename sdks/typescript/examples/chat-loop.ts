/**
 * A conversation in token ids: every line on stdin is a turn, and its tokens are printed as they are sampled.
 *
 *   echo "1 9690 198" | npm run --silent example -- 127.0.0.1:50051
 *
 * Ctrl-C stops the turn that is running; twice, or between turns, it ends the conversation.
 */
import { createInterface } from "node:readline/promises";
import { Cancelled, Client, HoldfastError } from "holdfast-llm-sdk";

const [address = "127.0.0.1:50051", maxTokens = "32"] = process.argv.slice(2);

await using client = new Client(address, { apiKey: process.env.HOLDFAST_API_KEY });
await using session = await client.createSession({ label: "chat-loop" });
console.error(`session ${session.id}: the first ${session.sink} tokens and the last ${session.recent} stay visible`);

let running: AbortController | undefined;
process.on("SIGINT", () => {
  if (!running || running.signal.aborted) lines.close();
  running?.abort();
});

const lines = createInterface({ input: process.stdin });
for await (const line of lines) {
  const ids = line
    .split(/[\s,]+/)
    .filter(Boolean)
    .map(Number);
  if (ids.length === 0) continue;
  running = new AbortController();
  try {
    const turn = session.turn(ids, { maxTokens: Number(maxTokens), signal: running.signal });
    for await (const token of turn) process.stdout.write(`${token.id} `);
    const { stopReason, historyLength } = await turn.done;
    process.stdout.write("\n");
    console.error(`${stopReason}, ${historyLength} tokens so far`);
    for (const { from, to } of turn.truncated) console.error(`the model no longer sees positions ${from} to ${to}`);
  } catch (error) {
    if (!(error instanceof HoldfastError)) throw error;
    console.error(error instanceof Cancelled ? "\nstopped" : `\n${error.code}: ${error.message}`);
  }
  running = undefined;
}
