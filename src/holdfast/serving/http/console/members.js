// The members of the cluster that the server is in: where each answers, and for how long it may.

import { get } from "./api.js";
import { count, fill, fixed, grouped, h, plain } from "./dom.js";

const PAUSE_MS = 2000; // between two looks
const EXPIRED = "expired";

const isAlive = (member) => member.state !== "dead" && member.state !== "left" && member.lease_left_s > 0;
const address = (text) => (text ? h("code", {}, plain(text)) : "–");

// What the cells of a column show, and from which text it is seen that one has changed.
const COLUMNS = [
  { label: "Member", text: (member, own) => `${member.name} ${member.name === own}`, show: (member, own) => [h("b", {}, plain(member.name)), member.name === own && h("span.tag", {}, "this server")] },
  { label: "State", text: (member) => `${member.state} ${isAlive(member)}`, show: showState },
  { label: "Sessions", about: "Sessions that it has in memory", isNumber: true, text: (member) => grouped(member.sessions) },
  { label: "Room", about: "Sessions that it can take without parking another one", isNumber: true, text: (member) => grouped(member.room) },
  { label: "Lease", about: "For how long it may serve without renewing its lease. After that, other members take its sessions over", isNumber: true, text: leaseOf, show: showLease },
  { label: "HTTP", text: (member) => member.http, show: (member) => address(member.http) },
  { label: "gRPC", text: (member) => member.grpc, show: (member) => address(member.grpc) },
  { label: "Version", text: (member) => member.version },
];

/** The last state that it noted; one that is silent since may be in none. */
function showState(member) {
  return h(isAlive(member) || member.state === "dead" ? `span.state.${member.state}` : "span.state", {}, member.state);
}

function leaseOf(member) {
  if (member.state === "left" || member.state === "dead") return "–";
  return member.lease_left_s > 0 ? `${fixed(member.lease_left_s, 1)} s` : EXPIRED;
}

function showLease(member) {
  const lease = leaseOf(member);
  return lease === EXPIRED ? h("b.bad", {}, lease) : lease;
}

/** A panel that is hidden where the server is in no cluster. It looks again and again until `signal` says stop. */
export function members(signal) {
  const total = h("span.muted", { role: "status" });
  const body = h("tbody");
  const heads = COLUMNS.map(({ label, about, isNumber }) => h(isNumber ? "th.number" : "th", { scope: "col", title: about }, label));
  const table = h("table", { "aria-label": "Members of the cluster" }, h("thead", {}, h("tr", {}, heads)), body);
  const panel = h("details.members.panel", { open: true, hidden: true }, h("summary", {}, h("h2", {}, "Cluster"), total), h("div.table-scroll", {}, table));
  const rows = new Map(); // name -> row, whose cells change only where they must: a selected address stays selected
  let timer = 0;
  signal.addEventListener("abort", () => clearTimeout(timer));

  function rowOf(member, own) {
    if (!rows.has(member.name)) rows.set(member.name, h("tr", {}, COLUMNS.map(({ isNumber }) => h(isNumber ? "td.number" : "td"))));
    const row = rows.get(member.name);
    row.classList.toggle("gone", !isAlive(member));
    COLUMNS.forEach(({ text, show = text }, index) => {
      const cell = row.cells[index];
      const now = text(member, own);
      if (cell.now !== now) fill(cell, show(member, own));
      cell.now = now;
    });
    return row;
  }

  function show({ this: own, members: all }) {
    const found = all.map((member) => rowOf(member, own));
    if (found.length !== body.rows.length || found.some((row, index) => row !== body.rows[index])) fill(body, found);
    const serving = all.filter((member) => isAlive(member) && member.state === "serving").length;
    const words = `${count(all.length, "member")}, ${serving === all.length ? "all" : serving} serving`;
    if (total.textContent !== words) fill(total, words);
    panel.hidden = false;
  }

  async function look() {
    try {
      const view = await get("cluster", { signal });
      if (!view.is_cluster) return;
      show(view);
    } catch (error) {
      if (signal.aborted || error.status === 404) return;
      fill(total, `The members could not be read: ${error.message}`);
    }
    timer = setTimeout(look, PAUSE_MS);
  }

  look();
  return panel;
}
