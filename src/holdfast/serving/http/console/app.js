// The frame of the page: what the address shows, the key, the keyboard, help.

import { forgetKey, hasKey, onKeyNeeded } from "./api.js";
import { fill, h, placeholder } from "./dom.js";
import { overview } from "./overview.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");

// The address: #/ is the overview, #/s/ID[/VIEW[/...]][?name=value] a session.

function parse() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: new URLSearchParams(query ?? "") };
}

let view = null; // { id, close(), show(parts, query), keys }

async function route() {
  const { parts, query } = parse();
  const id = parts[0] === "s" ? parts[1] ?? "" : "";
  if (view?.id !== id) {
    view?.close();
    view = null;
    setConnection("");
    if (id) {
      let session;
      try {
        ({ session } = await import("./session.js"));
      } catch {
        fill(main, placeholder("The server does not answer", "", h("button", { onclick: () => location.reload() }, "Try again")));
        return;
      }
      if (parse().parts[1] !== id) return; // the address went on meanwhile
      view = session(main, id, { setCrumbs, setConnection });
    } else view = overview(main, { setCrumbs, setConnection });
    main.focus({ preventScroll: true });
  }
  view.show(parts.slice(2), query);
}

function setCrumbs(...texts) {
  document.title = [...texts].reverse().concat("Holdfast").join(" · ");
  fill(crumbs, h("a", { href: "#/" }, "Sessions"), texts.map((text) => [h("span", { "aria-hidden": "true" }, "›"), h("span.crumb", {}, text)]));
}

const WORDS = { open: "live", closed: "connecting", gone: "closed" };

function setConnection(state) {
  connection.className = `connection ${state}`;
  fill(connection, WORDS[state] ?? "");
}

// The key

let asking = null;

onKeyNeeded((refused) => {
  asking ??= new Promise((resolve) => {
    const input = h("input", { type: "password", autocomplete: "off", required: true, spellcheck: "false", id: "key-input" });
    const form = h(
      "form.key-form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          dialog.close();
          resolve(input.value.trim());
        },
      },
      h("h2", {}, "This server asks for an API key"),
      h("p.muted", {}, "It stays in this tab's memory until you close or reload the tab. You see the sessions of the key's owner."),
      h("label", { for: "key-input" }, "API key"),
      input,
      refused && h("p.problem", { role: "alert" }, refused),
      h("button.primary", {}, "Continue"),
    );
    const dialog = h("dialog.sheet", { "aria-label": "API key", oncancel: (event) => event.preventDefault() }, form);
    document.body.append(dialog);
    dialog.addEventListener("close", () => dialog.remove());
    dialog.showModal();
    input.focus();
  }).finally(() => {
    asking = null;
    document.getElementById("key").hidden = false;
  });
  return asking;
});

document.getElementById("key").addEventListener("click", () => {
  forgetKey();
  view?.close();
  view = null;
  route();
});

// Help and the keyboard

const KEYS = [
  ["/", "search sessions, or what a session has said"],
  ["↑ ↓ ↵", "choose and open a session"],
  ["← →", "the turn before, the turn after; in the tree also ↑ ↓"],
  ["t", "tokens alone, or beside the messages"],
  ["g", "the tree of turns"],
  ["s", "samples for training"],
  ["c", "colour tokens by kind or by logprob"],
  ["f", "follow the newest token"],
  ["m", "write a message"],
  ["n", "a new session"],
  ["?", "this help"],
];

function help() {
  const dialog = h(
    "dialog.sheet.help",
    { "aria-label": "Help" },
    h("h2", {}, "A session, in one minute"),
    h(
      "div.help-strip",
      { role: "img", "aria-label": "pinned tokens, forgotten tokens, tokens in view" },
      h("span.zone-pinned", {}, "pinned"),
      h("span.zone-forgotten", {}, "forgotten"),
      h("span.zone-seen", {}, "in view"),
    ),
    h("p", {}, "A session keeps every token on record, and the model sees two parts of them: the first ones, which are ", h("b", {}, "pinned"), ", and the latest ones, which are ", h("b", {}, "in view"), ". What lies between is ", h("b", {}, "forgotten"), ": it costs no memory and no time, and the model answers without it. So a turn costs the same after a million tokens as after a thousand."),
    h("p", {}, "Tokens are ", h("mark.kind-given", {}, "given"), " by you and the chat template, ", h("mark.kind-sampled", {}, "sampled"), " by the model, or ", h("mark.kind-recalled", {}, "recalled"), ": quotes of what was forgotten. A retry or an edit is a branch of the tree; the other branch stays on record."),
    h("h2", {}, "Keys"),
    h("dl.keys", {}, KEYS.map(([keys, about]) => [h("dt", {}, keys.split(" ").map((name) => h("kbd", {}, name))), h("dd", {}, about)])),
    h("form", { method: "dialog" }, h("button.primary", {}, "Close")),
  );
  document.body.append(dialog);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.showModal();
}

document.getElementById("help").addEventListener("click", help);

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const isTyping = event.target.closest("input, textarea, select, [contenteditable]");
  if (isTyping) {
    if (event.key === "Escape") event.target.blur();
    else view?.typing?.(event);
    return;
  }
  if (event.key === "?") help();
  else if (!view?.key(event)) return;
  event.preventDefault();
});

addEventListener("hashchange", route);
route();
document.getElementById("key").hidden = !hasKey();
