// The turns of a session as a tree: retries, edits, branches and conversations, and what each turn is.

import { post } from "./api.js";
import { factsOf, messageOf } from "./conversation.js";
import { announce, count, fill, h, placeholder, plain, reward, s } from "./dom.js";

const STEP_X = 58;
const STEP_Y = 42;
const RADIUS = 13;
const MARGIN = 30;
const LABEL = 330; // pixels of a text beside the end of a branch

/** A column and a lane for each turn: the path that goes on is straight, branches lie below where they part. */
export function layout(roots) {
  const placed = [];
  let lanes = 0;
  const start = { node: { turn: 0, is_current: true }, x: 0, y: 0, above: null };
  const current = roots.find((node) => node.is_current);
  const ordered = current ? [current, ...roots.filter((node) => node !== current)] : roots;
  const pending = ordered.map((node) => ({ node, lane: null, above: start })).reverse();
  while (pending.length) {
    const { node, lane, above } = pending.pop();
    const place = { node, x: node.depth, y: lane ?? lanes, above };
    if (lane === null) lanes += 1;
    placed.push(place);
    const first = node.children.find((child) => child.is_current) ?? node.children.at(-1);
    const others = node.children.filter((child) => child !== first);
    for (const child of others.reverse()) pending.push({ node: child, lane: null, above: place });
    if (first) pending.push({ node: first, lane: place.y, above: place });
  }
  return { placed, lanes, depth: placed.reduce((most, place) => Math.max(most, place.x), 0) };
}

export function tree(model, { address }) {
  const drawing = h("div.tree-drawing", { tabindex: 0, role: "tree", "aria-label": "Turns; arrows go from turn to turn" });
  const side = h("aside.tree-side.panel", { "aria-label": "The chosen turn" });
  const words = h("p.tree-words.muted");
  const element = h("div.tree-view", {}, h("div.tree-main.panel", {}, words, drawing), side);
  let chosen = null;
  let other = null; // the turn to compare with
  let places = new Map();

  function draw() {
    const { placed, lanes, depth } = layout(model.roots ?? []);
    places = new Map(placed.map((place) => [place.node.turn, place]));
    if (!placed.length) {
      fill(drawing, placeholder("No turns yet", "Each reply is a turn. A retry, or a message that was changed, begins a branch."));
      fill(words);
      return;
    }
    const isForest = model.info.history === "forest";
    fill(words, [count(placed.length, "turn"), count(placed.filter((place) => !place.node.children.length).length, "branch", "branches"), isForest && count(model.roots.length, "conversation")].filter(Boolean).join(" · "), h("span.tree-legend", {}, h("i.dot.current"), "the session goes on from here", h("i.dot"), "a branch", h("i.dot.edited"), "edited"));
    const width = depth * STEP_X + MARGIN * 2 + LABEL;
    const height = lanes * STEP_Y + MARGIN * 2 - 10;
    const x = (place) => MARGIN + place.x * STEP_X;
    const y = (place) => MARGIN + place.y * STEP_Y;
    const edges = placed
      .filter((place) => place.above)
      .map((place) => {
        const [ax, ay, bx, by] = [x(place.above) + RADIUS, y(place.above), x(place) - RADIUS, y(place)];
        const path = ay === by ? `M${ax} ${ay}H${bx}` : `M${ax - RADIUS} ${ay + RADIUS}V${by - 10}q0 10 10 10H${bx}`;
        return s(`path.edge${place.node.is_current ? ".current" : ""}`, { d: path });
      });
    const nodes = placed.map((place) => {
      const { node } = place;
      const classes = ["node", node.is_current && "current", node.edited && "edited", Number.isFinite(node.reward) && (node.reward > 0 ? "good" : node.reward < 0 ? "bad" : "zero")].filter(Boolean);
      const said = `Turn ${node.turn}${node.is_current ? ", on the current path" : ""}${node.children.length > 1 ? `, ${node.children.length} branches` : ""}`;
      return s(
        `g.${classes.join(".")}`,
        { transform: `translate(${x(place)} ${y(place)})`, "data-turn": node.turn, role: "treeitem", id: `node-${node.turn}`, "aria-label": said, "aria-level": node.depth, "aria-selected": "false", onclick: (event) => pick(node.turn, event.shiftKey) },
        s("title", {}, said),
        s("circle", { r: RADIUS }),
        s("text", { "text-anchor": "middle", dy: "0.35em" }, String(node.turn)),
        Number.isFinite(node.reward) && s("circle.reward", { cx: 10, cy: -10, r: 4.5 }),
      );
    });
    const begin = s("circle.begin", { cx: MARGIN, cy: MARGIN, r: 5 });
    const texts = placed.filter((place) => !place.node.children.length).map((place) => s("text.leaf-text", { x: x(place) + 22, y: y(place), dy: "0.35em" }, cut(plain(textOf(place.node.reply)), 52)));
    const roots = isForest ? placed.filter((place) => place.x === 1).map((place) => s("text.root-name", { x: x(place) - 14, y: y(place) - 20 }, cut(plain(openingOf(place.node)), 60))) : [];
    fill(drawing, s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "presentation" }, edges, begin, nodes, texts, roots));
    mark();
  }

  function openingOf(node) {
    const known = model.info.conversations?.find((one) => one.root === node.turn);
    return known?.opening || textOf(node.messages?.find((message) => message.role === "user")) || `turn ${node.turn}`;
  }

  const cut = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);
  const textOf = (message) => (typeof message?.content === "string" ? message.content : "");

  function mark() {
    for (const node of drawing.querySelectorAll(".node")) {
      const turn = Number(node.dataset.turn);
      node.classList.toggle("chosen", turn === chosen);
      node.classList.toggle("other", turn === other);
      node.setAttribute("aria-selected", String(turn === chosen));
    }
    drawing.setAttribute("aria-activedescendant", chosen ? `node-${chosen}` : "");
  }

  function pick(turn, asOther = false) {
    if (asOther && chosen && turn !== chosen) {
      location.hash = address(`compare/${chosen}/${turn}`);
      return;
    }
    chosen = turn;
    mark();
    showSide();
    const place = places.get(turn);
    if (place) {
      const [left, top] = [MARGIN + place.x * STEP_X, MARGIN + place.y * STEP_Y];
      if (left < drawing.scrollLeft + 40 || left > drawing.scrollLeft + drawing.clientWidth - 60) drawing.scrollLeft = left - drawing.clientWidth / 2;
      if (top < drawing.scrollTop + 30 || top > drawing.scrollTop + drawing.clientHeight - 40) drawing.scrollTop = top - drawing.clientHeight / 2;
    }
  }

  /** Ends of other branches, the nearest first: what one would compare a turn with. */
  function rivals(node) {
    const mine = new Set(model.pathTo(node.turn).map((one) => one.turn));
    const below = (one) => (one.turn === node.turn ? true : model.pathTo(one.turn).some((above) => above.turn === node.turn));
    return [...model.nodes.values()]
      .filter((one) => !one.children.length && !mine.has(one.turn) && !below(one))
      .map((one) => ({ one, shared: model.pathTo(one.turn).filter((above) => mine.has(above.turn)).length }))
      .sort((a, b) => b.shared - a.shared || Number(b.one.is_current) - Number(a.one.is_current) || b.one.turn - a.one.turn)
      .slice(0, 200)
      .map(({ one }) => one);
  }

  function showSide() {
    const node = model.nodes.get(chosen);
    if (!node) {
      fill(side, placeholder("Choose a turn", "Click one, or use the arrows. Shift and a click on another one compares the two."));
      return;
    }
    const others = rivals(node);
    const choice = h("select", { "aria-label": "Compare with" }, others.map((one) => h("option", { value: String(one.turn) }, `turn ${one.turn}${one.is_current ? ", current" : ""}`)));
    const input = h("input", { type: "number", step: "any", "aria-label": `Reward of turn ${node.turn}`, placeholder: "none", value: Number.isFinite(node.reward) ? String(node.reward) : "" });
    fill(
      side,
      h("header.side-head", {}, h("h2", {}, `Turn ${node.turn}`), h("span.turn-facts", {}, factsOf(node).map((fact) => h("span", {}, fact)), !node.delivered && h("span", { title: "The client did not get the end of this response" }, "not delivered"))),
      h(
        "div.side-actions",
        {},
        h("a.button", { href: address("", `turn=${node.turn}`) }, "Messages and tokens"),
        h("button.primary", { onclick: () => model.fork(node.turn) }, "Fork from here"),
        others.length > 0 && h("span.compare-with", {}, h("button", { onclick: () => (location.hash = address(`compare/${node.turn}/${choice.value}`)) }, "Compare with"), choice),
        h("form.reward-form", { onsubmit: (event) => (event.preventDefault(), setReward(node, input.value)) }, h("label", {}, "Reward ", input), h("button", {}, "Set")),
      ),
      h("div.side-messages", {}, (node.messages ?? []).map(messageOf), node.reply && messageOf({ role: "assistant", ...node.reply })),
    );
  }

  async function setReward(node, text) {
    if (text === "") return;
    try {
      await post(`${model.path}/reward`, { reward: Number(text), turn: node.turn });
      await model.load();
      announce(`Turn ${node.turn} has the reward ${reward(Number(text))}.`);
    } catch (error) {
      announce(error.message, "error");
    }
  }

  function go(to) {
    if (to) pick(to.turn);
    return true;
  }

  draw();
  return {
    element,
    close() {},
    show(query) {
      const turn = Number(query.get("turn")) || chosen || model.tip?.turn;
      if (model.nodes.has(turn)) pick(turn);
      else showSide();
    },
    update() {
      draw();
      showSide();
    },
    key(event) {
      const node = model.nodes.get(chosen);
      if (!node) return false;
      const level = [...places.values()].filter((place) => place.x === places.get(chosen).x).sort((a, b) => a.y - b.y);
      const at = level.findIndex((place) => place.node === node);
      if (event.key === "ArrowLeft") return go(model.nodes.get(node.parent));
      if (event.key === "ArrowRight") return go(node.children.find((child) => child.is_current) ?? node.children.at(-1));
      if (event.key === "ArrowUp") return go(level[at - 1]?.node);
      if (event.key === "ArrowDown") return go(level[at + 1]?.node);
      if (event.key === "Enter" && document.activeElement === drawing) return (location.hash = address("", `turn=${chosen}`)), true;
      return false;
    },
  };
}
