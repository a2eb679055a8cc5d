// What a trainer gets of a session: tokens with their loss mask, rewards, and whether certificates hold.

import { ApiError, get, request, sessionPath } from "./api.js";
import { bytes, count, fill, fixed, grouped, h, loading, placeholder, plain, reward, s } from "./dom.js";
import { PAGE, TokenStore } from "./store.js";
import { TokenView } from "./tokens.js";

const MASKED = { shared: "trained in an earlier sample", stale: "sampled from weights that are too old" };
const FORMATS = [["safetensors", "safetensors"], ["json", "json"], ["parquet", "parquet"]];

/** The tokens of a sample, with texts from the session where the ids are the same. */
class SampleStore extends TokenStore {
  constructor(sample) {
    super(sample.session_id, sample.branch);
    this.sample = sample;
    this.total = sample.tokens.length;
    this.turns = sample.turns.map((turn) => ({ turn: turn.number, start: turn.start, end: turn.end, name: `turn ${turn.number}${turn.masked ? `: ${MASKED[turn.masked] ?? turn.masked}` : ""}` }));
    this.window = { sink: 0, recent: this.total, dropped_range: null };
  }

  async _fetch(number, epoch) {
    const { sample } = this;
    const start = number * PAGE;
    const ids = sample.tokens.slice(start, start + PAGE);
    let told = { ids: [], texts: null };
    try {
      told = await get(`${sessionPath(this.id)}/tokens?turn=${this.turn}&start=${start}&limit=${PAGE}`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error; // the ids are here all the same
    }
    if (epoch !== this.epoch) return;
    const first = this.total - sample.loss_mask.length;
    const of = (values, none) => ids.map((_, index) => values?.[start + index - first] ?? none);
    const mask = of(sample.loss_mask, 0);
    this.pages.set(number, {
      start,
      length: ids.length,
      ids,
      texts: ids.map((id, index) => (told.ids[index] === id ? (told.texts?.[index] ?? null) : null)),
      kinds: ids.map((_, index) => this._kind(start + index)),
      mask,
      logprobs: of(sample.rollout_log_probs, null).map((one, index) => (mask[index] ? one : null)),
      sampling_logprobs: null,
      top: null,
      weight_versions: null,
    });
    this.tell("page", number);
  }

  _kind(position) {
    const one = this.turnAt(position);
    const turn = one && this.sample.turns.find((other) => other.number === one.turn);
    return turn && position >= turn.sampled_start ? "sampled" : "given";
  }
}

/** A sample's loss mask as a bar. */
function maskBar(sample) {
  const svg = s("svg.mask-bar", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": "Loss mask over the tokens" });
  const scale = 1000 / Math.max(1, sample.tokens.length);
  svg.append(s("rect.mask-off", { x: 0, y: 0, width: 1000, height: 10 }));
  for (const turn of sample.turns) {
    const width = Math.max(1, (turn.end - turn.sampled_start) * scale);
    svg.append(s(`rect.${turn.masked ? "mask-shared" : "mask-on"}`, { x: turn.sampled_start * scale, y: 0, width, height: 10 }));
  }
  return svg;
}

export function samples(model, { signal, announce }) {
  const list = h("div.sample-list", { role: "listbox", "aria-label": "Samples", tabindex: 0 });
  const detail = h("div.sample-detail.panel");
  const total = h("p.sample-words", { role: "status" });
  const branch = h("div.segments", { role: "group", "aria-label": "Branches" });
  const element = h("div.samples-view", {}, h("div.sample-bar", {}, total, branch, h("span.downloads", {}, h("span.muted", {}, "Download"), FORMATS.map(([format, label]) => h("button", { onclick: () => download(format) }, label)))), h("div.sample-body", {}, list, detail));
  let which = "all";
  let view = null;
  let found = [];
  let chosen = 0;

  function renderBranch() {
    fill(branch, [["all", "all branches"], ["tip", "current one"]].map(([name, label]) => h("button", { "aria-pressed": String(which === name), onclick: () => ((which = name), renderBranch(), load()) }, label)));
  }

  async function load() {
    view?.close();
    view = null;
    fill(list);
    fill(detail, loading("Making samples"));
    fill(total);
    try {
      const response = await request(`${model.path}/samples`, { method: "POST", json: { branch: which, format: "json" }, signal });
      const text = await response.text();
      const exported = JSON.parse(text);
      found = exported.samples;
      if (!found.length) {
        fill(detail, placeholder("No samples", exported.empty_reason === "no_records" ? "Nothing was sampled in this session yet." : plain(exported.empty_reason ?? "")));
        return;
      }
      const trained = found.reduce((sum, one) => sum + one.loss_mask.reduce((a, b) => a + b, 0), 0);
      fill(total, h("b", {}, count(found.length, "sample")), ` · ${count(trained, "token")} trained of ${grouped(found.reduce((sum, one) => sum + one.tokens.length, 0))} · ${bytes(text.length)} as JSON`);
      fill(list, found.map(card));
      choose(0);
      await verify(text, found);
    } catch (error) {
      if (!signal.aborted) fill(detail, placeholder("The samples could not be made", error.message, h("button", { onclick: load }, "Try again")));
    }
  }

  /** Whether what has arrived here is what was certified: it is sent back as it came. */
  async function verify(text, asked) {
    let told = null;
    try {
      told = await (await request("samples/verify", { method: "POST", body: text, signal })).json();
    } catch (error) {
      if (signal.aborted) return;
      for (const sample of asked) sample.checked = { ok: null, text: error.message };
    }
    for (const [index, sample] of asked.entries()) {
      const mine = told?.problems.filter((one) => one.startsWith(`sample ${index}:`)) ?? [];
      if (told) sample.checked = { ok: !mine.length, text: mine.length ? mine.map((one) => one.replace(/^sample \d+: /, "")).join("; ") : `digest ${sample.certificate?.digest.slice(0, 12) ?? ""}…` };
      if (found === asked) showCheck(index);
    }
    element.dataset.checked = String(asked.length);
  }

  function badge(sample) {
    const { checked } = sample;
    if (!checked) return h("span.check.waiting", {}, "checking");
    const [name, word] = checked.ok === null ? ["unknown", "not checked"] : checked.ok ? ["holds", "✓ certified"] : ["broken", "✗ broken"];
    return h(`span.check.${name}`, { title: checked.text }, word);
  }

  function showCheck(index) {
    list.children[index]?.querySelector(".check")?.replaceWith(badge(found[index]));
    if (index === chosen) showFacts();
  }

  function card(sample, index) {
    const trained = sample.loss_mask.reduce((a, b) => a + b, 0);
    return h(
      "div.sample-card",
      { role: "option", id: `sample-${index}`, "aria-selected": "false", onclick: () => choose(index) },
      h("div.sample-head", {}, h("b", {}, `Branch of turn ${sample.branch}`), badge(sample)),
      maskBar(sample),
      h("div.turn-facts", {}, h("span", {}, count(sample.tokens.length, "token")), h("span", {}, `${grouped(trained)} trained`), h("span", {}, count(sample.turns.length, "turn")), h("span", {}, plain(sample.status)), Number.isFinite(sample.reward) && h("b", { class: sample.reward > 0 ? "good" : "bad" }, `reward ${reward(sample.reward)}`)),
    );
  }

  const facts = h("dl.sample-facts");

  function showFacts() {
    const sample = found[chosen];
    const trained = sample.loss_mask.reduce((a, b) => a + b, 0);
    const sum = sample.rollout_log_probs.reduce((a, b) => a + b, 0);
    const rows = [
      ["Certificate", [badge(sample), " ", h("span.muted", {}, plain(sample.checked?.text ?? ""))]],
      ["Reward", Number.isFinite(sample.reward) ? reward(sample.reward) : "none"],
      ["Logprobs", `${plain(sample.logprob_kind)}, mean ${trained ? fixed(sum / trained, 3) : "–"}`],
      ["Weights", plain([...new Set(sample.weight_versions.flat().map((one) => (typeof one === "string" ? one : one.version)))].join(", ")) || "not named"],
      ["Left out", sample.num_left_out ? count(sample.num_left_out, "turn") : "nothing"],
    ];
    fill(facts, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  function spans(sample) {
    return h(
      "details.spans",
      {},
      h("summary", {}, `Spans of ${count(sample.turns.length, "turn")}`),
      h(
        "div.table-scroll",
        {},
        h(
          "table",
          {},
          h("thead", {}, h("tr", {}, ["Turn", "Given from", "Sampled from", "End", "Trained", "Finish", "Reward"].map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, sample.turns.map((turn) => h("tr", {}, [String(turn.number), grouped(turn.start), grouped(turn.sampled_start), grouped(turn.end), turn.masked ? (MASKED[turn.masked] ?? plain(turn.masked)) : grouped(turn.end - turn.sampled_start), plain(turn.finish_reason), reward(turn.reward)].map((value) => h("td", {}, value))))),
        ),
      ),
    );
  }

  function choose(index) {
    if (!found[index]) return;
    chosen = index;
    for (const [at, one] of [...list.children].entries()) one.setAttribute("aria-selected", String(at === index));
    list.setAttribute("aria-activedescendant", `sample-${index}`);
    list.children[index].scrollIntoView({ block: "nearest" });
    view?.close();
    const sample = found[index];
    view = new TokenView(new SampleStore(sample), { label: "Tokens of the sample", mode: "mask" });
    fill(detail, h("div.panel-bar", {}, h("h2", {}, "What is trained"), h("p.legend", {}, h("mark.mask-on", {}, "trained"), h("mark.mask-off", {}, "context"))), maskBar(sample), facts, spans(sample), view.element);
    showFacts();
    view.draw();
  }

  async function download(format) {
    try {
      const response = await request(`${model.path}/samples`, { method: "POST", json: { branch: which, format }, signal });
      const url = URL.createObjectURL(await response.blob());
      h("a", { href: url, download: `${model.id}.${format}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
      announce(`Saved as ${model.id}.${format}.`);
    } catch (error) {
      if (!signal.aborted) announce(error.message, "error");
    }
  }

  renderBranch();
  load();
  return {
    element,
    close: () => view?.close(),
    key({ key }) {
      if (key === "ArrowDown" || key === "ArrowRight") choose(Math.min(found.length - 1, chosen + 1));
      else if (key === "ArrowUp" || key === "ArrowLeft") choose(Math.max(0, chosen - 1));
      else return false;
      return true;
    },
  };
}
