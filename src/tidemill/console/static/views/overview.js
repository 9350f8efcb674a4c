// What is wrong and who holds it, the flow of data, and where the time goes.
import { html, Age, Paged, State, duration, milliseconds, number, plural } from "../parts.js";
import { linkTo } from "../store.js";
import { Flow } from "./flow.js";

const SHOWN_AT_FIRST = 6;

export function Overview({ overview, at }) {
  return html`
    <${Problems} overview=${overview} at=${at} />
    <section aria-labelledby="flow-title">
      <h2 id="flow-title">Flow <small>how far each step is behind the one before it</small></h2>
      <${Flow} flow=${overview.flow} at=${at} />
    </section>
    <${Latency} latency=${overview.latency} />`;
}

function Problems({ overview, at }) {
  const { problems, problems_more: more, notices, not_ready: notReady, restarts } = overview;
  const stories = [...(notReady ? [notReady] : []), ...notices];
  return html`<section aria-labelledby="problems-title">
    <h2 id="problems-title">Problems ${problems.length > 0 && html`<small>${plural(problems.length + more, "cause")}, the worst first</small>`}</h2>
    ${problems.length === 0 && html`<${Calm} overview=${overview} />`}
    <${Paged} items=${problems} size=${SHOWN_AT_FIRST}>${(shown) => html`<ol class="problems">${shown.map((problem) => html`<${Problem} key=${problem.name} problem=${problem} at=${at} />`)}</ol>`}<//>
    ${more > 0 && html`<p class="quiet">${plural(more, "further cause")}: see <code>tidemill status</code>.</p>`}
    ${restarts.length > 0 && html`<ul class="notices" aria-label="Restarts">${restarts.map((restart) => html`<${Restart} key=${restart.process} restart=${restart} at=${at} />`)}</ul>`}
    ${stories.length > 0 && html`<ul class="notices">${stories.map((story) => html`<li>${story}</li>`)}</ul>`}
  </section>`;
}

/** With nothing wrong: which table is the slowest, so that its chain is known before the bad day. */
function Calm({ overview }) {
  const tables = overview.flow.columns.find((column) => column.name === "tables");
  const slowest = tables.nodes.reduce((worst, node) => ((node.behind_ms ?? -1) > (worst?.behind_ms ?? -1) ? node : worst), null);
  return html`<p class="calm">Every stage advances or has reached its target.
    ${slowest && slowest.behind_ms > 0 && html` The slowest table is <a href=${linkTo("tables", slowest.title)}>${slowest.title}</a>, ${duration(slowest.behind_ms)} behind its input.`}</p>`;
}

/** A process that ended a short time ago: it may be back before anything is late. */
function Restart({ restart, at }) {
  const { name, reason, count, ended_ms: ended, is_back: isBack } = restart;
  return html`<li class=${isBack ? "" : "failure"}>${name[0].toUpperCase()}${name.slice(1)} ${isBack ? "was restarted" : "ended"} <span class="number"><${Age} ms=${ended} at=${at} /></span> ago${isBack ? "" : " and is being restarted"}: ${reason.replace(/[.]$/, "")}${count > 1 ? `; restart ${number(count)} since the start` : ""}.</li>`;
}

function Problem({ problem, at }) {
  const affected = problem.affected_count - problem.affected.length;
  const table = problem.name.startsWith("shard:") && problem.name.slice(6).split("@")[0];
  return html`<li class="problem ${problem.state}">
    <p class="sentence"><${State} state=${problem.paused ? "stuck" : problem.state} /> ${table ? html`<a href=${linkTo("tables", table)}>${problem.sentence}</a>` : problem.sentence}</p>
    <dl>
      <div><dt>for</dt><dd class="number"><${Age} ms=${problem.standing_ms} at=${at} /></dd></div>
      <div><dt>blocked by</dt><dd>${problem.blocked_by || "itself"}${problem.tries > 1 ? `, try ${number(problem.tries)}` : ""}</dd></div>
      ${problem.affected_count > 0 && html`<div><dt>holds up</dt><dd>${problem.affected.join(", ")}${affected > 0 ? ` and ${number(affected)} more` : ""}</dd></div>`}
      <div><dt>see</dt><dd><code>${problem.command}</code></dd></div>
    </dl>
  </li>`;
}

export function Latency({ latency, title = "Where the time goes" }) {
  const sources = Object.entries(latency).filter(([, stages]) => Object.keys(stages).length);
  if (!sources.length) return null;
  return html`<section aria-labelledby="latency-title">
    <h2 id="latency-title">${title} <small>from the commit to each stage, over the last minutes</small></h2>
    <div class="latencies">${sources.map(([source, stages]) => html`<${Stages} key=${source} source=${source} stages=${stages} />`)}</div>
  </section>`;
}

/** The bar of a stage begins at the median of the stage before: the longest bar is the slowest stage. */
function Stages({ source, stages }) {
  const names = Object.keys(stages);
  const most = Math.max(1, ...names.map((name) => stages[name].p95 ?? 0));
  let before = 0;
  return html`<table class="stages" aria-label="Latency of ${source}">
    <caption>${source.replace("/", " ")}</caption>
    <thead><tr><th scope="col">stage</th><th scope="col" class="n">p50</th><th scope="col" class="n">p95</th><th scope="col" class="wide"><span class="hidden">bar</span></th></tr></thead>
    <tbody>${names.map((name) => {
      const { p50, p95 } = stages[name];
      const from = name.includes("since") ? 0 : Math.min(before, p50 ?? 0);
      before = p50 ?? before;
      const x = (ms) => ((ms ?? 0) / most) * 100;
      return html`<tr key=${name}><th scope="row">${name}</th><td class="n">${milliseconds(p50)}</td><td class="n">${milliseconds(p95)}</td>
        <td class="wide"><svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
          <rect class="tail" x=${x(from)} y="3" width=${Math.max(0, x(p95) - x(from))} height="4" /><rect class="median" x=${x(from)} y="1" width=${Math.max(0.6, x(p50) - x(from))} height="8" />
        </svg></td></tr>`;
    })}</tbody>
  </table>`;
}

