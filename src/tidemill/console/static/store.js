// What the page knows: answers of the node by path, when each arrived, and what is shown (the part of the URL after #).
//
// A path is polled only while a view uses it and the page is visible: without a viewer the node computes nothing.
// The page is blind when no answer to the overview arrived for BLIND_MS; it then keeps what it last knew, and says so.

export const BLIND_MS = 3000;
const TIMEOUT_MS = 8000;
const OVERVIEW = "/api/overview";

export const answers = new Map(); // path → { value, at, error, status }
const polls = new Map(); // path → { every, wanted, timer, busy }
const listeners = new Set();

/** Call `listener` after every change. */
export function subscribe(listener) {
  listeners.add(listener);
}

export function notify() {
  for (const listener of listeners) listener();
}

/** The shown view: #/tables/orders is ["tables", "orders"]. */
export function place() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

export function linkTo(...parts) {
  return "#/" + parts.map(encodeURIComponent).join("/");
}

/** Rows need the secret of shapes where one is configured. It stays in this page. */
let secret = "";
export function giveSecret(text) {
  secret = text;
  for (const [path, { status }] of answers) if (status === 401) answers.delete(path);
  for (const path of polls.keys()) ask(path);
  notify();
}
export const givenSecret = () => secret;

/** Fetch JSON. The error of a refused request is the sentence of the node. */
export async function fetchJson(path) {
  const headers = secret ? { "x-tidemill-secret": secret } : {};
  const response = await fetch(path, { headers, signal: AbortSignal.timeout(TIMEOUT_MS) });
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  let message = `${response.status} ${response.statusText}`;
  try { message = JSON.parse(text).message ?? message; } catch { /* an answer of a proxy */ }
  throw Object.assign(new Error(message), { status: response.status });
}

async function ask(path) {
  const poll = polls.get(path);
  if (!poll || poll.busy || document.hidden) return;
  clearTimeout(poll.timer);
  poll.busy = true;
  try {
    answers.set(path, { value: await fetchJson(path), at: performance.now(), error: "", status: 200 });
  } catch (error) {
    const known = answers.get(path);
    const silent = error.name === "TimeoutError" || error instanceof TypeError;
    answers.set(path, { value: known?.value, at: known?.at ?? -Infinity, status: error.status ?? 0,
      error: silent ? "The node does not answer." : error.message });
  }
  poll.busy = false;
  if (polls.get(path) === poll) poll.timer = setTimeout(() => ask(path), poll.every);
  notify();
}

/** The paths that the shown view needs, each with its interval in ms. Polls of other paths end. */
export function want(paths) {
  for (const [path, poll] of polls) {
    if (path in paths) continue;
    clearTimeout(poll.timer);
    polls.delete(path);
    if (path !== OVERVIEW) answers.delete(path);
  }
  for (const [path, every] of Object.entries(paths)) {
    if (polls.has(path)) continue;
    polls.set(path, { every, timer: 0, busy: false });
    ask(path);
  }
}

export function answer(path) {
  return answers.get(path) ?? { value: undefined, at: -Infinity, error: "", status: 0 };
}

/** Milliseconds since the last overview arrived. */
export function blindFor() {
  return performance.now() - (answers.has(OVERVIEW) ? answers.get(OVERVIEW).at : started);
}
const started = performance.now();

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) for (const path of polls.keys()) ask(path);
});
