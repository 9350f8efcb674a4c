// Every table with its delay, its input and its size. A filter narrows the list; a window of 100 rows is drawn.
import { Component } from "../vendor/preact.mjs";
import { html, Behind, Failure, Paged, Rows, State, bytes, number, plural } from "../parts.js";
import { answer, linkTo } from "../store.js";

const ORDER = { blind: 0, stuck: 1, waiting: 2, "": 3, moving: 4, idle: 5, free: 6 };

/** A table that no pipeline maintains: programs write it, and nothing is behind. */
const freeTable = (table) => ({ table, state: "free", behind_ms: null, pipeline: "", input: "written by programs", reason: "", held_by: "" });

export class Tables extends Component {
  render({ overview }, { filter = "" }) {
    const { value: places = [], at, error, status } = answer("/api/places");
    const sizes = new Map((answer("/api/tables").value ?? []).map((row) => [row.shard, row]));
    const placed = new Set([...places.map((row) => row.table), ...overview.dead_letters.map((row) => row.table)]);
    const tables = [...places, ...[...sizes.keys()].filter((table) => !placed.has(table)).map(freeTable)];
    const wanted = filter.toLowerCase();
    const found = tables
      .filter((row) => !wanted || `${row.table} ${row.pipeline} ${row.input} ${row.state}`.toLowerCase().includes(wanted))
      .sort((a, b) => ORDER[a.state] - ORDER[b.state] || a.table.localeCompare(b.table));
    return html`<section aria-labelledby="tables-title">
      <h2 id="tables-title">Tables <small>${plural(tables.length, "table")}, late ones first</small></h2>
      <p><label>Filter <input type="search" value=${filter} placeholder="table, pipeline, input or state" aria-keyshortcuts="/" onInput=${(event) => this.setState({ filter: event.target.value })} /></label> <small>press <kbd>/</kbd></small></p>
      <${Failure} error=${status === 200 ? "" : error} />
      <${Paged} key=${filter} items=${found}>${(shown) => html`<${Rows} label="Tables" rows=${shown} keyOf=${(row) => row.table}
        empty=${filter ? "No table matches the filter." : "There is no table yet. A pipeline creates the first one."} columns=${[
          { title: "table", cell: (row) => html`<a href=${linkTo("tables", row.table)}>${row.table}</a>` },
          { title: "state", cell: (row) => (row.state === "free" ? "–" : html`<${State} state=${row.state} />`) },
          { title: "behind", number: true, cell: (row) => html`<${Behind} row=${row} at=${at} />` },
          { title: "pipeline", wide: true, cell: (row) => row.pipeline || "–" },
          { title: "input", wide: true, text: true, cell: (row) => inputText(row.input) },
          { title: "updates", number: true, cell: (row) => number(sizes.get(row.table)?.updates) },
          { title: "stored", number: true, cell: (row) => bytes(sizes.get(row.table)?.bytes) },
          { title: "why", text: true, cell: (row) => (row.reason && row.state !== "idle" && row.state !== "moving" ? `${row.reason}${row.held_by ? `; blocked by ${row.held_by}` : ""}` : "") },
        ]} />`}<//>
    </section>`;
  }
}

export function inputText(input) {
  const [kind, ...rest] = (input ?? "").split(":");
  if (kind === "capture") return `${rest.slice(1).join(":")} of ${rest[0]}`;
  if (kind === "topic") return `topic ${rest.join(":")}`;
  return input || "–";
}
