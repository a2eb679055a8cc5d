// The tokens of one branch of a session: pages fetched when they are looked at, tokens that arrive while one watches.

import { get, sessionPath } from "./api.js";

export const PAGE = 512; // tokens in one request, and what is laid out at once

const AGAIN_MS = 1000; // before a page is asked for again that lacks tokens of a turn in flight

const COLUMNS = ["ids", "texts", "kinds", "logprobs", "sampling_logprobs", "top", "weight_versions"];

/** What tells its listeners that something changed. */
class Told extends EventTarget {
  tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

/** Events: `page` (its number; tokens came), `shape` (length, turns or window changed), `problem` (an ApiError). */
export class TokenStore extends Told {
  constructor(id, turn = null, turns = []) {
    super();
    this.id = id;
    this.turn = turn; // null: the branch that goes on
    this.turns = turns;
    this.epoch = 0; // answers to questions of an older one are dropped
    this.pages = new Map(); // number -> { start, length, ids, texts, ... }
    this.asked = new Map(); // number -> promise
    this.total = 0;
    this.window = { sink: 0, recent: 0, dropped_range: null };
    this.capacity = Infinity; // tokens besides the pinned ones that are in view at most
  }

  get _path() {
    return `${sessionPath(this.id)}/tokens`;
  }

  get _turn() {
    return this.turn === null ? "" : `&turn=${this.turn}`;
  }

  get numPages() {
    return Math.ceil(this.total / PAGE);
  }

  /** How many tokens a page has, whether or not they are here. */
  sizeOf(number) {
    return Math.min(PAGE, this.total - number * PAGE);
  }

  /** The page, if it is here in full; else it is asked for. */
  page(number) {
    const page = this.pages.get(number);
    if (!page || (page.length < this.sizeOf(number) && performance.now() > page.again)) this.load(number);
    return page;
  }

  /** Ask for a page. The promise ends when it is here, or could not be read. */
  load(number) {
    if (!this.asked.has(number)) {
      const { epoch } = this;
      const asked = this._fetch(number, epoch).finally(() => this.asked.get(number) === asked && this.asked.delete(number));
      this.asked.set(number, asked);
    }
    return this.asked.get(number);
  }

  async _fetch(number, epoch) {
    try {
      const told = await get(`${this._path}?start=${number * PAGE}&limit=${PAGE}${this._turn}`);
      if (epoch !== this.epoch) return;
      const page = { start: told.start, length: told.ids.length, again: performance.now() + AGAIN_MS };
      for (const name of COLUMNS) page[name] = told[name];
      const held = this.pages.get(number);
      if (!held || held.length <= page.length) this.pages.set(number, page); // what is streamed may be ahead
      this._shape(told);
      this.tell("page", number);
    } catch (error) {
      if (epoch === this.epoch) this.tell("problem", error);
    }
  }

  _shape({ total, window }) {
    const isSame = this.total === total && String(this.window.dropped_range) === String(window.dropped_range);
    const known = Math.max(total, this._streamed ?? 0);
    if (known < this.total) this._rewind(known);
    this.total = known;
    this.window = window;
    if (this._streamed > total) this._slide();
    if (!isSame) this.tell("shape");
  }

  /** The turns that the tokens are of: {turn, start, sampled_start, end}. Pages of what is another turn now are dropped. */
  setTurns(turns) {
    const at = this.turns.findIndex((one, index) => turns[index]?.turn !== one.turn);
    if (at >= 0) {
      for (const number of this.pages.keys()) if ((number + 1) * PAGE > this.turns[at].start) this.pages.delete(number);
      this.epoch += 1;
      this.asked.clear();
    } else if (turns.length === this.turns.length) return;
    this.turns = turns;
    this.tell("shape");
  }

  /** Read again how long the history is and what of it is in view, and pages of which only the stream has told. */
  async refresh() {
    const { epoch } = this;
    try {
      const told = await get(`${this._path}?start=0&limit=1${this._turn}`);
      if (epoch !== this.epoch) return;
      this._streamed = 0;
      this._shape(told);
      for (const [number, page] of this.pages) {
        if (!page.isStreamed && page.length >= this.sizeOf(number)) continue;
        page.isStreamed = false;
        this.load(number);
      }
    } catch (error) {
      if (epoch === this.epoch) this.tell("problem", error);
    }
  }

  /** Tokens that were just given or sampled. False where they do not follow what is here. */
  append({ position, ids, texts, logprobs, kind }) {
    if (this.turn !== null) return true;
    if (position < this.total) this._rewind(position);
    if (position > this.total) return false;
    for (let index = 0; index < ids.length; index += 1) {
      const at = position + index;
      const number = Math.floor(at / PAGE);
      let page = this.pages.get(number);
      if (at % PAGE === 0 && !page) {
        page = { start: at, length: 0, again: 0, ids: [], texts: [], kinds: [], logprobs: [], sampling_logprobs: null, top: null, weight_versions: null };
        this.pages.set(number, page);
      }
      if (!page || page.length !== at % PAGE) continue; // its beginning is not here: it is fetched when it is looked at
      page.ids.push(ids[index]);
      page.texts?.push(texts?.[index] ?? null);
      (page.kinds ??= Array(page.length).fill("given")).push(kind);
      (page.logprobs ??= Array(page.length).fill(null)).push(logprobs?.[index] ?? null);
      for (const name of ["sampling_logprobs", "top", "weight_versions"]) page[name]?.push(null);
      page.length += 1;
      page.isStreamed = true;
    }
    this.total = this._streamed = position + ids.length;
    this._slide();
    this.tell("append", { position, length: ids.length });
    return true;
  }

  /** Where the window is once these tokens have come. */
  _slide() {
    const { sink } = this.window;
    const dropped = Math.max(0, this.total - sink - this.capacity);
    this.window = { ...this.window, dropped_range: dropped ? [sink, sink + dropped] : null };
  }

  _rewind(position) {
    for (const [number, page] of this.pages) {
      const length = Math.max(0, Math.min(page.length, position - page.start));
      if (!length) this.pages.delete(number);
      else if (length < page.length) {
        page.length = length;
        for (const name of COLUMNS) if (page[name]) page[name].length = length;
      }
    }
    this.total = position;
  }

  /** Everything that is known of a token; null where its page is not here. */
  token(position) {
    const page = this.pages.get(Math.floor(position / PAGE));
    const index = position % PAGE;
    if (!page || index >= page.length) return null;
    return {
      position,
      id: page.ids[index],
      text: page.texts?.[index] ?? null,
      kind: page.kinds?.[index] ?? "given",
      logprob: page.logprobs?.[index] ?? null,
      samplingLogprob: page.sampling_logprobs?.[index] ?? null,
      top: page.top?.[index] ?? null,
      weightVersion: page.weight_versions?.[index] ?? null,
      turn: this.turnAt(position),
      zone: this.zoneOf(position),
      mask: page.mask?.[index] ?? null,
    };
  }

  /** The turn that a token belongs to. */
  turnAt(position) {
    let low = 0;
    let high = this.turns.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      const one = this.turns[middle];
      if (position < one.start) high = middle - 1;
      else if (position >= one.end) low = middle + 1;
      else return one;
    }
    return null;
  }

  /** Whether the model sees a token when the session goes on. */
  zoneOf(position) {
    const dropped = this.window.dropped_range;
    if (dropped && position >= dropped[0] && position < dropped[1]) return "forgotten";
    return position < this.window.sink ? "pinned" : "seen";
  }
}
