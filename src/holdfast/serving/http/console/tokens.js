// Tokens as running text. Lines are laid out here, page by page, so that only those in sight need to be in the page.

import { fill, fixed, grouped, h, placeholder, plain } from "./dom.js";
import { PAGE } from "./store.js";

const LINE = 24; // pixels
const SPARE = 10; // lines beyond each edge
const AHEAD = 900; // pixels beyond the drawn lines whose pages are asked for
const GAP = 3; // pixels that a token takes besides its text
const GUESS = 5.2; // columns of a token that is not here yet
const KINDS = { given: "given", sampled: "sampled", recalled: "recalled" };

const canvas = document.createElement("canvas").getContext("2d");
const widths = new Map();
const ASCII = /^[\x20-\x7e]*$/;

/** A token as one line of text. An empty one is a byte of a character that others complete. */
export function shown(token) {
  if (token.text === null) return `‹${token.id}›`;
  return token.text === "" ? "∅" : plain(token.text);
}

/** 0 (sure) to 7 (very surprising), for a colour. */
export function heat(logprob) {
  if (!Number.isFinite(logprob)) return null;
  return Math.min(7, Math.floor(-logprob * 1.6));
}

export class TokenView {
  /** `mode`: what colours mean: kind, logprob or mask. `mark`: a position to point at. */
  constructor(store, { label, mode = "kind", mark = null, onlook = () => {} }) {
    this.store = store;
    this.mode = mode;
    this.mark = mark;
    this.onlook = onlook; // told the range of positions in sight
    this.cursor = null;
    this.layouts = new Map(); // page -> { lines, length, generation }
    this.lines = new Map(); // key -> element
    this.isFollowing = false;
    this.space = h("div.token-space");
    this.card = h("aside.token-card", { role: "status", "aria-live": "polite", hidden: true, id: `card-${(TokenView.number = (TokenView.number ?? 0) + 1)}` });
    this.pane = h("div.token-pane", { tabindex: 0, role: "group", "aria-label": label, "aria-roledescription": "tokens", "aria-describedby": this.card.id }, this.space);
    this.element = h("div.token-view", {}, this.pane, this.card);
    this.pane.addEventListener("scroll", () => this._scrolled(), { passive: true });
    this.pane.addEventListener("pointerover", (event) => this._hover(event));
    this.pane.addEventListener("pointerleave", () => this._hide());
    this.pane.addEventListener("click", (event) => this._hover(event, true));
    this.pane.addEventListener("keydown", (event) => this._key(event));
    this.pane.addEventListener("blur", () => this.point(null));
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    store.addEventListener("page", () => this.draw(), { signal });
    store.addEventListener("append", ({ detail }) => this._appended(detail), { signal });
    store.addEventListener("shape", () => this.draw(true), { signal });
    store.addEventListener("problem", ({ detail }) => this._problem(detail), { signal });
    this.observer = new ResizeObserver(() => this._measure() && this.draw(true));
    this.observer.observe(this.pane);
  }

  close() {
    this.stopping.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  setMode(mode) {
    this.mode = mode;
    this.draw(true);
  }

  _measure() {
    const style = getComputedStyle(this.pane);
    const font = `${style.fontSize} ${style.fontFamily}`;
    const gutter = matchMedia("(max-width: 620px)").matches ? 58 : 78; // as in the style sheet
    const width = this.pane.clientWidth - gutter - 14;
    if (font === this.font && width === this.width) return false;
    if (font !== this.font) {
      widths.clear();
      canvas.font = this.font = font;
      this.column = canvas.measureText("0".repeat(64)).width / 64;
    }
    this.anchor = this._top(); // what is at the top stays there
    this.width = width;
    this.layouts.clear();
    return width > 0;
  }

  _widthOf(text) {
    if (ASCII.test(text)) return text.length * this.column + GAP;
    let width = widths.get(text);
    if (width === undefined) {
      canvas.font = this.font;
      width = canvas.measureText(text.length > 400 ? text.slice(0, 400) : text).width;
      if (widths.size > 20_000) widths.clear();
      widths.set(text, width);
    }
    return width + GAP;
  }

  /** The lines of a page: ranges of positions, and heads of turns. */
  _layout(number) {
    const page = this.store.pages.get(number);
    const size = this.store.sizeOf(number);
    const length = page ? Math.min(page.length, size) : 0;
    const held = this.layouts.get(number);
    if (held && held.length === length && held.size === size && held.turns === this._turnsIn(number)) return held;
    const start = number * PAGE;
    const lines = [];
    let from = start;
    let used = 0;
    let next = this._firstTurn(start);
    const { turns } = this.store;
    for (let position = start; position < start + length; position += 1) {
      if (next < turns.length && turns[next].start === position) {
        if (position > from) lines.push({ from, to: position });
        lines.push({ from: position, to: position, turn: turns[next] });
        from = position;
        used = 0;
        next += 1;
      }
      const index = position - start;
      const text = page.texts?.[index] ?? null;
      const width = Math.min(this.width, this._widthOf(shown({ id: page.ids[index], text })));
      if (used && used + width > this.width) {
        lines.push({ from, to: position });
        from = position;
        used = 0;
      }
      used += width;
      if (text?.endsWith("\n")) {
        lines.push({ from, to: position + 1 });
        from = position + 1;
        used = 0;
      }
    }
    if (from < start + length) lines.push({ from, to: start + length });
    const missing = size - length;
    if (missing) {
      const each = Math.max(4, Math.floor(this.width / (this.column * GUESS)));
      for (let at = start + length; at < start + size; at += each) lines.push({ from: at, to: Math.min(at + each, start + size), isMissing: true });
    }
    const layout = { lines, length, size, turns: this._turnsIn(number) };
    this.layouts.set(number, layout);
    return layout;
  }

  _firstTurn(position) {
    const { turns } = this.store;
    let low = 0;
    let high = turns.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (turns[middle].start < position) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  _turnsIn(number) {
    return this._firstTurn((number + 1) * PAGE) - this._firstTurn(number * PAGE);
  }

  /** Draw in the next frame; `all`: also what is drawn already. */
  draw(all = false) {
    this.isStale ||= all;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this._draw();
    });
  }

  _draw() {
    if (!this.width && !this._measure()) return;
    if (!this.width) return;
    const { store, pane } = this;
    if (this.isStale) {
      for (const element of this.lines.values()) element.remove();
      this.lines.clear();
      this.isStale = false;
    }
    if (!store.total) {
      this.space.style.height = "0px";
      for (const element of this.lines.values()) element.remove();
      this.lines.clear();
      if (!this.empty) this.pane.append((this.empty = placeholder("No tokens yet", "They appear here as soon as the first turn begins.")));
      return;
    }
    this.empty?.remove();
    this.empty = null;
    const wanted = this.isFollowing ? null : this.anchor ?? this._top();
    let tops = this._tops();
    if (this.goal !== undefined && this.goal !== null) this._go(tops);
    else if (wanted) {
      const top = this._offset(wanted.position, tops) + wanted.rest;
      if (Math.abs(top - pane.scrollTop) > 1) pane.scrollTop = top;
    }
    this.anchor = null;
    this.space.style.height = `${tops.at(-1)}px`;
    if (this.isFollowing) {
      pane.scrollTop = tops.at(-1);
      this.end = pane.scrollTop;
    }
    const first = pane.scrollTop - SPARE * LINE;
    const last = pane.scrollTop + pane.clientHeight + SPARE * LINE;
    const kept = new Set();
    const fresh = document.createDocumentFragment();
    for (let number = 0; number < store.numPages; number += 1) {
      if (tops[number + 1] < first - AHEAD || tops[number] > last + AHEAD) continue;
      store.page(number);
      const { lines } = this._layout(number);
      const from = Math.max(0, Math.floor((first - tops[number]) / LINE));
      const to = Math.min(lines.length, Math.ceil((last - tops[number]) / LINE));
      for (let index = from; index < to; index += 1) {
        const line = lines[index];
        const key = line.turn ? `t${line.from}` : `${line.from}-${line.to}${line.isMissing ? "?" : ""}`;
        kept.add(key);
        const top = tops[number] + index * LINE;
        let element = this.lines.get(key);
        if (!element) {
          element = this._line(line);
          this.lines.set(key, element);
          fresh.append(element);
        }
        if (element.top !== top) element.style.transform = `translateY(${(element.top = top)}px)`;
      }
    }
    for (const [key, element] of this.lines) {
      if (kept.has(key)) continue;
      element.remove();
      this.lines.delete(key);
    }
    this.space.append(fresh);
    this.tops = tops;
    this._look();
  }

  /** Where each page begins, and where the last one ends. */
  _tops() {
    const tops = [0];
    for (let number = 0; number < this.store.numPages; number += 1) tops.push(tops[number] + this._layout(number).lines.length * LINE);
    return tops;
  }

  /** Where the line of a position is. */
  _offset(position, tops) {
    const number = Math.min(Math.floor(position / PAGE), this.store.numPages - 1);
    const { lines } = this._layout(number);
    let low = 0;
    let high = lines.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (lines[middle].from <= position) low = middle;
      else high = middle - 1;
    }
    while (low > 0 && lines[low].turn === undefined && lines[low - 1].turn && lines[low - 1].from === position) low -= 1;
    return tops[number] + low * LINE;
  }

  /** The position at the top of the pane, and how far below its line's top the pane begins. */
  _top() {
    const { tops } = this;
    if (!tops || tops.length < 2) return null;
    const at = this.pane.scrollTop;
    let number = tops.findIndex((top) => top > at) - 1;
    if (number < 0) number = tops.length - 2;
    const layout = this.layouts.get(number);
    if (!layout?.lines.length) return null;
    const index = Math.min(layout.lines.length - 1, Math.max(0, Math.floor((at - tops[number]) / LINE)));
    return { position: layout.lines[index].from, rest: at - tops[number] - index * LINE };
  }

  _line(line) {
    if (line.turn) {
      const { turn } = line.turn;
      return h("div.token-line.turn-line", { "data-turn": turn }, h("span.turn-name", {}, line.turn.name ?? `turn ${turn}`), h("span.turn-rule"));
    }
    const zone = this.store.zoneOf(line.from);
    const element = h("div.token-line", {}, h(`span.gutter.zone-${zone}`, { "aria-hidden": "true" }, grouped(line.from)));
    if (line.isMissing) {
      element.append(h("span.token-missing"));
      element.classList.add("missing");
      return element;
    }
    const dropped = this.store.window.dropped_range;
    for (let position = line.from; position < line.to; position += 1) {
      const token = this.store.token(position);
      if (!token) break;
      const span = document.createElement("span");
      span.className = this._classOf(token);
      if (dropped && position === dropped[1]) span.classList.add("edge");
      span.textContent = shown(token);
      span.position = position;
      element.append(span);
    }
    if (dropped && line.from <= dropped[1] && dropped[1] < line.to) element.append(h("span.edge-label", {}, "in view from here"));
    if (dropped && line.from <= dropped[0] && dropped[0] < line.to) element.append(h("span.edge-label.begin-forgotten", {}, "forgotten from here"));
    return element;
  }

  _classOf(token) {
    let name = `token zone-${token.zone}`;
    if (this.mode === "logprob") {
      const level = heat(token.logprob);
      name += level === null ? " no-logprob" : ` heat-${level}`;
    } else if (this.mode === "mask") name += token.mask ? " mask-on" : " mask-off";
    else name += ` kind-${KINDS[token.kind] ?? "given"}`;
    if (token.position === this.mark) name += " mark";
    if (token.position === this.cursor) name += " cursor";
    return name;
  }

  _appended({ position }) {
    // What is drawn of the last page and the lines that the edge has passed are drawn again.
    const dropped = this.store.window.dropped_range;
    for (const [key, element] of this.lines) {
      const spans = element.querySelectorAll(".token");
      const last = spans[spans.length - 1]?.position ?? -1;
      const first = spans[0]?.position ?? -1;
      const isEdge = dropped && first <= dropped[1] && last >= (this.edge ?? 0) - 1;
      if (last >= position - 1 || isEdge) {
        element.remove();
        this.lines.delete(key);
      }
    }
    this.edge = dropped?.[1];
    this.draw();
  }

  _problem(error) {
    if (this.store.total) return;
    fill(this.space);
    this.empty?.remove();
    this.pane.append((this.empty = placeholder("The tokens could not be read", error.message, h("button", { onclick: () => this.store.load(0) }, "Try again"))));
  }

  _scrolled() {
    const { pane } = this;
    const isAtEnd = pane.scrollTop + pane.clientHeight >= pane.scrollHeight - 2 * LINE;
    if (this.isFollowing && !isAtEnd && pane.scrollTop < this.end) this.follow(false); // the reader has scrolled back
    if (!this.frame && this.tops) this._draw();
    this._hide();
  }

  /** Keep the newest token in sight. */
  follow(isOn) {
    if (this.isFollowing === isOn) return;
    this.isFollowing = isOn;
    this.element.dispatchEvent(new CustomEvent("follow", { detail: isOn }));
    if (isOn) this.draw();
  }

  /** Bring a position into sight, at `share` of the pane's height, once its page is here. */
  async go(position, share = 0) {
    this.follow(false);
    this.goal = { position: Math.max(0, Math.min(position, this.store.total - 1)), share };
    this.draw();
    const number = Math.floor(position / PAGE);
    if (!this.store.pages.has(number)) {
      await this.store.load(number);
      this.draw();
    }
  }

  _go(tops) {
    const { position, share } = this.goal;
    this.space.style.height = `${tops.at(-1)}px`;
    this.pane.scrollTop = Math.max(0, this._offset(position, tops) - share * this.pane.clientHeight);
    if (this.store.pages.has(Math.floor(position / PAGE))) this.goal = null;
  }

  _look() {
    const { tops, pane } = this;
    const top = this._top();
    if (!top) return;
    const bottom = pane.scrollTop + pane.clientHeight;
    let number = tops.findIndex((one) => one >= bottom) - 1;
    let to = this.store.total;
    if (number >= 0) {
      const { lines } = this._layout(number);
      to = lines[Math.min(lines.length - 1, Math.max(0, Math.floor((bottom - tops[number]) / LINE)))]?.to ?? to;
    }
    this.onlook(top.position, to);
  }

  // The card of one token

  _hover(event, stays = false) {
    const span = event.target.closest?.(".token");
    if (!span) return;
    if (stays) this.point(span.position);
    else this._show(span);
  }

  /** Put the cursor on a token and show its card; null: no cursor. */
  point(position) {
    const before = this._span(this.cursor);
    before?.classList.remove("cursor");
    this.cursor = position;
    const span = this._span(position);
    if (!span) return void (position === null && this._hide());
    span.classList.add("cursor");
    this._show(span);
  }

  _span(position) {
    if (position === null) return null;
    for (const span of this.space.querySelectorAll(".token")) if (span.position === position) return span;
    return null;
  }

  _show(span) {
    const token = this.store.token(span.position);
    if (!token) return;
    fill(this.card, cardOf(token));
    this.card.hidden = false;
    const box = span.getBoundingClientRect();
    const frame = this.element.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.card;
    const below = box.bottom + 6 + height <= Math.min(innerHeight, frame.bottom);
    const left = Math.max(6, Math.min(box.left - frame.left, frame.width - width - 6));
    this.card.style.left = `${left}px`;
    this.card.style.top = `${below ? box.bottom - frame.top + 6 : Math.max(6, box.top - frame.top - height - 6)}px`;
  }

  _hide() {
    if (this.cursor === null) this.card.hidden = true;
  }

  _key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const rows = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Escape" && this.cursor !== null) this.point(null);
    else if (event.key === "Enter" && this.cursor === null) this.point(this._top()?.position ?? 0);
    else if (event.key === "End" || event.key === "Home") {
      const to = event.key === "End" ? this.store.total - 1 : 0;
      this.go(to, event.key === "End" ? 0.8 : 0);
    } else if (this.cursor !== null && step) this._move(this.cursor + step);
    else if (this.cursor !== null && rows) this._moveLine(rows);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  _move(position) {
    const to = Math.max(0, Math.min(this.store.total - 1, position));
    const top = this._offset(to, this.tops);
    if (top < this.pane.scrollTop) this.pane.scrollTop = top;
    else if (top + LINE > this.pane.scrollTop + this.pane.clientHeight) this.pane.scrollTop = top + LINE - this.pane.clientHeight;
    this._draw();
    this.point(to);
  }

  _moveLine(rows) {
    const line = this._span(this.cursor)?.parentElement;
    if (!line) return;
    const all = [...this.lines.values()].filter((one) => one.querySelector(".token")).sort((one, other) => one.top - other.top);
    const next = all[all.indexOf(line) + rows];
    if (!next) return;
    const left = this._span(this.cursor).offsetLeft;
    const spans = [...next.querySelectorAll(".token")];
    this._move((spans.find((span) => span.offsetLeft + span.offsetWidth > left) ?? spans.at(-1)).position);
  }
}

const ZONES = { pinned: "pinned: always in view", forgotten: "forgotten: not in view", seen: "in view" };

/** What is known of one token. */
function cardOf(token) {
  const probability = (logprob) => `${(Math.exp(logprob) * 100).toFixed(logprob < -4.6 ? 2 : 1)}%`;
  const facts = [["id", String(token.id)], ["position", grouped(token.position)]];
  if (token.turn) facts.push(["turn", token.turn.name ?? String(token.turn.turn)]);
  if (token.mask === null) facts.push(["window", ZONES[token.zone]]);
  else facts.push(["loss mask", token.mask ? "1: trained" : "0: not trained"]);
  if (token.logprob !== null) facts.push(["logprob", `${fixed(token.logprob, 4)} (${probability(token.logprob)})`]);
  if (token.samplingLogprob !== null) facts.push(["sampling", `${fixed(token.samplingLogprob, 4)} (${probability(token.samplingLogprob)})`]);
  if (token.weightVersion) facts.push(["weights", plain(token.weightVersion)]);
  return [
    h("p.token-text", {}, h(`mark.kind-${token.kind}`, {}, shown(token)), h("span.tag", {}, token.kind)),
    h("dl", {}, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    token.top?.length && [
      h("p.muted", {}, "Most likely here"),
      h(
        "ol.likely",
        {},
        token.top.map(({ text, logprob }) => {
          const bar = h("span.likely-bar");
          bar.style.width = `${Math.max(1, Math.exp(logprob ?? -99) * 100)}%`;
          return h("li", { class: text === token.text ? "is-it" : null }, h("span.likely-text", {}, text === "" ? "∅" : plain(text)), h("span.likely-track", {}, bar), h("span.likely-number", {}, logprob === null ? "–" : probability(logprob)));
        }),
      ),
    ],
  ];
}
