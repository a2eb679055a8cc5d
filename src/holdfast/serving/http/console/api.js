// The HTTP API. The key lives in this variable and nowhere else: not in the URL, not in storage, not in a cookie.

const BASE = new URL("./", document.baseURI); // the page is BASE + "console"
let key = "";
let askForKey = async () => "";

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** `ask` is called where the server wants a key, and returns what the user typed. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const hasKey = () => key !== "";

export function forgetKey() {
  key = "";
}

/** The response of a request that succeeded; ApiError otherwise. */
export async function request(path, { method = "GET", json, body = json && JSON.stringify(json), signal } = {}) {
  for (;;) {
    const used = key;
    const headers = { ...(used && { authorization: `Bearer ${used}` }), ...(body && { "content-type": "application/json" }) };
    let response;
    try {
      response = await fetch(new URL(path, BASE), { method, headers, body, signal, credentials: "omit", redirect: "error" });
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new ApiError(0, "unreachable", "The server does not answer.");
    }
    if (response.ok) return response;
    const told = (await response.json().catch(() => ({})))?.error ?? {};
    const error = new ApiError(response.status, told.code ?? "", told.message ?? `The server answered ${response.status}.`);
    if (response.status !== 401) throw error;
    if (used === key) key = await askForKey(used ? error.message : ""); // else somebody has just typed another one
  }
}

export const get = async (path, options) => (await request(path, options)).json();
export const post = async (path, json = {}, options) => (await request(path, { ...options, method: "POST", json })).json();

/** Where a session is in the API. */
export const sessionPath = (id) => `sessions/${encodeURIComponent(id)}`;

/** Server-sent events of a response: {event, data}. `data` is a text. */
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Follow a stream of events until `signal` says stop. A stream that ends is opened again, ever more slowly.
 *  `onState` is told "open" and "closed". A session that is gone ends it. */
export async function follow(path, handlers, { signal, onState = () => {} }) {
  for (let wait = 250; !signal.aborted; wait = Math.min(wait * 2, 10_000)) {
    try {
      const response = await request(path, { signal });
      onState("open");
      for await (const { event, data } of eventsOf(response)) {
        wait = 250;
        handlers[event]?.(JSON.parse(data));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 404) return void onState("gone");
      if (!(error instanceof ApiError) && !(error instanceof TypeError)) throw error;
    }
    if (signal.aborted) return;
    onState("closed");
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, wait);
      signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
    });
  }
}
