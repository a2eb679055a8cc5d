// Messages as people read them, turn by turn, and the box in which one writes the next.

import { eventsOf, get, request } from "./api.js";
import { announce, count, fill, fixed, grouped, h, loading, placeholder, plain, reward, visible } from "./dom.js";

const SHORT = 6_000; // characters of a message that are shown at first
const MORE = 40_000; // and with each press on "more"

/** A text that may be very long. */
function longText(text) {
  const element = h("div.text", { dir: "auto" });
  let at = 0;
  const more = h("button.more", { onclick: () => add(MORE) });
  const add = (length) => {
    const end = text.length - at <= length * 1.2 ? text.length : at + length;
    more.before(...visible(text.slice(at, end)));
    at = end;
    if (at === text.length) more.remove();
    else fill(more, `More: ${grouped(text.length - at)} of ${grouped(text.length)} characters are left`);
  };
  element.append(more);
  add(SHORT);
  return element;
}

function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : "";
  return content.map((part) => part.text ?? JSON.stringify(part)).join("\n");
}

/** A message with its role, reasoning and tool calls. */
export function messageOf(message) {
  const { role, name, reasoning_content: reasoning, tool_calls: calls } = message;
  const text = textOf(message.content);
  return h(
    `div.message.role-${["system", "user", "assistant", "tool"].includes(role) ? role : "other"}`,
    {},
    h("span.role", {}, plain(name ? `${role} ${name}` : String(role))),
    h(
      "div.said",
      {},
      reasoning && h("details.reasoning", {}, h("summary", {}, "Reasoning"), longText(textOf(reasoning))),
      text && longText(text),
      (calls ?? []).map((call) => h("div.call", {}, h("b", {}, plain(call.function?.name ?? call.type ?? "call")), longText(String(call.function?.arguments ?? JSON.stringify(call))))),
      !text && !reasoning && !calls?.length && h("p.muted", {}, "(empty)"),
    ),
  );
}

/** The facts of a turn in a few words. */
export function factsOf(node) {
  return [
    `${grouped(node.given_tokens)} given`,
    `${grouped(node.sampled_tokens)} sampled`,
    node.recalled_tokens && `${grouped(node.recalled_tokens)} recalled`,
    node.finish_reason && node.finish_reason !== "stop" && plain(node.finish_reason),
    node.edited && "edited",
    node.ended_at && node.started_at && `${fixed(node.ended_at - node.started_at, 1)} s`,
    Number.isFinite(node.reward) && h(node.reward > 0 ? "b.good" : "b.bad", {}, `reward ${reward(node.reward)}`),
  ].filter(Boolean);
}

const PARAMETERS = [
  { name: "temperature", label: "Temperature", step: 0.05, min: 0, max: 2, about: "0: always the most likely token" },
  { name: "top_p", label: "Top p", step: 0.01, min: 0.01, max: 1, about: "the smallest set of tokens with this probability" },
  { name: "top_k", label: "Top k", step: 1, min: 1, about: "the most likely tokens" },
  { name: "max_tokens", label: "Most tokens", step: 1, min: 1, about: "of one reply" },
  { name: "seed", label: "Seed", step: 1, about: "the same seed gives the same reply" },
];

export class Conversation {
  constructor(model, { address, goTo, signal }) {
    this.model = model;
    this.address = address;
    this.goTo = goTo;
    this.signal = signal;
    this.selected = null;
    this.onrecorded = () => {};
    this.articles = new Map(); // turn -> article
    this.list = h("div.turn-list", { role: "feed", "aria-label": "Messages by turn" });
    this.scroller = h("div.scroller", {}, this.list);
    this.pending = null; // the turn that is being written
    this.finder = h("input.search", { type: "search", placeholder: "Search what was said", "aria-label": "Search this session", autocomplete: "off", spellcheck: "false", onkeydown: (event) => event.key === "Enter" && this._find() });
    this.found = h("div.found", { role: "region", "aria-label": "Found passages", hidden: true });
    this.branchNote = h("p.branch-note", { hidden: true });
    this.element = h("section.panel.conversation", { "aria-label": "Messages" }, h("div.panel-bar", {}, h("h2", {}, "Messages"), h("label.search-box", {}, this.finder, h("kbd", { "aria-hidden": "true" }, "/"))), this.found, this.branchNote, this.scroller, this._composer());
    this.zoneKey = "";
  }

  // What is on record

  /** Show the turns of the branch, as far as they are not shown yet. */
  update() {
    const { model } = this;
    const { turns } = model;
    const wanted = new Set(turns.map((node) => node.turn));
    for (const [turn, article] of this.articles) {
      if (wanted.has(turn)) continue;
      article.remove();
      this.articles.delete(turn);
    }
    let after = null;
    const isAtEnd = !this.scroller.clientHeight || this.scroller.scrollTop + this.scroller.clientHeight > this.scroller.scrollHeight - 60;
    for (const node of turns) {
      let article = this.articles.get(node.turn);
      const key = `${node.reward} ${node.sampled_tokens} ${node.delivered} ${this._siblings(node).length}`;
      if (!article || article.key !== key) {
        const fresh = this._article(node);
        fresh.key = key;
        article?.replaceWith(fresh);
        article = fresh;
        this.articles.set(node.turn, article);
      }
      const place = after ? after.nextSibling : this.list.firstChild;
      if (place !== article) this.list.insertBefore(article, place);
      after = article;
    }
    this.empty?.remove();
    if (!turns.length && !this.pending) this.list.append((this.empty = placeholder("Nothing was said yet", model.canTalk ? "Write the first message below, or point an OpenAI client here:" : "", model.canTalk && h("code", {}, `${new URL("./", document.baseURI)}${model.path}/v1`))));
    if (this.pending) this.list.append(this.pending.article);
    this._zones();
    if (isAtEnd && this.selected === null) this.toEnd();
    this.branchNote.hidden = model.branch === null;
    if (model.branch !== null) fill(this.branchNote, `This is the branch of turn ${model.branch}. The session goes on from another one. `, h("a", { href: this.address("", model.tip ? `turn=${model.tip.turn}` : "") }, "Show that one"));
    this.text.disabled = !model.canTalk;
  }

  /** Heights are guesses until turns are in sight: the end is where it is two frames later. */
  toEnd() {
    const go = () => (this.scroller.scrollTop = this.scroller.scrollHeight);
    go();
    requestAnimationFrame(() => (go(), requestAnimationFrame(go)));
  }

  _siblings(node) {
    return (this.model.nodes.get(node.parent)?.children ?? this.model.roots ?? []).filter((one) => one.turn !== node.turn);
  }

  _article(node) {
    const siblings = this._siblings(node);
    const hasUser = node.messages?.some((message) => message.role === "user");
    const head = h(
      "header",
      {},
      h("a.turn-number", { href: this.address("", `turn=${node.turn}`), "aria-label": `Turn ${node.turn}` }, String(node.turn)),
      h("span.turn-facts", {}, factsOf(node).map((fact) => h("span", {}, fact))),
      siblings.length > 0 && h("a.tag.branches", { href: this.address("tree", `turn=${node.turn}`), title: "See the branches" }, count(siblings.length, "other branch", "other branches")),
      h(
        "span.turn-actions",
        {},
        node.messages && h("button", { onclick: () => this.retry(node), title: "Sample this reply again: a branch" }, "Retry"),
        hasUser && h("button", { onclick: () => this.edit(node), title: "Change the message and send it: a branch" }, "Edit"),
        h("button", { onclick: () => this.model.fork(node.turn), title: "A new session that goes on from here" }, "Fork"),
      ),
    );
    return h("article.turn", { "data-turn": node.turn, "aria-label": `Turn ${node.turn}`, onclick: (event) => this._clicked(event, node) }, head, (node.messages ?? []).map(messageOf), node.reply && messageOf({ role: "assistant", ...node.reply }));
  }

  _clicked(event, node) {
    if (event.target.closest("a, button, summary, textarea") || String(getSelection())) return;
    this.goTo(node.turn);
  }

  /** Mark which turns the model has forgotten. */
  _zones() {
    const { shown } = this.model;
    const dropped = shown.window.dropped_range;
    for (const one of shown.turns) {
      const article = this.articles.get(one.turn);
      if (!article) continue;
      const isOut = dropped && one.start >= dropped[0] && one.end <= dropped[1];
      const isPartly = dropped && !isOut && one.end > dropped[0] && one.start < dropped[1];
      article.classList.toggle("is-forgotten", Boolean(isOut));
      article.classList.toggle("is-partly-forgotten", Boolean(isPartly));
    }
  }

  /** The token pane shows these positions: point at their turns. */
  look(from, to) {
    const dropped = String(this.model.shown.window.dropped_range);
    const key = `${dropped} ${this.model.shown.turns.length}`;
    if (key !== this.zoneKey) (this.zoneKey = key), this._zones();
    for (const one of this.model.shown.turns) this.articles.get(one.turn)?.classList.toggle("in-sight", one.start < to && one.end > from);
  }

  select(turn) {
    this.articles.get(this.selected)?.classList.remove("selected");
    this.selected = turn;
    const article = this.articles.get(turn);
    article?.classList.add("selected");
    article?.scrollIntoView({ block: "nearest" });
  }

  // Search

  search() {
    this.finder.focus();
    this.finder.select();
  }

  async _find() {
    const query = this.finder.value.trim();
    this.found.hidden = !query;
    if (!query) return;
    fill(this.found, loading("Searching"));
    try {
      const { data } = await get(`${this.model.path}/search?limit=20&in_view=true&query=${encodeURIComponent(query)}`, { signal: this.signal });
      fill(
        this.found,
        h("div.found-head", {}, h("b", {}, data.length ? count(data.length, "passage") : "Nothing was found"), h("button.quiet", { onclick: () => (this.found.hidden = true) }, "Close")),
        h(
          "ol",
          {},
          data.map((one) => {
            const zone = this.model.shown.zoneOf(one.from_position);
            return h("li", {}, h("a", { href: this.address("", `turn=${one.turn}&at=${one.from_position}`) }, h(`span.zone-dot.zone-${zone}`, { title: zone }), h("span.muted", {}, `turn ${one.turn}, ${plain(one.role)}`), h("span.passage", { dir: "auto" }, plain(one.text.slice(0, 240)))));
          }),
        ),
      );
    } catch (error) {
      if (!this.signal.aborted) fill(this.found, placeholder("The search failed", error.message));
    }
  }

  // Talking

  _composer() {
    this.text = h("textarea", { rows: 1, placeholder: "Write a message", "aria-label": "Message", oninput: () => this._grow() });
    this.sendButton = h("button.primary", { onclick: () => this._pressed() }, "Send");
    this.fields = Object.fromEntries(PARAMETERS.map(({ name, about, label, ...attributes }) => [name, h("input", { type: "number", id: `parameter-${name}`, placeholder: "default", "aria-describedby": `about-${name}`, ...attributes })]));
    this.system = h("textarea", { rows: 2, id: "parameter-system", placeholder: "For the first turn. It is pinned: the model always sees it.", "aria-describedby": "about-system" });
    this.drawer = h(
      "div.drawer",
      { hidden: true, id: "drawer" },
      h("div.system", {}, h("label", { for: "parameter-system" }, "System prompt"), this.system, h("small.sr", { id: "about-system" }, "It is pinned: the model always sees it.")),
      PARAMETERS.map(({ name, label, about }) => h("div", { title: about }, h("label", { for: `parameter-${name}` }, label), this.fields[name], h("small.sr", { id: `about-${name}` }, about))),
    );
    this.drawerButton = h("button.quiet", { "aria-expanded": "false", "aria-controls": "drawer", onclick: () => this._toggleDrawer() }, "Parameters");
    this.note = h("p.editing", { hidden: true });
    this.hint = h("span.hint.muted", {}, "Enter sends · Shift+Enter begins a line");
    return h("div.composer", {}, this.note, this.drawer, h("div.write", {}, this.text, this.sendButton), h("div.write-bar", {}, this.drawerButton, this.hint));
  }

  _toggleDrawer() {
    this.drawer.hidden = !this.drawer.hidden;
    this.drawerButton.setAttribute("aria-expanded", String(!this.drawer.hidden));
  }

  _grow() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(220, this.text.scrollHeight + 2)}px`;
  }

  write() {
    this.text.focus();
  }

  typing(event) {
    if (event.target !== this.text || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this._pressed();
  }

  _pressed() {
    if (this.pending?.abort) return this.pending.abort.abort();
    const text = this.text.value;
    if (!text.trim()) return;
    const { editing } = this;
    const parent = editing ? editing.parent : (this.model.branch ?? this.model.tip?.turn ?? null);
    this._endEditing();
    this.text.value = "";
    this._grow();
    const before = editing ? editing.messages.slice(0, editing.messages.findLastIndex((message) => message.role === "user")) : [];
    const isFirst = !this.model.nodes.has(parent);
    const system = isFirst && this.system.value.trim() && !before.some((message) => message.role === "system") ? [{ role: "system", content: this.system.value }] : [];
    this._send(parent, [...system, ...before, { role: "user", content: text }], text);
  }

  /** Sample a reply again. */
  retry(node) {
    if (!this.pending) this._send(node.parent, node.messages);
  }

  edit(node) {
    this.editing = node;
    const message = node.messages.findLast((one) => one.role === "user");
    this.text.value = textOf(message.content);
    fill(this.note, `Editing the message of turn ${node.turn}. Sending it begins a branch. `, h("button.quiet", { onclick: () => ((this.text.value = ""), this._endEditing(), this._grow()) }, "Cancel"));
    this.note.hidden = false;
    this._grow();
    this.text.focus();
  }

  _endEditing() {
    this.editing = null;
    this.note.hidden = true;
  }

  /** Ask for a reply to these messages after a turn. */
  async _send(parent, messages, typed = "") {
    const { model } = this;
    const path = model.pathTo(parent);
    const past = path.flatMap((node) => [...node.messages, node.reply]);
    const abort = new AbortController();
    this.signal.addEventListener("abort", () => abort.abort(), { once: true });
    const reply = h("div.text", { dir: "auto" });
    const reasoning = h("div.text", { dir: "auto" });
    const thinking = h("details.reasoning", { hidden: true, open: true }, h("summary", {}, "Reasoning"), reasoning);
    const status = h("span.turn-facts", {}, h("span.pulse"), "waiting");
    const answer = h("div.message.role-assistant", {}, h("span.role", {}, "assistant"), h("div.said", {}, thinking, reply));
    const article = h("article.turn.pending", { "aria-label": "The new turn", "aria-busy": "true" }, h("header", {}, h("span.turn-number", {}, "…"), status), messages.map(messageOf), answer);
    for (const node of [...this.list.children]) {
      const turn = Number(node.dataset.turn);
      if (turn && !path.some((one) => one.turn === turn)) node.classList.add("left-behind");
    }
    this.empty?.remove();
    this.list.append(article);
    this.pending = { abort, article };
    this.selected = null;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    fill(this.sendButton, "Stop");
    const started = performance.now();
    let said = "";
    try {
      const response = await request(`${model.path}/v1/chat/completions`, { method: "POST", json: { messages: [...past, ...messages], stream: true, ...this._parameters() }, signal: abort.signal });
      let pieces = 0;
      for await (const { data } of eventsOf(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const delta = chunk.choices?.[0]?.delta ?? {};
        if (delta.reasoning_content) {
          thinking.hidden = false;
          reasoning.append(...visible(delta.reasoning_content));
        }
        if (delta.content) {
          said += delta.content;
          reply.append(...visible(delta.content));
        }
        if (delta.content || delta.reasoning_content) {
          pieces += 1;
          fill(status, `${fixed((performance.now() - started) / 1000, 1)} s`);
          const isNear = this.scroller.scrollTop + this.scroller.clientHeight > this.scroller.scrollHeight - 120;
          if (isNear) this.scroller.scrollTop = this.scroller.scrollHeight;
        }
        const calls = delta.tool_calls;
        if (calls) reply.append(...visible(calls.map((call) => call.function?.arguments ?? call.function?.name ?? "").join("")));
      }
      this._finish(article);
      if (model.branch !== null) {
        await this.onrecorded();
        model.showBranch(null);
      }
      await this.onrecorded();
      if (pieces === 0 && !said) announce("The reply is empty.");
    } catch (error) {
      this._finish(article);
      if (this.signal.aborted) return;
      const isStopped = abort.signal.aborted;
      announce(isStopped ? "Stopped. Nothing of this turn is on record." : error.message, isStopped ? "info" : "error");
      if (typed && !this.text.value) (this.text.value = typed), this._grow();
      this.onrecorded();
    }
  }

  _finish(article) {
    this.pending = null;
    article.remove();
    for (const one of this.list.querySelectorAll(".left-behind")) one.classList.remove("left-behind");
    fill(this.sendButton, "Send");
    this.update();
  }

  _parameters() {
    const given = Object.entries(this.fields).filter(([, field]) => field.value !== "" && field.validity.valid);
    return Object.fromEntries(given.map(([name, field]) => [name, Number(field.value)]));
  }

  // Watching somebody else's turn

  streamed({ kind, texts }) {
    if (this.pending || this.model.branch !== null || kind !== "sampled" || !texts) return;
    this.live ??= h("article.turn.pending.live", { "aria-label": "A turn that is being generated" }, h("header", {}, h("span.turn-number", {}, "…"), h("span.turn-facts", {}, h("span.pulse"), "generating")), h("div.message.role-assistant", {}, h("span.role", {}, "assistant"), h("div.said", {}, (this.liveText = h("div.text", { dir: "auto" })))));
    if (!this.live.isConnected) {
      this.empty?.remove();
      fill(this.liveText);
      this.list.append(this.live);
    }
    const isNear = this.scroller.scrollTop + this.scroller.clientHeight > this.scroller.scrollHeight - 120;
    this.liveText.append(...visible(texts.join("")));
    if (isNear) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  recorded() {
    this.live?.remove();
    this.live = null;
  }
}
