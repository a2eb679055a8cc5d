// Two branches side by side: where they part, token by token.

import { count, fill, grouped, h, loading, placeholder } from "./dom.js";
import { PAGE, TokenStore } from "./store.js";
import { shown, TokenView } from "./tokens.js";

/** The first position at which two stores differ, or where the shorter one ends. Pages are compared one by one. */
export async function firstDifference(one, other, from = 0) {
  await Promise.all([one.load(0), other.load(0)]);
  const end = Math.min(one.total, other.total);
  for (let number = Math.floor(from / PAGE); number * PAGE < end; number += 1) {
    await Promise.all([one.pages.has(number) || one.load(number), other.pages.has(number) || other.load(number)]);
    const [a, b] = [one.pages.get(number)?.ids, other.pages.get(number)?.ids];
    if (!a || !b) throw new Error("A page of tokens could not be read.");
    const length = Math.min(a.length, b.length);
    for (let index = 0; index < length; index += 1) if (a[index] !== b[index]) return number * PAGE + index;
  }
  return end;
}

export function compare(model, [left, right]) {
  const element = h("div.compare", {}, loading("Comparing"));
  const views = [];

  async function start() {
    if (!model.nodes.has(left) || !model.nodes.has(right)) {
      fill(element, placeholder("There are no such turns", "Choose two in the tree."));
      return;
    }
    const stores = [left, right].map((turn) => new TokenStore(model.id, turn, model.pathTo(turn)));
    // What two branches share is in the turns above both: their tokens need not be compared.
    const mine = model.pathTo(left).map((node) => node.turn);
    const common = model.pathTo(right).filter((node) => mine.includes(node.turn)).at(-1);
    let at;
    try {
      await Promise.all(stores.map((store) => store.load(0)));
      at = await firstDifference(...stores, stores[0].turns.find((one) => one.turn === common?.turn)?.end ?? 0);
    } catch (error) {
      fill(element, placeholder("The branches could not be compared", error.message));
      return;
    }
    const texts = stores.map((store) => (at < store.total ? store.token(at) : null));
    const sides = stores.map((store, index) => {
      const turn = index ? right : left;
      const view = new TokenView(store, { label: `Tokens up to turn ${turn}`, mark: at });
      views.push(view);
      return h("section.panel", { "aria-label": `Turn ${turn}` }, h("div.panel-bar", {}, h("h2", {}, `Turn ${turn}`), h("span.muted", {}, count(store.total, "token")), model.nodes.get(turn).is_current && h("span.tag", {}, "current")), view.element);
    });
    const quote = (token) => (token ? h("mark.differs", {}, shown(token)) : h("i", {}, "nothing more"));
    const isSame = !texts[0] && !texts[1];
    fill(
      element,
      h(
        "p.compare-words",
        { role: "status" },
        isSame ? ["Both have the same ", h("b", {}, count(at, "token")), "."] : ["The same for ", h("b", {}, count(at, "token")), common ? `, through turn ${common.turn}` : "", `. At position ${grouped(at)} turn ${left} has `, quote(texts[0]), ` and turn ${right} has `, quote(texts[1]), "."],
      ),
      h("div.compare-sides", {}, sides),
    );
    for (const view of views) view.go(Math.min(at, view.store.total - 1), 0.25);
    element.dataset.position = String(at);
    sync();
  }

  /** Both panes stay at the same place, as long as both have it. */
  function sync() {
    const [one, other] = views;
    let leader = null;
    for (const [view, follower] of [[one, other], [other, one]]) {
      view.pane.addEventListener("pointerenter", () => (leader = view));
      view.pane.addEventListener("focus", () => (leader = view));
      view.pane.addEventListener("scroll", () => {
        if (leader === view) follower.pane.scrollTop += view.pane.scrollTop - (view.last ?? view.pane.scrollTop);
        view.last = view.pane.scrollTop;
      });
    }
  }

  start();
  return {
    element,
    close() {
      for (const view of views) view.close();
    },
  };
}
