// Captured databases: the slot and the WAL that it retains, copies in progress, and tables that are not captured.
import { html, Bar, Failure, Paged, Rows, State, bytes, duration, number, plural } from "../parts.js";
import { answer, linkTo } from "../store.js";

export function Captures({ overview, at, parts }) {
  const chosen = parts[1];
  const captures = chosen ? overview.captures.filter((row) => row.capture === chosen) : overview.captures;
  if (!captures.length) {
    return html`<section><h2>Captures</h2><p class="quiet">${chosen ? `There is no capture ${chosen}.` : "No database is captured. Add [capture.NAME] with its dsn to tidemill.toml."}</p></section>`;
  }
  return html`${captures.map((capture) => html`<${Capture} key=${capture.capture} capture=${capture} at=${at} />`)}
    ${!chosen && overview.captures_more > 0 && html`<p class="quiet">${plural(overview.captures_more, "further capture")}.</p>`}
    ${chosen && html`<${CapturedTables} name=${chosen} />`}`;
}

function Capture({ capture, at }) {
  const slot = capture.slot;
  const grows = slot.slot_grows_bytes_per_s;
  return html`<section aria-label="Capture ${capture.capture}">
    <h2><a href=${linkTo("captures", capture.capture)}>${capture.capture}</a> <${State} state=${capture.state} /></h2>
    <p>${capture.sentence}${capture.held_by ? ` Blocked by ${capture.held_by}.` : ""}</p>
    <dl class="figures">
      ${slot.slot && html`<div><dt>slot</dt><dd>${slot.slot}</dd></div>`}
      ${slot.slot_wal_status && html`<div><dt>WAL status</dt><dd>${slot.slot_wal_status}</dd></div>`}
      ${slot.confirmed_lsn && html`<div><dt>confirmed to</dt><dd>${slot.confirmed_lsn}</dd></div>`}
      <div><dt>WAL kept by the slot</dt><dd>${bytes(slot.slot_retained_bytes)}</dd></div>
      <div><dt>growth</dt><dd>${grows === null || grows === undefined ? "–" : `${bytes(Math.round(grows))}/s`}</dd></div>
      <div><dt>headroom</dt><dd>${slot.slot_headroom_bytes === null || slot.slot_headroom_bytes === undefined ? "no limit" : bytes(slot.slot_headroom_bytes)}</dd></div>
      <div><dt>slot lost in</dt><dd>${slot.slot_full_in_s === null || slot.slot_full_in_s === undefined ? "–" : duration(slot.slot_full_in_s * 1000)}</dd></div>
      <div><dt>not durable yet</dt><dd>${bytes(slot.backlog_bytes)}</dd></div>
      ${Object.entries(capture.tables).map(([state, count]) => html`<div><dt>tables ${state}</dt><dd>${number(count)}</dd></div>`)}
    </dl>
    ${slot.slot_pinned_by && html`<p>${bytes(slot.slot_pinned_bytes)} of WAL are confirmed but retained, because a transaction is open: ${slot.slot_pinned_by}.</p>`}
    ${capture.copies.length > 0 && html`<h3>Copies in progress <small>${number(capture.copies_count)}</small></h3>
      <${Rows} label="Copies" rows=${capture.copies} keyOf=${(row) => row.table} columns=${[
        { title: "table", cell: (row) => row.table },
        { title: "rows", number: true, cell: (row) => `${number(row.rows)}${row.rows_expected ? ` / ${number(row.rows_expected)}` : ""}` },
        { title: "chunks", number: true, wide: true, cell: (row) => (row.chunks === null ? "–" : `${number(row.chunks_done)} / ${number(row.chunks)}`) },
        { title: "progress", cell: (row) => html`<${Bar} value=${row.rows} most=${row.rows_expected ?? 0} label="Copy of ${row.table}" />` },
        { title: "", text: true, cell: (row) => row.sentence },
      ]} />`}
    ${capture.troubled.length > 0 && html`<h3>Not captured, or with a remark <small>${number(capture.troubled_count)}</small></h3>
      <${Rows} label="Tables with a remark" rows=${capture.troubled} keyOf=${(row) => row.table} columns=${[
        { title: "table", cell: (row) => row.table },
        { title: "state", cell: (row) => row.state },
        { title: "why, and what to do", text: true, cell: (row) => `${row.reason} ${row.fix}` },
      ]} />`}
  </section>`;
}

function CapturedTables({ name }) {
  const { value: rows, error, status } = answer(`/api/captures?${new URLSearchParams({ capture: name })}`);
  return html`<section aria-labelledby="captured-title"><h2 id="captured-title">Its tables ${rows && html`<small>${plural(rows.length, "table")}</small>`}</h2>
    <${Failure} error=${status === 200 ? "" : error} />
    ${rows && html`<${Paged} items=${rows}>${(shown) => html`<${Rows} label="Captured tables" rows=${shown} keyOf=${(row) => row.table} empty="This capture has no table." columns=${[
      { title: "table", cell: (row) => html`<a href=${linkTo("tables", row.table)}>${row.table}</a>` },
      { title: "state", cell: (row) => (row.copied || row.state !== "captured" ? row.state : "copying") },
      { title: "topic", wide: true, cell: (row) => row.topic },
      { title: "rows copied", number: true, cell: (row) => number(row.rows_copied) },
      { title: "columns", number: true, cell: (row) => number(row.columns.length) },
      { title: "replica identity", wide: true, cell: (row) => row.identity || "–" },
      { title: "generation", number: true, wide: true, cell: (row) => number(row.generation) },
    ]} />`}<//>`}
  </section>`;
}
