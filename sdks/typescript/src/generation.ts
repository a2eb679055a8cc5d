/** Tokens as they are sampled. Knows the events, not where they come from. */
import { toDone, toToken, toTruncatedRange } from "./convert.js";
import { Cancelled, ConnectionFailed } from "./errors.js";
import type { GenerateEvent } from "./gen/holdfast/v1/runtime_pb.js";
import type { Completion, Done, Token, TruncatedRange } from "./types.js";

/**
 * A running generation. It starts at once; its tokens are kept, at most `maxTokens` of them, so they can be read late
 * and more than once. Leaving `for await` early cancels it. Tokens that were sampled stay in the session's history.
 */
export class Generation implements AsyncIterable<Token> {
  /** The end; rejects where the generation failed or was cancelled. Needs no reader of the tokens. */
  readonly done: Promise<Done>;
  readonly #controller = new AbortController();
  readonly #tokens: Token[] = [];
  readonly #truncated: TruncatedRange[] = [];
  #state: "running" | "over" | "cancelled" | "aborted" = "running";
  #changed = new Change();

  /** @internal */
  constructor(events: (signal: AbortSignal) => AsyncIterable<GenerateEvent>, signal?: AbortSignal) {
    const abort = () => this.#stop("aborted", signal?.reason);
    if (signal?.aborted) abort();
    signal?.addEventListener("abort", abort, { once: true });
    this.done = this.#follow(events(this.#controller.signal)).finally(() => {
      signal?.removeEventListener("abort", abort);
      if (this.#state === "running") this.#state = "over";
      this.#announce();
    });
    // The reader of the tokens gets the error too; nobody has to look at both.
    this.done.catch(() => {});
  }

  /** The ranges that left the model's sight, so far. */
  get truncated(): readonly TruncatedRange[] {
    return this.#truncated;
  }

  /** Stops sampling: loops over the tokens end, `done` rejects with `Cancelled`. Once it is over, nothing happens. */
  cancel(): void {
    this.#stop("cancelled", new Error("the generation was left"));
  }

  /** Everything at once, when it is over. */
  async collect(): Promise<Completion> {
    const done = await this.done;
    const tokens = [...this.#tokens];
    return { tokens, tokenIds: tokens.map((each) => each.id), truncated: [...this.#truncated], done };
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Token, void, undefined> {
    try {
      for (let index = 0; ; index++) {
        while (index >= this.#tokens.length && this.#state === "running") await this.#changed.happened;
        if (this.#state === "cancelled") return;
        // Aborted: throws at once. Failed: throws after what came before.
        const token = this.#tokens[index];
        if (token === undefined || this.#state === "aborted") await this.done;
        if (token === undefined) return;
        yield token;
      }
    } finally {
      this.cancel();
    }
  }

  async #follow(events: AsyncIterable<GenerateEvent>): Promise<Done> {
    let done: Done | undefined;
    try {
      for await (const { event } of events) {
        if (event.case === "tokens") this.#tokens.push(...event.value.tokens.map(toToken));
        else if (event.case === "token") this.#tokens.push(toToken(event.value));
        else if (event.case === "truncated") this.#truncated.push(toTruncatedRange(event.value));
        else if (event.case === "done") done = toDone(event.value);
        this.#announce();
      }
    } catch (error) {
      // Cancelled between the last event and the end of the call: it was over already.
      if (!(done && error instanceof Cancelled)) throw error;
    }
    if (done) return done;
    throw new ConnectionFailed("the server ended the generation without saying how");
  }

  #stop(state: "cancelled" | "aborted", reason: unknown): void {
    if (this.#state !== "running") return;
    this.#state = state;
    this.#announce();
    this.#controller.abort(reason);
  }

  #announce(): void {
    this.#changed.happen();
    this.#changed = new Change();
  }
}

/** A promise that is resolved from outside. */
class Change {
  happen!: () => void;
  readonly happened = new Promise<void>((resolve) => {
    this.happen = resolve;
  });
}
