// The page of a node: header, navigation, and the view that the URL names.
import { render, Component } from "./vendor/preact.mjs";
import { html, duration, number } from "./parts.js";
import { BLIND_MS, answer, blindFor, givenSecret, linkTo, notify, place, subscribe, want } from "./store.js";
import { Overview } from "./views/overview.js";
import { Tables } from "./views/tables.js";
import { Table } from "./views/table.js";
import { Captures } from "./views/captures.js";
import { DeadLetters } from "./views/letters.js";
import { Processes } from "./views/processes.js";

const OVERVIEW = "/api/overview";
const path = (base, values) => `${base}?${new URLSearchParams(values)}`;

// One view for each first part of the URL: its title, the paths that it polls, and what it shows.
const VIEWS = {
  "": { title: "Overview", polls: () => ({}), view: Overview },
  tables: {
    title: "Tables",
    polls: ([, name]) => name
      ? { [path("/api/place", { name })]: 3000 }
      : { "/api/places": 2000, "/api/tables": 10000 },
    view: ({ parts, ...rest }) => parts[1] ? html`<${Table} key=${parts[1]} name=${parts[1]} tab=${parts[2]} ...${rest} />` : html`<${Tables} ...${rest} />`,
  },
  captures: {
    title: "Captures",
    polls: ([, name]) => (name ? { [path("/api/captures", { capture: name })]: 5000 } : {}),
    view: Captures,
  },
  "dead-letters": {
    title: "Dead letters",
    polls: ([, table], needsSecret) => (table && !needsSecret ? { [path("/api/dead-letters", { table, limit: 50 })]: 10000 } : {}),
    view: DeadLetters,
  },
  processes: { title: "Processes", polls: () => ({}), view: Processes },
};

const COUNTED = ["blind", "stuck", "waiting", "moving", "idle"];

class Page extends Component {
  componentDidMount() {
    subscribe(() => { this.poll(); this.setState({}); });
    addEventListener("hashchange", () => this.move());
    setInterval(() => this.look(), 250);
    this.move();
  }

  /** Show what the URL names, from its top on. */
  move() {
    const parts = place();
    const view = VIEWS[parts[0] ?? ""] ?? VIEWS[""];
    document.title = [parts[1], view.title, "tidemill"].filter(Boolean).join(" · ");
    if (parts.slice(0, 2).join("/") !== this.shown) scrollTo(0, 0);
    this.shown = parts.slice(0, 2).join("/");
    notify();
  }

  /** Rows are asked for only with the secret that they need: the first answer tells whether they need one. */
  poll() {
    const parts = place();
    const { value } = answer(OVERVIEW);
    const needsSecret = !givenSecret() && (value?.rows_need_secret ?? true);
    want({ [OVERVIEW]: 1000, ...(VIEWS[parts[0] ?? ""] ?? VIEWS[""]).polls(parts, needsSecret) });
  }

  look() {
    const isBlind = blindFor() > BLIND_MS;
    if (isBlind !== this.state.isBlind || isBlind) this.setState({ isBlind });
  }

  render(_, { isBlind }) {
    const parts = place();
    const name = parts[0] in VIEWS ? parts[0] : "";
    const { value: overview, at, error, status } = answer(OVERVIEW);
    const View = VIEWS[name].view;
    return html`
      <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
      <header>
        <p class="brand"><a href="#/">tidemill</a>${overview && html` <span class="quiet">node ${overview.node}</span>`}</p>
        <${Counts} overview=${overview} />
        <${Freshness} isBlind=${isBlind} />
      </header>
      <nav aria-label="Views">${Object.entries(VIEWS).map(([key, view]) => html`
        <a href=${linkTo(...[key].filter(Boolean))} aria-current=${key === name ? "page" : undefined}>${view.title}${badge(key, overview)}</a>`)}</nav>
      ${isBlind && html`<${Blind} overview=${overview} error=${error} status=${status} />`}
      <main id="main" tabindex="-1" class=${isBlind ? "blind-page" : ""} aria-busy=${!overview}>
        ${overview ? html`<${View} overview=${overview} at=${at} parts=${parts} />` : !isBlind && html`<p class="quiet">Asking the node…</p>`}
      </main>`;
  }
}

function Counts({ overview }) {
  if (!overview) return null;
  const shown = COUNTED.filter((state) => overview.counts[state] || state === "stuck");
  return html`<p class="counts">${shown.map((state) => html`<span class="count ${overview.counts[state] ? state : "none"}"><b>${number(overview.counts[state])}</b> ${state}</span> `)}</p>`;
}

function Freshness({ isBlind }) {
  const ms = blindFor();
  return html`<p class="heard ${isBlind ? "late" : ""}">${Number.isFinite(ms) ? (isBlind ? `no answer for ${duration(ms)}` : "live") : "connecting"}</p>`;
}

function Blind({ overview, error, status }) {
  const when = overview ? ` What follows is from ${new Date(overview.at_ms).toLocaleTimeString("en-GB")}.` : "";
  const why = status === 401 || status === 403 ? error : `The node has not answered for ${duration(blindFor())}.${error && status ? ` ${error}` : ""}`;
  return html`<p class="banner" role="alert">${why}${when} The page asks again every second.</p>`;
}

function badge(key, overview) {
  if (!overview) return null;
  const late = key === "" ? overview.problems.filter((problem) => problem.state !== "waiting").length + overview.problems_more
    : key === "captures" ? overview.captures.reduce((sum, capture) => sum + capture.troubled_count, 0)
    : key === "processes" ? overview.processes.filter((process) => process.state === "blind").length
    : 0;
  return late ? html` <span class="badge" aria-label="${late} in trouble">${number(late)}</span>` : null;
}

addEventListener("keydown", (event) => {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName);
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
    const filter = document.querySelector("input[type=search]");
    if (filter) { event.preventDefault(); filter.focus(); }
  }
  if (event.key === "Escape" && document.activeElement?.type === "search") document.activeElement.blur();
});

render(html`<${Page} />`, document.getElementById("page"));
