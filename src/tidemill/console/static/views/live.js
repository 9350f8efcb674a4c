// The changes of a table as they arrive, through the node's shape endpoint and the unmodified Electric client.
import { Component } from "../vendor/preact.mjs";
import { ShapeStream } from "../vendor/electric-client.mjs";
import { html, Failure, Rows, isNumeric, moment, number, plural } from "../parts.js";
import { givenSecret } from "../store.js";

const KEPT = 200;
const SHOWN = 100;
const DRAW_MS = 250;

export class Live extends Component {
  state = { changes: [], count: 0, status: "connecting" };
  arrived = [];
  count = 0;

  componentDidMount() {
    this.drawing = setInterval(() => this.draw(), DRAW_MS);
    this.start();
  }
  componentWillUnmount() {
    clearInterval(this.drawing);
    this.stop();
  }

  start() {
    this.aborting = new AbortController();
    const { signal } = this.aborting;
    // Changes from now on; the rows themselves are not fetched, so a table of any size can be followed.
    const stream = new ShapeStream({
      url: new URL("/v1/shape", location.href).href, offset: "now", log: "changes_only", signal,
      params: { table: `shard:${this.props.table.shard}`, replica: "full", ...(givenSecret() ? { secret: givenSecret() } : {}) },
      backoffOptions: { initialDelay: 500, maxDelay: 5000, multiplier: 2 }, warnOnHttp: false,
      onError: (error) => { if (!signal.aborted) this.setState({ error: error.message, status: "ended" }); },
    });
    this.unsubscribe = stream.subscribe((messages) => {
      if (signal.aborted) return;
      const now = Date.now();
      for (const { headers, value } of messages) {
        if (headers.operation) { this.arrived.unshift({ id: this.count, at: now, operation: headers.operation, value }); this.count += 1; }
      }
      this.arrived.length = Math.min(this.arrived.length, KEPT);
      this.changed = true;
    });
    this.setState({ status: "live", error: "" });
  }

  stop() {
    this.unsubscribe?.();
    this.aborting?.abort();
    this.unsubscribe = undefined;
  }

  draw() {
    if (!this.changed) return;
    this.changed = false;
    this.setState({ changes: this.arrived.slice(0, SHOWN), count: this.count });
  }

  toggle() {
    if (this.state.status === "live") { this.stop(); this.setState({ status: "paused" }); } else this.start();
  }

  render({ table }, { changes, count, status, error }) {
    return html`<p class="controls"><button type="button" onClick=${() => this.toggle()}>${status === "live" ? "Pause" : "Follow"}</button>
      <span class="quiet" aria-live="off">${status === "live" ? "Following." : "Paused."} ${plural(count, "change")} since this view was opened, the newest first${count > SHOWN ? `; ${number(SHOWN)} are shown` : ""}.</span></p>
    <${Failure} error=${error} />
    <${Rows} label="Changes" rows=${changes} keyOf=${(row) => row.id} empty="No change has arrived yet." columns=${[
      { title: "arrived", cell: (row) => moment(row.at) },
      { title: "change", cell: (row) => html`<span class="operation ${row.operation}">${row.operation}</span>` },
      ...Object.keys(table.columns).map((name) => ({ title: name, number: isNumeric(table.columns[name]), text: true, cell: (row) => (row.value?.[name] === null ? html`<span class="null">NULL</span>` : row.value?.[name] ?? "") })),
    ]} />`;
  }
}
