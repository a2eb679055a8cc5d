/** The contract's names and the SDK's. */
import type { Fields } from "./scenario.js";

/** What the SDK calls otherwise than the contract, besides the case. */
const RENAMED: Record<string, string> = { client_label: "label", from_position: "from", to_position: "to" };
const RENAMED_BACK: Record<string, string> = { label: "client_label" };

/** Request fields as options. */
export function toOptions(fields: Fields): Fields {
  return Object.fromEntries(Object.entries(fields).map(([name, value]) => [RENAMED[name] ?? camelCase(name), value]));
}

/** A result by the contract's field names. Values of `metadata` keep theirs; what is absent is left out. */
export function toFields(result: object): Fields {
  const entries = Object.entries(result).filter(([, value]) => value !== undefined);
  return Object.fromEntries(
    entries.map(([name, value]) => [
      RENAMED_BACK[name] ?? snakeCase(name),
      name === "spans" ? toFields(value) : typeof value === "bigint" ? comparable(value) : value,
    ]),
  );
}

/** The class for a code. */
export function pascalCase(code: string): string {
  const name = camelCase(code);
  return name.charAt(0).toUpperCase() + name.slice(1);
}

function camelCase(name: string): string {
  return name.replace(/_([a-z])/g, (_, letter: string) => letter.toUpperCase());
}

function snakeCase(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}

/** As a scenario file's number is read. */
function comparable(value: bigint): number | bigint {
  return String(value).length < 16 ? Number(value) : value;
}
