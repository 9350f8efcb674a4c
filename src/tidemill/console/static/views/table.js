// One table: why it is as fresh as it is, its rows at a time, its changes as they arrive, schema, latencies, snippets.
import { Component } from "../vendor/preact.mjs";
import { html, Age, Failure, Rows, State, Value, bytes, duration, isLate, isNumeric, moment, number, plural } from "../parts.js";
import { answer, fetchJson, givenSecret, giveSecret, linkTo } from "../store.js";
import { Latency } from "./overview.js";
import { Live } from "./live.js";
import { inputText } from "./tables.js";
import { Snippets } from "./snippets.js";

const TABS = { rows: "Rows", live: "Live", schema: "Schema", latency: "Latency", use: "Use it" };
const SHAPE_TABS = ["use", "live", "schema"]; // of a captured table that no pipeline maintains

const HOUR_MS = 3_600_000;

export function Table({ name, tab, overview }) {
  const { value, at, error, status } = answer(`/api/place?${new URLSearchParams({ name })}`);
  if (!value) return error ? html`<section><h2 class="name">${name}</h2><${Failure} error=${error} /></section>` : html`<p class="quiet">Reading…</p>`;
  const { place, table, why, captured: [captured], maintained_as: maintained, maintain } = value;
  const state = place?.state ?? captured?.state;
  return html`<section aria-labelledby="table-title">
    <h2 id="table-title" class="name">${name} ${state !== undefined && html`<${State} state=${state} />`}</h2>
    ${place && html`<p class="quiet">from ${inputText(place.input)}${place.pipeline ? `, maintained by pipeline ${place.pipeline}` : ""}</p>`}
    <${Failure} error=${status === 200 ? "" : error} />
    <${Chain} verdict=${why} at=${at} />
    ${place && !why && html`<p class="quiet">No process reports this table: its pipeline does not run.</p>`}
    ${place && !table && html`<p>Not created yet: its pipeline creates the table when it first runs.</p>`}
    ${!place && captured && html`<${Captured} captured=${captured} maintained=${maintained} />`}
    ${!place && !table && !captured && html`<p>There is no table ${name}. <span class="quiet">${value.note}</span></p>`}
    ${table ? html`<${Figures} table=${table} />
      <${Tabs} name=${name} tab=${tab} names=${Object.keys(TABS)} panels=${{
        rows: () => html`<${TableRows} table=${table} needsSecret=${overview.rows_need_secret} />`,
        live: () => html`<${Live} key=${table.shard_id} shape=${`shard:${table.shard}`} columns=${table.columns} />`,
        schema: () => html`<${Schema} table=${table} />`,
        latency: () => html`<${TableLatency} row=${place} overview=${overview} />`,
        use: () => html`<${Snippets} table=${table} shape=${`tidemill.${table.shard}`} lake=${overview.lake} />`,
      }} />`
      : !place && captured?.copied && html`<${Tabs} name=${name} tab=${tab} names=${SHAPE_TABS} panels=${{
        live: () => html`<${Live} key=${captured.generation} shape=${captured.table} columns=${Object.fromEntries(captured.columns)} />`,
        schema: () => html`<${CapturedColumns} columns=${captured.columns} />`,
        use: () => html`<${Snippets} shape=${captured.table} maintain=${maintain} />`,
      }} />`}
  </section>`;
}

/** A captured table: where its changes go, and the tables that pipelines make of it. */
function Captured({ captured, maintained }) {
  const links = maintained.map((table, index) => html`${index > 0 && ", "}<a href=${linkTo("tables", table)}>${table}</a>`);
  return html`<p>Captured by <a href=${linkTo("captures", captured.capture)}>${captured.capture}</a>${captured.topic ? ` into topic ${captured.topic}` : ""}.
      ${links.length > 0 ? html` Maintained as ${links}.` : captured.state === "captured" && " No pipeline maintains it as a table."}</p>
    ${captured.reason && html`<p>${captured.reason} ${captured.fix}</p>`}`;
}

/** Tabs of a table. Arrow keys move between them, as in every tab list. */
class Tabs extends Component {
  turn(event, tab) {
    const { names, name } = this.props;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = names[(names.indexOf(tab) + step + names.length) % names.length];
    location.replace(linkTo("tables", name, next));
    document.getElementById(`tab-${next}`).focus();
  }

  render({ name, tab: given, names, panels }) {
    const tab = names.includes(given) ? given : names[0];
    return html`<div role="tablist" aria-label="About this table">${names.map((key) => html`
      <a key=${key} id=${`tab-${key}`} role="tab" href=${linkTo("tables", name, key)} aria-selected=${key === tab} aria-controls="tab-panel" tabindex=${key === tab ? 0 : -1}
        onClick=${(event) => { event.preventDefault(); location.replace(linkTo("tables", name, key)); }} onKeyDown=${(event) => this.turn(event, tab)}>${TABS[key]}</a>`)}</div>
    <div role="tabpanel" id="tab-panel" aria-labelledby=${`tab-${tab}`} tabindex="-1">${panels[tab]()}</div>`;
  }
}

/** The chain from the table to its source, worst marked, as `tidemill why` prints it. */
function Chain({ verdict, at }) {
  if (!verdict) return null;
  return html`<ol class="chain" aria-label="From this table to its source">${verdict.chain.map((stage) => {
    const isWorst = stage.name === verdict.worst.name && isLate(stage.state);
    return html`<li key=${stage.name} class=${isWorst ? "worst" : ""}><${State} state=${stage.state} />
      <span><b>${stage.name}</b>${isLate(stage.state) && html` <span class="number">for <${Age} ms=${stage.standing_ms} at=${at} /></span>`}
      ${stage.reason && stage.state !== "idle" && html` <span>${stage.reason}</span>`}
      ${stage.held_by && isLate(stage.state) && html` <span class="quiet">blocked by ${stage.held_by}</span>`}</span></li>`;
  })}</ol>
  ${verdict.exit > 0 && html`<p>Blocked by <b>${verdict.root}</b>.</p>`}`;
}

function Figures({ table }) {
  return html`<dl class="figures">
    <div><dt>readable from</dt><dd>${table.since ? moment(table.since) : "the beginning"}</dd></div>
    <div><dt>to before</dt><dd>${moment(table.upper)}</dd></div>
    <div><dt>updates</dt><dd>${number(table.updates)}</dd></div>
    <div><dt>stored</dt><dd>${bytes(table.bytes)}</dd></div>
    <div><dt>batches, parts</dt><dd>${number(table.batches)}, ${number(table.parts)}</dd></div>
    <div><dt>waits for deletion</dt><dd>${bytes(table.garbage_bytes)}</dd></div>
  </dl>`;
}

/** Rows at one time. The slider covers the readable times; the newest time is read again on request. */
class TableRows extends Component {
  componentDidMount() { if (!this.needsSecret()) this.read(null); }

  needsSecret() { return this.props.needsSecret && !givenSecret(); }

  async read(asOf) {
    const request = (this.request = {});
    this.setState({ busy: true });
    const parameters = { table: this.props.table.shard, limit: 100, ...(asOf ? { as_of: asOf } : {}) };
    try {
      const sample = await fetchJson(`/api/rows?${new URLSearchParams(parameters)}`);
      if (request === this.request) this.setState({ sample, error: "", status: 200, busy: false, asked: asOf });
    } catch (error) {
      if (request === this.request) this.setState({ error: error.message, status: error.status, busy: false });
    }
  }

  render({ table }, { sample, error, status, busy, asked }) {
    if (status === 401 || this.needsSecret()) return html`<${SecretForm} error=${error} onGiven=${() => this.read(asked)} />`;
    const most = Math.max(table.upper - 1, table.since), least = table.since || Math.max(0, most - HOUR_MS);
    const at = sample?.as_of_ms ?? most;
    return html`<form class="controls" onSubmit=${(event) => { event.preventDefault(); this.read(new FormData(event.target).get("as_of")); }}>
      <label>Time <input name="as_of" key=${at} defaultValue=${sample && sample.upper_ms ? new Date(at).toISOString() : ""} placeholder="2026-11-22T12:00:00Z, or ms since 1970" spellcheck="false" autocomplete="off" /></label>
      <button type="submit" disabled=${busy}>Read</button>
      <button type="button" disabled=${busy} onClick=${() => this.read(null)}>Newest</button>
      <label class="slider">Earlier <input type="range" key=${at} min=${least} max=${most} defaultValue=${Math.min(Math.max(at, least), most)} aria-label="Time within the retained history" onChange=${(event) => this.read(event.target.value)} /> now</label>
    </form>
    <${Failure} error=${error} />
    ${sample && html`<p class="quiet" aria-live="polite">${describeSample(sample, table)}</p>
      <${Rows} label="Rows" rows=${sample.rows} empty="The table has no rows at this time." columns=${Object.keys(sample.columns).map((name, index) => ({
        title: name, number: isNumeric(sample.columns[name]), text: true,
        cell: (row) => html`<${Value} text=${row[index]} />`,
      }))} />`}`;
  }
}

function describeSample(sample, table) {
  const when = `as of ${moment(sample.as_of_ms)}, ${duration(Date.now() - sample.as_of_ms)} ago`;
  if (sample.total === null) return `${plural(sample.rows.length, "row")} of a table of ${plural(table.updates, "update")}, in no order, ${when}. It is too large to be read whole: use tidemill sql for the others.`;
  const shown = sample.rows.length < sample.total ? `, the first ${number(sample.rows.length)}` : "";
  return `${plural(sample.total, "row")}${shown}${sample.key.length ? `, by ${sample.key.join(", ")}` : ""}, ${when}.`;
}

function Schema({ table }) {
  const columns = Object.entries(table.columns).map(([name, type]) => ({ name, type }));
  return html`<${Rows} label="Columns" rows=${columns} columns=${[
      { title: "column", cell: (row) => row.name },
      { title: "type", cell: (row) => row.type },
      { title: "key", cell: (row) => (table.key.includes(row.name) ? `key ${table.key.indexOf(row.name) + 1}` : "") },
      { title: "default", wide: true, cell: (row) => table.defaults[row.name] ?? "" },
      { title: "", text: true, cell: (row) => (row.name in table.retired ? `null from schema ${table.retired[row.name]} on: its source no longer has it` : "") },
    ]} />
    <p class="quiet">${table.key.length ? `One row for each ${table.key.join(", ")}.` : "The whole row is the key."}</p>
    ${table.versions.length > 0 && html`<h3>Changes of the schema</h3><${Rows} label="Versions" rows=${table.versions} columns=${[
      { title: "version", number: true, cell: (row) => number(row.version) },
      { title: "from", cell: (row) => moment(row.upper) },
      { title: "change", text: true, cell: (row) => row.change },
    ]} />`}
    ${table.holds.length > 0 && html`<h3>Holds on its history</h3><${Rows} label="Holds" rows=${table.holds} columns=${[
      { title: "owner", text: true, cell: (row) => row.owner },
      { title: "from", cell: (row) => (row.since === null ? "objects only" : moment(row.since)) },
      { title: "ends in", number: true, cell: (row) => (row.ends_in_ms === null ? "does not expire" : duration(row.ends_in_ms)) },
    ]} />`}`;
}

const CapturedColumns = ({ columns }) => html`<${Rows} label="Columns" rows=${columns} columns=${[
  { title: "column", cell: ([name]) => name },
  { title: "type", cell: ([, type]) => type },
  { title: "key", cell: ([, , index]) => (index >= 0 ? `key ${index + 1}` : "") },
]} />`;

/** Latencies of the table's source; of a derived table those of every source, because its inputs have them. */
function TableLatency({ row, overview }) {
  if (!row?.pipeline) return html`<p class="quiet">Programs write this table: there is no commit to measure from.</p>`;
  const [kind, name] = row.input.split(":");
  const source = `${kind}/${name}`;
  const chosen = name === undefined ? overview.latency : source in overview.latency ? { [source]: overview.latency[source] } : {};
  return Object.keys(chosen).length ? html`<${Latency} latency=${chosen} title=${name === undefined ? "From the commit to its inputs" : "From the commit to this table"} />`
    : html`<p class="quiet">Nothing was measured yet: no commit has passed since the processes started.</p>`;
}

/** Asks for the secret of shapes, which rows need, too. */
export function SecretForm({ error = "", onGiven = () => {} }) {
  return html`<form class="controls" onSubmit=${(event) => { event.preventDefault(); giveSecret(new FormData(event.target).get("secret")); onGiven(); }}>
    <p>Rows of tables need the secret of shapes (<code>shapes.secret</code>).</p>
    <${Failure} error=${error} />
    <label>Secret <input type="password" name="secret" autocomplete="off" required /></label> <button type="submit">Use it</button>
  </form>`;
}
