// Small parts of all views: numbers, ages that tick, states, tables.
import { h, Component } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export const html = htm.bind(h);

// Numbers -----------------------------------------------------------------------------------------
const grouped = new Intl.NumberFormat("en");
export const number = (value) => (value === null || value === undefined ? "–" : grouped.format(value));

export function duration(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  const s = Math.max(0, ms) / 1000;
  if (s < 99.95) return `${s.toFixed(1)} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

export function milliseconds(ms) {
  return ms === null || ms === undefined ? "–" : ms < 10000 ? `${number(ms)} ms` : duration(ms);
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 99.5 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export function moment(ms) {
  if (!ms || ms <= 0 || ms > 8.64e15) return "–";
  const at = new Date(ms);
  const two = (value, size = 2) => String(value).padStart(size, "0");
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}.${two(at.getMilliseconds(), 3)}`;
  return Math.abs(Date.now() - ms) < 43200000 ? clock : `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock}`;
}

export const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

// Ages --------------------------------------------------------------------------------------------
const ticking = new Set();
setInterval(() => { for (const age of ticking) age.setState({}); }, 250);

/** A duration of `ms` at the time `at` of this page's clock, which grows from then on if `grows`. */
export class Age extends Component {
  componentDidMount() { ticking.add(this); }
  componentWillUnmount() { ticking.delete(this); }
  render({ ms, at, grows = true }) {
    if (ms === null || ms === undefined) return "–";
    return duration(grows && Number.isFinite(at) ? ms + performance.now() - at : ms);
  }
}

// States ------------------------------------------------------------------------------------------
const LATE = new Set(["waiting", "stuck", "blind"]);
export const isLate = (state) => LATE.has(state);
const WORDS = { "": "no report", empty: "no records yet", unused: "not in use" };
export const State = ({ state, word }) => html`<span class="state ${state || "unknown"}">${word ?? WORDS[state ?? ""] ?? state}</span>`;
/** How far something is behind: it grows until the next answer if nothing moves. */
export const Behind = ({ row, at }) => html`<${Age} ms=${row.behind_ms} at=${at} grows=${isLate(row.state)} />`;

// Tables ------------------------------------------------------------------------------------------
/**
 * A table: `columns` are { title, cell(row), number, wide }. Narrow windows show each row as a list; a `wide` column is
 * left out there.
 */
export function Rows({ columns, rows, keyOf, empty = "Nothing.", label }) {
  if (!rows.length) return html`<p class="quiet">${empty}</p>`;
  const classes = (column) => [column.number ? "n" : "", column.wide ? "wide" : "", column.text ? "text" : ""].join(" ").trim();
  return html`<table class="rows" aria-label=${label}>
    <thead><tr>${columns.map((column) => html`<th scope="col" class=${classes(column)}>${column.title}</th>`)}</tr></thead>
    <tbody>${rows.map((row, index) => html`<tr key=${keyOf ? keyOf(row) : index}>
      ${columns.map((column) => html`<td class=${classes(column)} data-label=${column.title}>${column.cell(row)}</td>`)}
    </tr>`)}</tbody>
  </table>`;
}

/** A list that begins with `size` elements; a button shows more. */
export class Paged extends Component {
  render({ items, size = 100, children }, { shown = size }) {
    const [draw] = [children].flat();
    return html`${draw(items.slice(0, shown))}
      ${items.length > shown && html`<p><button type="button" onClick=${() => this.setState({ shown: shown + size })}>
        Show ${number(Math.min(size, items.length - shown))} more of ${number(items.length)}</button></p>`}`;
  }
}

/** A value of a row as text. NULL is marked; a value that did not arrive is empty. */
export const Value = ({ text }) => (text === null ? html`<span class="null">NULL</span>` : text ?? "");

export const Failure = ({ error }) => error ? html`<p class="failure" role="alert">${error}</p>` : null;

export const isNumeric = (type) => /^(u?int|float|double|decimal|long|short|bigint|smallint|numeric|real)/.test(type);

/** A bar of `value` out of `most`. */
export const Bar = ({ value, most, label }) => html`<progress value=${Math.min(value, most)} max=${Math.max(most, 1)} aria-label=${label}></progress>`;
