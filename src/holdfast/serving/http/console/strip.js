// The window strip: the whole history as one bar, and which of it the model sees.

import { bytes, count, fill, grouped, h, s, short } from "./dom.js";

const HEIGHT = 46;
const BAND = 28; // of the zones; below it are the turns
const LEAST = { pinned: 10, forgotten: 24, seen: 24, free: 0 };
const MOST_TURNS = 600; // that are drawn one by one

export class WindowStrip {
  /** `go` is called with a position where the strip is clicked. */
  constructor(go) {
    this.svg = s("svg", { height: HEIGHT, "aria-hidden": "true" });
    this.lens = s("rect.lens", { y: 1, height: HEIGHT - 2, rx: 3 });
    this.bar = h("div.strip-bar", { role: "slider", tabindex: 0, "aria-label": "Place in the history", "aria-valuemin": 0, onpointerdown: (event) => this._drag(event, go), onkeydown: (event) => this._key(event, go) }, this.svg);
    this.words = h("p.strip-words");
    this.element = h("section.strip", { "aria-label": "What the model sees" }, this.bar, this.words);
    this.observer = new ResizeObserver(() => this._draw());
    this.observer.observe(this.bar);
    this.sight = null;
  }

  close() {
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
  }

  show(what) {
    this.what = what;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this._draw();
      this._say();
    });
  }

  /** The positions that the token pane shows. */
  look(from, to) {
    this.sight = [from, to];
    this._lens();
  }

  _zones() {
    const { total, window, capacity } = this.what;
    const pinned = Math.min(total, window.sink);
    const dropped = window.dropped_range ? window.dropped_range[1] - window.dropped_range[0] : 0;
    return { pinned, forgotten: dropped, seen: total - pinned - dropped, free: dropped ? 0 : Math.max(0, window.sink + capacity - total) };
  }

  _draw() {
    const width = this.bar.clientWidth;
    if (!width || !this.what?.window) return;
    const zones = this._zones();
    const scale = Object.values(zones).reduce((sum, one) => sum + one, 0) || 1;
    const wide = Object.entries(zones).map(([name, tokens]) => ({ name, tokens, width: tokens ? Math.max(LEAST[name], (tokens / scale) * width) : 0 }));
    const excess = wide.reduce((sum, one) => sum + one.width, 0) - width;
    const largest = wide.reduce((one, other) => (other.width > one.width ? other : one));
    largest.width -= excess;
    this.pieces = [];
    let left = 0;
    let from = 0;
    this.svg.setAttribute("width", width);
    const hatch = s("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect.hatch-ground", { width: 6, height: 6 }), s("rect.hatch-line", { width: 1.5, height: 6 }));
    fill(this.svg, s("defs", {}, hatch));
    for (const zone of wide) {
      if (!zone.width) continue;
      this.pieces.push({ left, width: zone.width, from, tokens: zone.tokens });
      const rect = s(`rect.strip-${zone.name}`, { x: left + 0.5, y: 1, width: Math.max(1, zone.width - 1), height: BAND, rx: 3 });
      if (zone.name === "forgotten") rect.setAttribute("fill", "url(#hatch)");
      this.svg.append(rect);
      const label = { pinned: "pinned", forgotten: "forgotten", seen: "in view", free: "free" }[zone.name];
      const text = zone.width > 110 ? `${label} ${grouped(zone.tokens)}` : zone.width > 56 ? label : "";
      if (text) this.svg.append(s(`text.strip-label.on-${zone.name}`, { x: left + zone.width / 2, y: BAND / 2 + 5.5, "text-anchor": "middle" }, text));
      left += zone.width;
      from += zone.tokens;
    }
    this._turns();
    this.svg.append(this.lens);
    this._lens();
    this.bar.setAttribute("aria-valuemax", this.what.total);
  }

  _turns() {
    const { turns = [] } = this.what;
    if (!turns.length) return;
    const step = Math.ceil(turns.length / MOST_TURNS);
    for (let index = 0; index < turns.length; index += step) {
      const turn = turns[index];
      const last = turns[Math.min(turns.length, index + step) - 1];
      const left = this._x(turn.start);
      const right = this._x(last.end);
      const given = step === 1 ? this._x(turn.sampled_start) : left;
      const gap = right - left > 3 ? 1 : 0;
      if (given > left) this.svg.append(s("rect.turn-given", { x: left, y: BAND + 5, width: Math.max(0.5, given - left), height: 9 }));
      if (right > given) this.svg.append(s("rect.turn-sampled", { x: given, y: BAND + 5, width: Math.max(0.5, right - given - gap), height: 9 }));
    }
  }

  _x(position) {
    const piece = this.pieces.find((one) => position <= one.from + one.tokens) ?? this.pieces.at(-1);
    if (!piece) return 0;
    return piece.left + (piece.tokens ? ((position - piece.from) / piece.tokens) * piece.width : 0);
  }

  _lens() {
    if (!this.sight || !this.pieces || !this.what?.total) return void this.lens.setAttribute("width", 0);
    const [from, to] = this.sight.map((one) => this._x(Math.min(one, this.what.total)));
    const width = this.sight[0] === 0 && this.sight[1] >= this.what.total ? 0 : Math.max(6, to - from); // all of it is no place
    this.lens.setAttribute("x", Math.max(1, Math.min(from, this.bar.clientWidth - width - 1)));
    this.lens.setAttribute("width", width);
    this.bar.setAttribute("aria-valuenow", this.sight[0]);
    this.bar.setAttribute("aria-valuetext", `tokens ${grouped(this.sight[0])} to ${grouped(this.sight[1])}`);
  }

  _position(x) {
    const piece = this.pieces.find((one) => x <= one.left + one.width) ?? this.pieces.at(-1);
    return Math.min(this.what.total - 1, Math.floor(piece.from + ((x - piece.left) / piece.width) * piece.tokens));
  }

  _drag(event, go) {
    if (!this.what?.total || event.button) return;
    const { left } = this.bar.getBoundingClientRect();
    const move = (one) => go(this._position(Math.max(0, one.clientX - left)));
    this.bar.setPointerCapture(event.pointerId);
    this.bar.addEventListener("pointermove", move);
    this.bar.addEventListener("pointerup", () => this.bar.removeEventListener("pointermove", move), { once: true });
    move(event);
  }

  _key(event, go) {
    const { total } = this.what ?? {};
    if (!total || !this.sight) return;
    const page = Math.max(1, this.sight[1] - this.sight[0]);
    const steps = { ArrowLeft: -page, ArrowDown: -page, ArrowRight: page, ArrowUp: page, PageUp: -page * 10, PageDown: page * 10, Home: -total, End: total };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    go(Math.max(0, Math.min(total - 1, this.sight[0] + steps[event.key])));
  }

  /** The strip in one sentence. */
  _say() {
    const { total, window, capacity, bytes: held } = this.what;
    if (!window) return;
    const { pinned, forgotten, free } = this._zones();
    const visible = total - forgotten;
    const memory = held ? [" The cache takes ", h("b", {}, bytes(held)), forgotten ? ", and will not grow." : "."] : "";
    if (!total) fill(this.words, "Nothing is on record yet. The model will see the first ", h("b", {}, grouped(window.sink)), " and the last ", h("b", {}, grouped(capacity)), " tokens.");
    else if (!forgotten) fill(this.words, "The model sees ", h("b", {}, `all ${count(total, "token")}`), `: the window has room for ${short(free)} more before the oldest are forgotten.`, memory);
    else fill(this.words, "The model sees ", h("b", {}, grouped(visible)), " of ", h("b", {}, grouped(total)), " tokens: the first ", h("b.of-pinned", {}, grouped(pinned)), ", always, and the last ", h("b.of-seen", {}, grouped(window.recent)), ". The ", h("b.of-forgotten", {}, grouped(forgotten)), " between them are on record, but forgotten.", memory);
  }
}
