// Processes that report to the status board: nodes, drivers, and others.
import { html, Age, Rows, State, bytes, number, plural } from "../parts.js";

export function Processes({ overview, at }) {
  return html`<section aria-labelledby="processes-title">
    <h2 id="processes-title">Processes <small>${plural(overview.processes.length + overview.processes_more, "process").replace(/processs$/, "processes")}, silent ones first</small></h2>
    <${Rows} label="Processes" rows=${overview.processes} keyOf=${(row) => row.process} columns=${[
      { title: "process", cell: (row) => row.process },
      { title: "state", cell: (row) => html`<${State} state=${row.state} word=${row.state === "blind" ? "blind" : "reports"} />` },
      { title: "last report", number: true, cell: (row) => html`<${Age} ms=${row.report_age_ms} at=${at} />` },
      { title: "pid", number: true, cell: (row) => (row.pid ? String(row.pid) : "–") },
      { title: "host", wide: true, cell: (row) => row.host || "–" },
      { title: "memory", number: true, cell: (row) => (row.resident_bytes ? bytes(row.resident_bytes) : "–") },
      { title: "stages", number: true, cell: (row) => number(row.stages) },
      { title: "not at their target", number: true, wide: true, cell: (row) => number(row.late) },
      { title: "", text: true, cell: (row) => row.reason },
    ]} />
  </section>`;
}
