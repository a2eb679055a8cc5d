/** Scenario files: what they hold and how they are read. */
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

export type Fields = Record<string, unknown>;

export interface Step {
  call: string;
  /** Names the session that this step makes. */
  as?: string;
  session?: string;
  /** A made-up id instead of a session's name. */
  session_id?: string;
  with?: Fields;
  /** For `generate_and_leave`: how many tokens to take first. */
  after?: number;
  expect?: Fields;
  error?: string;
  details?: Fields;
  save_tokens?: string;
  /** For `export`: the name of its bytes. */
  save_file?: string;
  /** For `import`: which bytes, and how many at their end to leave out. */
  file?: string;
  cut?: number;
}

export interface Scenario {
  name: string;
  why: string;
  steps: Step[];
}

const STEP_KEYS = new Set(
  "call as session session_id with after expect error details save_tokens save_file file cut".split(" "),
);

/** The scenarios of a folder, by file name; a step with a key that means nothing is refused. */
export function scenariosIn(folder: string): [file: string, scenario: Scenario][] {
  const files = readdirSync(folder).filter((file) => file.endsWith(".json"));
  return files.sort().map((file) => {
    const scenario = parse(readFileSync(join(folder, file), "utf8")) as Scenario;
    for (const key of scenario.steps.flatMap((step) => Object.keys(step))) {
      if (!STEP_KEYS.has(key)) throw new Error(`${file}: a step has the unknown key ${key}`);
    }
    return [file, scenario];
  });
}

/** JSON whose long integers become bigints: seeds have 64 bits, and JSON.parse would round them. */
function parse(text: string): unknown {
  const marked = text.replace(/([:[,]\s*)(\d{16,})(?=\s*[,\]}])/g, '$1"bigint:$2"');
  return JSON.parse(marked, (_, value) =>
    typeof value === "string" && value.startsWith("bigint:") ? BigInt(value.slice(7)) : value,
  );
}
