// Dead letters: records that no table can hold, counted by reason, and the newest of them.
import { html, Failure, Rows, moment, number, plural } from "../parts.js";
import { answer, givenSecret, linkTo } from "../store.js";
import { SecretForm } from "./table.js";

export function DeadLetters({ overview, parts }) {
  const chosen = parts[1];
  return html`<section aria-labelledby="letters-title">
    <h2 id="letters-title">Dead letters <small>records that a pipeline could not decode, and rows that no column could hold</small></h2>
    <${Rows} label="Dead letters by pipeline" rows=${overview.dead_letters} keyOf=${(row) => row.table} empty="No pipeline can have dead letters yet." columns=${[
      { title: "pipeline", cell: (row) => row.pipeline },
      { title: "table", cell: (row) => html`<a href=${linkTo("dead-letters", row.table)} aria-current=${row.table === chosen ? "true" : undefined}>${row.table}</a>` },
      { title: "letters", number: true, cell: (row) => number(row.count) },
    ]} />
  </section>
  ${chosen && html`<${Letters} table=${chosen} needsSecret=${overview.rows_need_secret} />`}`;
}

function Letters({ table, needsSecret }) {
  const { value, error, status } = answer(`/api/dead-letters?${new URLSearchParams({ table, limit: 50 })}`);
  if (status === 401 || (needsSecret && !givenSecret())) return html`<${SecretForm} error=${error} />`;
  if (!value) return error ? html`<${Failure} error=${error} />` : html`<p class="quiet">Reading…</p>`;
  const partly = value.examined < value.total ? `, of the newest ${number(value.examined)}` : "";
  return html`<section aria-labelledby="reasons-title">
    <h2 id="reasons-title">Reasons <small>${plural(value.total, "letter")} in ${table}${partly}</small></h2>
    <${Rows} label="Reasons" rows=${value.reasons} empty="There are no dead letters." columns=${[
      { title: "letters", number: true, cell: (row) => number(row.count) },
      { title: "topic", cell: (row) => row.topic },
      { title: "reason", text: true, cell: (row) => row.reason },
      { title: "first", wide: true, cell: (row) => moment(Date.parse(row.first)) },
      { title: "last", cell: (row) => moment(Date.parse(row.last)) },
    ]} />
  </section>
  ${value.records.length > 0 && html`<section aria-labelledby="newest-title">
    <h2 id="newest-title">Newest <small>${number(value.records.length)}</small></h2>
    <${Rows} label="Newest dead letters" rows=${[...value.records].reverse()} columns=${[
      { title: "time", cell: (row) => moment(Date.parse(row.at)) },
      { title: "topic", cell: (row) => row.topic },
      { title: "partition", number: true, cell: (row) => number(row.partition) },
      { title: "offset", number: true, cell: (row) => number(row.offset) },
      { title: "reason", text: true, cell: (row) => row.reason },
      { title: "record", text: true, cell: (row) => html`<code>${row.bytes ?? ""}</code>` },
    ]} />
  </section>`}`;
}
