// Elements, texts that are safe to look at, numbers as people read them. Nothing here ever parses HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("button.primary", {onclick}, "Send"). Children are nodes or plain texts. */
export function h(spec, attributes = {}, ...children) {
  const [name, ...classes] = spec.split(".");
  return build(document.createElement(name || "div"), classes, attributes, children);
}

/** The same in SVG. */
export function s(spec, attributes = {}, ...children) {
  const [name, ...classes] = spec.split(".");
  return build(document.createElementNS(SVG, name), classes, attributes, children);
}

function build(element, classes, attributes, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace everything in an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Control characters, bidirectional overrides and characters without a shape: what a text could hide with.
// A zero-width joiner inside an emoji stays, so that families look like families.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|(?<!\p{Extended_Pictographic}\ufe0f?|\p{Emoji_Modifier})\u200d/gu;

const NAMES = { 0x1b: "ESC", 0x00: "NUL", 0x07: "BEL", 0x08: "BS", 0x0d: "CR", 0x7f: "DEL", 0xad: "SHY", 0x200b: "ZWSP" };
Object.assign(NAMES, { 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF" });
Object.assign(NAMES, { 0x202d: "LRO", 0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM" });

function nameOf(character) {
  const code = character.codePointAt(0);
  return NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** A text as nodes, with every hidden character as a label of its own. */
export function visible(text) {
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    nodes.push(h("span.hidden-character", { title: "a character that has no shape" }, nameOf(match[0])));
    at = match.index + match[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

/** A text on one line, with every hidden character spelled out: for titles, rows and tokens. */
export function plain(text) {
  return text.replace(HIDDEN, (character) => `⟨${nameOf(character)}⟩`).replace(/\n/g, "↵").replace(/\t/g, "⇥");
}

const GROUPED = new Intl.NumberFormat("en-US");
const SHORT = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export const grouped = (number) => (Number.isFinite(number) ? GROUPED.format(number) : "–");
export const short = (number) => (Number.isFinite(number) ? (Math.abs(number) < 10_000 ? grouped(number) : SHORT.format(number)) : "–");
export const count = (number, one, many = `${one}s`) => `${grouped(number)} ${number === 1 ? one : many}`;

export function bytes(number) {
  if (!Number.isFinite(number)) return "–";
  const power = Math.min(3, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${(number / 1024 ** power).toFixed(power && number / 1024 ** power < 100 ? 1 : 0)} ${["B", "KB", "MB", "GB"][power]}`;
}

/** Seconds in one or two letters: 4 s, 12 min, 3 h, 9 d. */
export function span(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return "now";
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

export const fixed = (number, digits = 3) => (Number.isFinite(number) ? number.toFixed(digits).replace("-", "−") : "–");
export const reward = (number) => (Number.isFinite(number) ? String(Math.round(number * 1000) / 1000).replace("-", "−") : "–");

/** A short sentence that screen readers say and that is seen for a while. */
export function announce(text, kind = "info") {
  const place = document.getElementById("notices");
  const notice = h(`p.notice.${kind}`, {}, text);
  place.append(notice);
  setTimeout(() => notice.remove(), kind === "error" ? 9000 : 4000);
}

/** What stands where there is nothing to show yet, or nothing at all. */
export function placeholder(title, text = "", ...more) {
  return h("div.placeholder", {}, h("strong", {}, title), text && h("p", {}, text), more);
}

export const loading = (text = "Loading") => h("div.placeholder.loading", { role: "status" }, h("span.pulse"), text);
