// One session: what is known of it, kept up to date by its events, and the views that show it.

import { ApiError, follow, get, post, request, sessionPath } from "./api.js";
import { Conversation } from "./conversation.js";
import { announce, count, fill, h, loading, placeholder, plain, reward, span } from "./dom.js";
import { stateBadge } from "./overview.js";
import { PAGE, TokenStore } from "./store.js";
import { WindowStrip } from "./strip.js";
import { TokenView } from "./tokens.js";

/** What the views share. Events: `change` (facts or turns), `path` (another branch is shown). */
class Session extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.path = sessionPath(id);
    this.info = null;
    this.nodes = new Map(); // turn -> row of the tree, with `children` and `depth`
    this.branch = null; // the turn whose path is shown; null: the branch that goes on
    this.store = new TokenStore(id);
    this.shown = this.store;
  }

  get canTalk() {
    return this.info && this.info.kind !== "tokens";
  }

  async load() {
    if (this.info?.kind !== "chat") {
      // Only lists know every session: one of raw tokens has no messages that could be asked for.
      const { data } = await get(`sessions?page_size=10&q=${encodeURIComponent(this.id)}`);
      this.info = data.find((one) => one.session_id === this.id);
      if (!this.info) throw new ApiError(404, "session_not_found", "There is no such session.");
    }
    if (this.info.kind !== "tokens") this.info = { ...this.info, ...(await get(`${this.path}?records=messages`)) };
    this._plant(this.info.metadata?.tree ?? []);
    this.store.setTurns(this.pathTo(this.tip?.turn));
    this.dispatchEvent(new Event("change"));
  }

  _plant(rows) {
    this.nodes = new Map(rows.map((row) => [row.turn, { ...row, children: [], depth: 1 }]));
    this.roots = [];
    for (const node of this.nodes.values()) {
      const parent = this.nodes.get(node.parent);
      (parent ? parent.children : this.roots).push(node);
      node.depth = parent ? parent.depth + 1 : 1;
    }
    this.store.capacity = this.info.window?.recent ?? Infinity;
    this.tip = [...this.nodes.values()].filter((node) => node.is_current).reduce((last, node) => (last && last.depth > node.depth ? last : node), null);
  }

  pathTo(turn) {
    const path = [];
    for (let node = this.nodes.get(turn); node; node = this.nodes.get(node.parent)) path.push(node);
    return path.reverse();
  }

  /** The turns that are shown, from the first one on. */
  get turns() {
    return this.pathTo(this.branch ?? this.tip?.turn);
  }

  /** Show the branch of a turn. On the branch that goes on, all of that is shown. */
  showBranch(turn) {
    const node = turn === null ? null : this.nodes.get(turn);
    const branch = !node || node.is_current ? null : turn;
    if (branch !== null && this.branch !== null && this.turns.some((one) => one.turn === branch)) return;
    if (branch === this.branch) return;
    this.branch = branch;
    this.shown = branch === null ? this.store : new TokenStore(this.id, branch, this.pathTo(branch));
    this.shown.load(0);
    this.dispatchEvent(new Event("path"));
  }

  /** A new session with the history up to a turn (null: all of it), and its page. */
  async fork(turn) {
    try {
      const { session_id: id } = await post(`${this.path}/fork`, turn === null ? {} : { turn });
      announce(turn === null ? "Forked: this is the new session." : `Forked from turn ${turn}: this is the new session.`);
      location.hash = `#/s/${encodeURIComponent(id)}`;
    } catch (error) {
      announce(error.message, "error");
    }
  }

  told(state) {
    const { session_id: _, ...facts } = state;
    this.info = { ...this.info, ...facts };
    this.dispatchEvent(new Event("change"));
  }
}

const TABS = [
  ["", "Session", "messages beside tokens"],
  ["tokens", "Tokens", "t"],
  ["tree", "Tree", "g"],
  ["samples", "Samples", "s"],
];

export function session(main, id, { setCrumbs, setConnection }) {
  const stopping = new AbortController();
  const { signal } = stopping;
  const model = new Session(id);
  const address = (view = "", query = "") => `#/s/${encodeURIComponent(id)}${view && `/${view}`}${query && `?${query}`}`;
  let current = ""; // the view
  let detail = null; // what the tab shows, where it is not messages and tokens
  let wanted = { parts: [], query: new URLSearchParams() };

  main.className = "session";
  fill(main, loading("Loading the session"));
  setCrumbs(id);

  // The head

  const title = h("h1", {});
  const facts = h("p.facts");
  const actions = h("div.actions");
  const tabs = h("nav.tabs", { "aria-label": "Views" });
  const strip = new WindowStrip((position) => (showView("tokens" === current ? "tokens" : ""), view.go(position, 0.3)));
  const body = h("div.body");
  const colours = h("div.segments", { role: "group", "aria-label": "Colour tokens by" });
  const following = h("button.follow", { "aria-pressed": "false", onclick: () => view.follow(!view.isFollowing), title: "Keep the newest token in sight (f)" }, "Follow");
  const legend = h("p.legend");
  const tokenPanel = h("section.panel.token-panel", { "aria-label": "Tokens" });
  const conversation = new Conversation(model, { address, goTo: (turn) => select(turn), signal });
  const split = h("div.split", {}, conversation.element, tokenPanel);
  let view = null;
  let mode = "kind";

  function renderHead() {
    const { info } = model;
    const name = plain(info.label || "") || "Untitled session";
    setCrumbs(info.label ? name : id.slice(0, 8));
    fill(title, name, stateBadge(info), info.kind && info.kind !== "chat" && h("span.tag", {}, info.kind));
    const parts = [
      h("code.id", {}, id),
      count(info.history_length, "token"),
      info.kind !== "tokens" && count(model.nodes.size, "turn"),
      info.kind !== "tokens" && info.branches > 1 && count(info.branches, "branch", "branches"),
      info.group && ["group ", h("b", {}, plain(info.group))],
      Number.isFinite(info.reward) && ["reward ", h(info.reward > 0 ? "b.good" : "b.bad", {}, reward(info.reward))],
      info.created_at && h("span", { title: new Date(info.created_at * 1000).toLocaleString() }, `created ${span(Date.now() / 1000 - info.created_at)} ago`),
    ];
    fill(facts, parts.filter(Boolean).map((part) => h("span.fact", {}, part)));
    if (info.failure) facts.append(h("span.fact.bad", {}, plain(info.failure)));
    showStrip();
  }

  function renderTabs() {
    fill(
      tabs,
      TABS.filter(([name]) => model.canTalk || name === "tokens").map(([name, label, key]) =>
        h("a", { href: address(name), "aria-current": name === current || (name === "tree" && current === "compare") ? "page" : null, title: key.length === 1 ? `${label} (${key})` : key }, label),
      ),
    );
  }

  function showStrip() {
    const { shown, info } = model;
    const window = shown.total ? shown.window : { ...info.window, dropped_range: info.dropped_range };
    strip.show({ total: shown.total || info.history_length, window, capacity: info.window.recent, turns: shown.turns, bytes: info.kv_live_bytes });
  }

  function showTokens() {
    view?.close();
    const isNew = view === null;
    view = new TokenView(model.shown, { label: "Tokens of the session; Enter, then arrows to look at one", mode, onlook: (from, to) => (strip.look(from, to), conversation.look(from, to)) });
    view.element.addEventListener("follow", ({ detail: isOn }) => following.setAttribute("aria-pressed", String(isOn)));
    fill(tokenPanel, h("div.panel-bar", {}, h("h2", {}, model.branch === null ? "Tokens" : `Tokens up to turn ${model.branch}`), legend, colours, model.branch === null && following), view.element);
    model.shown.addEventListener("shape", showStrip, { signal: view.stopping.signal });
    model.shown.addEventListener("append", showStrip, { signal: view.stopping.signal });
    following.setAttribute("aria-pressed", "false");
    model.shown.page(0);
    if (isNew && !wanted.query.has("turn") && !wanted.query.has("at")) view.follow(true);
    view.draw(true);
    renderMode();
  }

  function renderMode() {
    fill(
      colours,
      [["kind", "kind"], ["logprob", "logprob"]].map(([name, label]) => h("button", { "aria-pressed": String(mode === name), onclick: () => setMode(name), title: `Colour by ${label} (c)` }, label)),
    );
    fill(
      legend,
      mode === "kind"
        ? ["given", "sampled", "recalled"].map((kind) => h(`mark.kind-${kind}`, {}, kind))
        : ["sure", h("span.heat-scale", { "aria-hidden": "true" }, [0, 1, 2, 3, 4, 5, 6, 7].map((level) => h(`i.heat-${level}`))), "surprising"],
    );
  }

  function setMode(name) {
    mode = name;
    view.setMode(mode);
    renderMode();
  }

  // Views

  async function showView(name) {
    if (name === current && body.firstChild) return;
    current = name;
    detail?.close();
    detail = null;
    renderTabs();
    main.dataset.view = name || "session";
    if (name === "" || name === "tokens") {
      split.classList.toggle("tokens-only", name === "tokens" || !model.canTalk);
      fill(body, split);
      view.draw();
      if (conversation.selected === null) conversation.toEnd();
      return;
    }
    const tools = { address, signal, announce };
    fill(body, loading());
    const made =
      name === "tree"
        ? (await import("./tree.js")).tree(model, tools)
        : name === "compare"
          ? (await import("./compare.js")).compare(model, wanted.parts.slice(1).map(Number), tools)
          : (await import("./samples.js")).samples(model, tools);
    if (current !== name) return made.close();
    detail = made;
    fill(body, made.element);
    made.show?.(wanted.query);
  }

  function select(turn) {
    if (!model.nodes.has(turn)) return;
    const query = new URLSearchParams({ turn });
    location.hash = address(current === "talk" ? "" : current, query.toString());
  }

  async function show() {
    if (!model.info) return; // shown once it is here
    const { parts, query } = wanted;
    let name = parts[0] ?? "";
    const isTalk = name === "talk";
    if (isTalk) name = "";
    if (!model.canTalk && name === "") name = "tokens";
    if (name === "compare" && current === "compare") body.replaceChildren(); // other turns
    const turn = query.has("turn") ? Number(query.get("turn")) : null;
    if (turn !== null && model.nodes.has(turn)) model.showBranch(turn);
    await showView(name);
    if (turn !== null) {
      conversation.select(turn);
      const found = model.shown.turns.find((one) => one.turn === turn);
      if (!model.shown.total) await model.shown.load(0);
      if (found && (name === "" || name === "tokens") && !query.has("at")) view.go(found.start, 0);
    }
    if (query.has("at") && (name === "" || name === "tokens")) {
      await model.shown.load(Math.floor(Number(query.get("at")) / PAGE));
      view.go(Number(query.get("at")), 0.3);
      view.mark = Number(query.get("at"));
    }
    detail?.show?.(query);
    if (isTalk) conversation.write();
  }

  async function start() {
    try {
      await model.load();
      await model.store.load(0);
      const last = model.store.numPages - 1;
      if (last > 0) await model.store.load(last); // tokens that come from now on follow what is here
    } catch (error) {
      if (signal.aborted) return;
      const isGone = error.status === 404;
      fill(
        main,
        placeholder(isGone ? "There is no such session" : "The session could not be read", isGone ? "It may be closed, or belong to another owner." : error.message, h("a.button", { href: "#/" }, "All sessions"), !isGone && h("button", { onclick: () => (fill(main, loading("Loading the session")), start()) }, "Try again")),
      );
      return;
    }
    if (signal.aborted) return;
    fill(main, h("header.session-head", {}, h("div.titles", {}, title, facts), actions), strip.element, tabs, body);
    fill(actions, model.canTalk && h("button", { onclick: () => model.fork(null), title: "A new session with the same history" }, "Fork"), h("button.danger", { onclick: close }, "Close session"));
    renderHead();
    conversation.update();
    showTokens();
    show();
    watch();
    main.dataset.loaded = "1";
  }

  model.addEventListener("change", () => {
    if (!main.contains(body)) return;
    renderHead();
    renderTabs();
    conversation.update();
    detail?.update?.();
  });
  model.addEventListener("path", () => {
    showTokens();
    showStrip();
    conversation.update();
  });

  let reading = null;
  let isOld = false;

  /** Turns have changed: read them again, once at a time. */
  function reload() {
    isOld = true;
    reading ??= (async () => {
      while (isOld && !signal.aborted) {
        isOld = false;
        await Promise.all([model.load(), model.store.refresh()]);
      }
    })()
      .catch((error) => signal.aborted || announce(error.message, "error"))
      .finally(() => (reading = null));
    return reading;
  }

  let hadGap = false; // in the events: what happened meanwhile is read

  function watch() {
    follow(
      `${model.path}/events`,
      {
        state: (state) => model.told(state),
        tokens: (tokens) => {
          const tip = model.tip?.turn ?? 0;
          const isElsewhere = model.info.history === "forest" && tokens.parent !== undefined && (tokens.parent || 0) !== tip;
          if (isElsewhere) return; // another conversation of the forest: it is read when its turn is on record
          conversation.streamed(tokens);
          if (!model.store.append(tokens)) model.store.refresh();
        },
        turn: () => (conversation.recorded(), reload()),
        discarded: () => (conversation.recorded(), reload()),
        lagged: () => (conversation.recorded(), reload()),
        closed: () => {
          stopping.abort();
          setConnection("gone");
          main.prepend(h("p.banner", { role: "alert" }, "This session was closed. What you see is what was read before."));
        },
      },
      { signal, onState: watching },
    );
  }

  function watching(state) {
    setConnection(state);
    if (state === "open" && hadGap) reload();
    hadGap = state === "closed";
  }

  conversation.onrecorded = reload;

  async function close() {
    const dialog = h(
      "dialog.sheet",
      { "aria-label": "Close session" },
      h("h2", {}, "Close this session?"),
      h("p", {}, "Its slab is freed, and requests for it fail from then on. With a journal, its record stays until it is purged."),
      h("form.buttons", { method: "dialog" }, h("button", { value: "" }, "Keep it"), h("button.danger", { value: "close" }, "Close session")),
    );
    document.body.append(dialog);
    dialog.addEventListener("close", async () => {
      dialog.remove();
      if (dialog.returnValue !== "close") return;
      try {
        await request(model.path, { method: "DELETE" });
        location.hash = "#/";
      } catch (error) {
        announce(error.message, "error");
      }
    });
    dialog.showModal();
  }

  function step(by) {
    const { turns } = model;
    const at = turns.findIndex((node) => node.turn === conversation.selected);
    const next = turns[at < 0 ? (by > 0 ? 0 : turns.length - 1) : Math.max(0, Math.min(turns.length - 1, at + by))];
    if (next) select(next.turn);
  }

  const keys = {
    t: () => (location.hash = address(current === "tokens" ? "" : "tokens")),
    g: () => (location.hash = address(current === "tree" ? "" : "tree", conversation.selected ? `turn=${conversation.selected}` : "")),
    s: () => (location.hash = address(current === "samples" ? "" : "samples")),
    c: () => setMode(mode === "kind" ? "logprob" : "kind"),
    f: () => view.follow(!view.isFollowing),
    m: () => (location.hash = address("talk")),
    "/": () => (location.hash.includes("/talk") || current !== "" ? ((location.hash = address()), setTimeout(() => conversation.search())) : conversation.search()),
    ArrowLeft: () => step(-1),
    ArrowRight: () => step(1),
  };

  start();

  return {
    id,
    show(parts, query) {
      wanted = { parts, query };
      show();
    },
    close() {
      stopping.abort();
      view?.close();
      detail?.close();
      strip.close();
      delete main.dataset.loaded;
      delete main.dataset.view;
    },
    typing(event) {
      conversation.typing(event);
    },
    key(event) {
      if (!model.info) return false;
      if (detail?.key?.(event)) return true;
      const action = keys[event.key];
      if (!action || (!model.canTalk && "gsm/".includes(event.key))) return false;
      action();
      return true;
    },
  };
}
