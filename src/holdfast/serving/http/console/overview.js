// All sessions of the owner: a list that can be searched and sorted, what the server does right now, and its cluster.

import { follow, get, post } from "./api.js";
import { announce, count, fill, fixed, grouped, h, loading, placeholder, plain, reward, s, short, span } from "./dom.js";
import { members } from "./members.js";
import { VirtualList } from "./virtual.js";

const ROW_HEIGHT = 40;
const PAGE = 1000; // sessions in one request, the most that the server gives

const time = (row) => row.last_used_at ?? 0;
const COLUMNS = [
  { name: "state", label: "State", value: (row) => stateOf(row), first: 1 },
  { name: "label", label: "Session", value: (row) => (row.label || row.session_id).toLowerCase(), first: 1 },
  { name: "group", label: "Group", value: (row) => row.group ?? "", first: 1 },
  { name: "turns", label: "Turns", value: (row) => row.turns ?? -1, first: -1 },
  { name: "tokens", label: "Tokens", value: (row) => row.history_length, first: -1 },
  { name: "window", label: "Pinned · forgotten · in view", value: (row) => row.dropped_tokens, first: -1 },
  { name: "reward", label: "Reward", value: (row) => row.reward ?? -Infinity, first: -1 },
  { name: "used", label: "Last used", value: time, first: -1 },
];

export const stateOf = (row) => (row.is_busy ? "busy" : row.state);

export function stateBadge(row) {
  const state = stateOf(row);
  return h(`span.state.${state}`, {}, state);
}

/** Pinned, forgotten and seen tokens of a row, as a small bar on the scale of the history or, if larger, the window. */
export function miniWindow(row) {
  const { history_length: length, dropped_tokens: dropped, window } = row;
  const scale = Math.max(length, window.sink + window.recent, 1);
  const pinned = Math.min(length, window.sink);
  const bar = s("svg.mini", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  let at = 0;
  for (const [zone, tokens] of [["pinned", pinned], ["forgotten", dropped], ["seen", length - pinned - dropped]]) {
    const width = tokens ? Math.max(1.2, (tokens / scale) * 100) : 0;
    if (width) bar.append(s(`rect.fill-${zone}`, { x: at, y: 0, width, height: 8 }));
    at += width;
  }
  return bar;
}

export function overview(main, { setCrumbs, setConnection }) {
  const stopping = new AbortController();
  const rows = new Map(); // id -> row, as the server told it
  let shown = [];
  let sort = { name: "used", direction: -1 };
  let filter = "all";
  let chosen = -1;
  let isComplete = false;
  setCrumbs();

  // What the server does

  const tiles = {};
  const tile = (name, label, title) => {
    tiles[name] = { value: h("strong", {}, "–"), note: h("span.note", {}) };
    return h(`div.tile.${name}`, { title }, h("span.tile-label", {}, label), tiles[name].value, tiles[name].note);
  };
  const stats = h(
    "section.stats",
    { "aria-label": "The server now" },
    tile("live", "Live", "Sessions that hold a slab: a fixed piece of cache"),
    tile("parked", "Parked", "Sessions without a slab; the next request wakes them"),
    tile("busy", "Busy", "Sessions that compute or generate"),
    tile("queue", "Queue", "Generations that wait for their turn, and those that run"),
    tile("speed", "Tokens per second", "Sampled tokens of all sessions"),
    tile("ttft", "Time to first token", "Median of the latest requests"),
  );
  const gauge = s("svg.gauge", { viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect.gauge-used", { height: 4 }));
  tiles.live.note.after(gauge);
  const speeds = [];
  const spark = s("svg.spark", { viewBox: "0 0 60 20", preserveAspectRatio: "none", "aria-hidden": "true" }, s("path", {}));
  tiles.speed.note.after(spark);

  function showServer(server) {
    const { sessions, slabs } = server;
    fill(tiles.live.value, grouped(sessions.live));
    fill(tiles.live.note, slabs?.total ? `of ${count(slabs.total, "slab")}` : "");
    gauge.firstChild.setAttribute("width", slabs?.total ? (100 * slabs.used) / slabs.total : 0);
    fill(tiles.parked.value, grouped(sessions.parked));
    fill(tiles.parked.note, sessions.resting ? `${grouped(sessions.resting)} at rest on disk` : "");
    fill(tiles.busy.value, grouped(sessions.busy));
    fill(tiles.queue.value, grouped(server.queue));
    fill(tiles.queue.note, server.running ? `${grouped(server.running)} running` : "nothing running");
    const speed = server.tokens_per_s ?? 0;
    fill(tiles.speed.value, speed >= 100 ? grouped(Math.round(speed)) : fixed(speed, 1));
    const first = server.ttft_p50_ms;
    fill(tiles.ttft.value, Number.isFinite(first) ? (first >= 1000 ? `${fixed(first / 1000, 2)} s` : `${fixed(first, first < 10 ? 1 : 0)} ms`) : "–");
    fill(tiles.ttft.note, Number.isFinite(first) ? "median of 10 s" : "none in 10 s");
    speeds.push(speed);
    if (speeds.length > 60) speeds.shift();
    const most = Math.max(...speeds, 1);
    const points = speeds.map((one, index) => `${60 - speeds.length + index + 1},${(19 - (17 * one) / most).toFixed(1)}`);
    spark.firstChild.setAttribute("d", `M${points.join("L")}`);
  }

  // The list

  const search = h("input.search", { type: "search", placeholder: "Search label, group or id", "aria-label": "Search sessions", oninput: () => ((list.element.scrollTop = 0), arrange()), autocomplete: "off", spellcheck: "false" });
  const total = h("span.total.muted", { role: "status" });
  const filters = h("div.segments", { role: "group", "aria-label": "State" });
  for (const name of ["all", "live", "parked", "busy"])
    filters.append(h("button", { "aria-pressed": String(name === filter), onclick: () => setFilter(name) }, name));
  const create = h("button.primary", { onclick: newSession, title: "New session (n)" }, "New session");
  const heads = h("div.row.heads", { role: "row" });
  const list = new VirtualList(ROW_HEIGHT, renderRow);
  const state = h("div.list-state", {}, loading("Loading sessions"));
  const table = h("div.sessions", { role: "table", "aria-label": "Sessions", "aria-rowcount": "-1" }, h("div", { role: "rowgroup" }, heads), list.element);
  list.element.tabIndex = 0;
  list.element.setAttribute("aria-label", "Sessions; arrows choose, Enter opens");
  fill(main, h("h1.sr", {}, "Sessions"), stats, members(stopping.signal), h("div.bar", {}, h("label.search-box", {}, search, h("kbd", { "aria-hidden": "true" }, "/")), filters, total, create), h("div.list-frame", {}, table, state));
  main.className = "overview";

  function renderHeads() {
    fill(
      heads,
      COLUMNS.map(({ name, label }) =>
        h(
          `span.cell.${name}`,
          { role: "columnheader", "aria-sort": sort.name === name ? (sort.direction > 0 ? "ascending" : "descending") : "none" },
          h("button", { onclick: () => setSort(name) }, label, sort.name === name && h("span.sorted", { "aria-hidden": "true" }, sort.direction > 0 ? "▲" : "▼")),
        ),
      ),
    );
  }

  function renderRow(row, index, element) {
    if (element.item !== row || !element.firstChild) {
      element.item = row;
      element.setAttribute("role", "row");
      const name = plain(row.label || "");
      fill(
        element,
        h("span.cell.state", { role: "cell" }, stateBadge(row)),
        h(
          "span.cell.label",
          { role: "cell" },
          h("a", { href: `#/s/${encodeURIComponent(row.session_id)}`, tabindex: "-1", title: name }, name || h("span.muted", {}, "no label")),
          h("code.id", {}, row.session_id),
          row.kind && row.kind !== "chat" && h("span.tag", {}, row.kind),
        ),
        h("span.cell.group", { role: "cell" }, plain(row.group ?? "")),
        h("span.cell.turns", { role: "cell" }, row.kind === "tokens" ? "–" : grouped(row.turns)),
        h("span.cell.tokens", { role: "cell" }, short(row.history_length)),
        h("span.cell.window", { role: "cell", title: `${count(row.dropped_tokens, "token")} forgotten` }, miniWindow(row)),
        h("span.cell.reward", { role: "cell" }, Number.isFinite(row.reward) ? h(row.reward > 0 ? "b.good" : row.reward < 0 ? "b.bad" : "b", {}, reward(row.reward)) : h("span.muted", {}, "–")),
        h("span.cell.used", { role: "cell" }, row.is_busy ? "now" : span(Date.now() / 1000 - time(row))),
      );
    }
    element.setAttribute("aria-rowindex", index + 2);
    element.classList.toggle("chosen", index === chosen);
  }

  function arrange() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const { value } = COLUMNS.find((column) => column.name === sort.name);
    const found = [];
    for (const row of rows.values()) {
      if (filter !== "all" && (filter === "busy" ? !row.is_busy : row.state !== filter)) continue;
      if (words.length && !words.every((word) => row.text.includes(word))) continue;
      row.key = value(row);
      found.push(row);
    }
    const { direction } = sort;
    found.sort((one, other) => (one.key < other.key ? -direction : one.key > other.key ? direction : 0));
    const kept = shown[chosen]?.session_id;
    shown = found;
    chosen = kept ? shown.findIndex((row) => row.session_id === kept) : -1;
    list.show(shown);
    const isAll = shown.length === rows.size;
    fill(total, isAll ? count(rows.size, "session") : `${grouped(shown.length)} of ${grouped(rows.size)}`, isComplete ? "" : " …");
    if (rows.size === 0 && isComplete) fill(state, placeholder("No sessions yet", "A session begins with POST /sessions, with any OpenAI client, or right here.", h("button.primary", { onclick: newSession }, "New session")));
    else if (!shown.length && isComplete) fill(state, placeholder("Nothing found", "No session fits this search."));
    else if (rows.size) fill(state);
  }

  function put(row) {
    row.text = `${row.label} ${row.group ?? ""} ${row.session_id} ${Object.values(row.client_metadata ?? {}).join(" ")}`.toLowerCase();
    if (row.last_used_at === undefined && Number.isFinite(row.idle_seconds)) row.last_used_at = Date.now() / 1000 - row.idle_seconds;
    rows.set(row.session_id, row);
  }

  let timer = 0;
  const arrangeSoon = () => (timer ||= setTimeout(() => ((timer = 0), arrange()), 250));

  async function load() {
    let token = "";
    try {
      do {
        const page = await get(`sessions?page_size=${PAGE}${token && `&page_token=${encodeURIComponent(token)}`}`, { signal: stopping.signal });
        page.data.forEach(put);
        if (!token) {
          arrange(); // the first page is there at once
          performance.mark("overview-first");
        }
        token = page.next_page_token;
      } while (token);
      isComplete = true;
      arrange();
      main.dataset.loaded = String(rows.size);
      performance.mark("overview-complete");
    } catch (error) {
      if (stopping.signal.aborted) return;
      fill(state, placeholder("The sessions could not be read", error.message, h("button", { onclick: () => (fill(state, loading("Loading sessions")), load()) }, "Try again")));
    }
  }

  function setSort(name) {
    const { first } = COLUMNS.find((column) => column.name === name);
    sort = { name, direction: sort.name === name ? -sort.direction : first };
    renderHeads();
    arrange();
    list.element.scrollTop = 0;
  }

  function setFilter(name) {
    filter = name;
    list.element.scrollTop = 0;
    for (const button of filters.children) button.setAttribute("aria-pressed", String(button.textContent === name));
    arrange();
  }

  function choose(index) {
    if (!shown.length) return;
    chosen = Math.max(0, Math.min(shown.length - 1, index));
    list.reveal(chosen);
    list.update(true);
  }

  async function newSession() {
    try {
      const { session_id: id } = await post("sessions");
      location.hash = `#/s/${encodeURIComponent(id)}/talk`;
    } catch (error) {
      announce(error.message, "error");
    }
  }

  list.space.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row?.item && !event.target.closest("a") && !String(getSelection())) location.hash = `#/s/${encodeURIComponent(row.item.session_id)}`;
  });

  renderHeads();
  load();
  follow(
    "events",
    {
      server: showServer,
      sessions: (event) => {
        event.data.forEach(put);
        arrangeSoon();
      },
      closed: (event) => {
        for (const id of event.session_ids) rows.delete(id);
        arrangeSoon();
      },
      lagged: () => (rows.clear(), load()),
    },
    { signal: stopping.signal, onState: setConnection },
  );
  const clock = setInterval(() => list.items.length && !timer && refreshTimes(), 5000);

  function refreshTimes() {
    for (const row of list.rows.values()) row.item = null;
    list.update(true);
  }

  return {
    id: "",
    show() {},
    close() {
      stopping.abort();
      clearInterval(clock);
      clearTimeout(timer);
      list.close();
      delete main.dataset.loaded;
    },
    typing(event) {
      if (event.target !== search || !["ArrowDown", "Enter"].includes(event.key)) return;
      event.preventDefault();
      search.blur();
      list.element.focus();
      choose(0);
      if (event.key === "Enter" && shown.length === 1) location.hash = `#/s/${encodeURIComponent(shown[0].session_id)}`;
    },
    key({ key }) {
      if (key === "/") (search.focus(), search.select());
      else if (key === "n") newSession();
      else if (key === "ArrowDown") choose(chosen + 1);
      else if (key === "ArrowUp") choose(chosen - 1);
      else if (key === "PageDown") choose(chosen + 15);
      else if (key === "PageUp") choose(chosen - 15);
      else if (key === "Home") choose(0);
      else if (key === "End") choose(shown.length - 1);
      else if (key === "Enter" && chosen >= 0 && !document.activeElement?.closest("button, a")) location.hash = `#/s/${encodeURIComponent(shown[chosen].session_id)}`;
      else return false;
      return true;
    },
  };
}
