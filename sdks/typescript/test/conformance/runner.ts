/** Runs a scenario with this SDK. */
import { expect } from "vitest";
import * as sdk from "../../src/index.js";
import { gathered } from "../fixture.js";
import { pascalCase, toFields, toOptions } from "./names.js";
import type { Fields, Scenario, Step } from "./scenario.js";

export async function run(client: sdk.Client, scenario: Scenario): Promise<void> {
  const runner = new Runner(client);
  try {
    for (const [index, step] of scenario.steps.entries()) {
      const which = `${scenario.name}, step ${index + 1} (${step.call})`;
      await runner.step(step, which);
    }
  } finally {
    await runner.close();
  }
}

class Runner {
  readonly #client: sdk.Client;
  readonly #sessions = new Map<string, sdk.Session>();
  readonly #saved = new Map<string, unknown>();
  readonly #files = new Map<string, Buffer>();

  constructor(client: sdk.Client) {
    this.#client = client;
  }

  async step(step: Step, which: string): Promise<void> {
    let result: Fields;
    try {
      result = await this.#call(step);
    } catch (error) {
      if (!(error instanceof sdk.HoldfastError)) throw error;
      return checkError(error, step, which);
    }
    expect(step.error, `${which}: it succeeded`).toBeUndefined();
    if (step.save_tokens) this.#saved.set(step.save_tokens, result.token_ids);
    const { same_tokens_as, min_length, ...expected } = step.expect ?? {};
    if (typeof same_tokens_as === "string") {
      expect(result.token_ids, which).toBeDefined();
      expect(result.token_ids, which).toEqual(this.#saved.get(same_tokens_as));
    }
    if (min_length !== undefined) {
      expect((result.token_ids as number[]).length, which).toBeGreaterThanOrEqual(min_length as number);
    }
    expect(result, which).toMatchObject(expected);
  }

  /** The server has few places: what a scenario left open is closed. */
  async close(): Promise<void> {
    for (const session of this.#sessions.values()) await session[Symbol.asyncDispose]();
  }

  async #call(step: Step): Promise<Fields> {
    // Scenarios are checked by the server, not by the compiler: options pass as they are written.
    const options = toOptions(step.with ?? {}) as never;
    switch (step.call) {
      case "model_info":
        return toFields(await this.#client.modelInfo());
      case "list_sessions":
        return { sessions: (await gathered(this.#client.listSessions(options))).map(toFields) };
      case "create_session":
        return this.#made(step, await this.#client.createSession(options));
      case "fork":
        return this.#made(step, await this.#session(step).fork(options));
      case "export":
        this.#files.set(step.save_file ?? "", Buffer.concat(await gathered(this.#session(step).export(options))));
        return {};
      case "import":
        return this.#made({ as: "", ...step }, await this.#client.importSession([this.#file(step)]));
      case "generate":
      case "generate_and_leave":
        return tokensOf(this.#session(step).generate(options), step);
      case "history":
        return historyOf(await gathered(this.#session(step).history(options)));
      case "info":
        return toFields(await this.#session(step).info());
      case "close":
        return toFields(await this.#session(step).close());
    }
    if (step.call === "search") return passagesOf(this.#session(step), options);
    const { tokenIds = [], to, ...rest } = options as { tokenIds?: number[]; to: number };
    switch (step.call) {
      case "append":
        return toFields(await this.#session(step).append(tokenIds, rest));
      case "turn":
        return tokensOf(this.#session(step).turn(tokenIds, rest as sdk.GenerateOptions), step);
      case "rewind":
        return toFields(await this.#session(step).rewind(to));
    }
    throw new Error(`no such call: ${step.call}`);
  }

  #session(step: Step): sdk.Session {
    if (step.session_id !== undefined) return this.#client.session(step.session_id);
    const session = this.#sessions.get(step.session ?? "");
    if (!session) throw new Error(`no session is named ${step.session}`);
    return session;
  }

  #file(step: Step): Uint8Array {
    const bytes = this.#files.get(step.file ?? "");
    if (!bytes) throw new Error(`no file is named ${step.file}`);
    return bytes.subarray(0, bytes.length - (step.cut ?? 0));
  }

  #made(step: Step, session: sdk.Session): Fields {
    if (step.as === undefined) throw new Error(`${step.call} needs "as"`);
    this.#sessions.set(step.as, session);
    const { id, ...facts } = toFields(session);
    return { ...facts, session_id: id, history_length: session.historyLength };
  }
}

function checkError(error: sdk.HoldfastError, step: Step, which: string): void {
  if (step.error === undefined) throw new Error(`${which} failed: ${error.code}: ${error.message}`, { cause: error });
  expect({ class: error.name, code: error.code }, which).toEqual({ class: pascalCase(step.error), code: step.error });
  expect(error, which).toBeInstanceOf((sdk as unknown as Record<string, unknown>)[pascalCase(step.error)]);
  expect(error.details, which).toMatchObject(step.details ?? {});
}

async function tokensOf(generation: sdk.Generation, step: Step): Promise<Fields> {
  const tokens: sdk.Token[] = [];
  const isLeaving = step.call === "generate_and_leave";
  for await (const token of generation) {
    tokens.push(token);
    if (isLeaving && tokens.length === step.after) break;
  }
  return {
    ...(isLeaving ? {} : toFields(await generation.done)),
    token_ids: tokens.map((token) => token.id),
    num_tokens: tokens.length,
    truncated: generation.truncated.map(({ from, to }) => [from, to]),
    all_logprobs_finite: areFinite(tokens.flatMap((token) => [token.logprob, token.samplingLogprob])),
  };
}

async function passagesOf(session: sdk.Session, asked: { query?: string; queryTokenIds?: number[] }): Promise<Fields> {
  const { query, queryTokenIds, ...options } = asked;
  const passages = await session.search(queryTokenIds ?? query ?? "", options);
  return {
    passages: passages.map(({ from, to, ...fields }) => ({ ...fields, from_position: from, to_position: to })),
  };
}

/** Neighbouring chunks of one kind count as one: how long spans are cut is the server's affair. */
function historyOf(chunks: sdk.HistoryChunk[]): Fields {
  for (const chunk of chunks) {
    const count = chunk.kind === "SAMPLED" ? chunk.tokenIds.length : 0;
    expect([chunk.logprobs.length, chunk.samplingLogprobs.length]).toEqual([count, count]);
  }
  const kinds = chunks.map((chunk) => chunk.kind);
  return {
    token_ids: chunks.flatMap((chunk) => chunk.tokenIds),
    kinds: kinds.filter((kind, index) => kind !== kinds[index - 1]),
    all_logprobs_finite: areFinite(chunks.flatMap((chunk) => chunk.logprobs)),
  };
}

const areFinite = (numbers: number[]) => numbers.every(Number.isFinite);
