// The changes of a table as they arrive, through the node's shape endpoint and the unmodified Electric client. However
// many arrive, only the newest SHOWN are kept and drawn; the view says how many there were.
import { Component } from "../vendor/preact.mjs";
import { ShapeStream } from "../vendor/electric-client.mjs";
import { html, Failure, Rows, Value, isNumeric, moment, number, plural } from "../parts.js";
import { givenSecret } from "../store.js";

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
      params: { table: this.props.shape, replica: "full", ...(givenSecret() ? { secret: givenSecret() } : {}) },
      backoffOptions: { initialDelay: 500, maxDelay: 5000, multiplier: 2 }, warnOnHttp: false,
      onError: (error) => { if (!signal.aborted) this.setState({ error: error.message, status: "ended" }); },
    });
    this.unsubscribe = stream.subscribe((messages) => {
      if (signal.aborted) return;
      const now = Date.now();
      const changes = messages.filter(({ headers }) => headers.operation);
      this.count += changes.length;
      const newest = changes.slice(-SHOWN).reverse();
      this.arrived = [...newest.map(({ headers, value }, index) => ({ id: this.count - index, at: now, operation: headers.operation, value })), ...this.arrived].slice(0, SHOWN);
      this.changed ||= changes.length > 0;
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
    this.setState({ changes: this.arrived, count: this.count });
  }

  toggle() {
    if (this.state.status === "live") { this.stop(); this.setState({ status: "paused" }); } else this.start();
  }

  render({ columns }, { changes, count, status, error }) {
    return html`<p class="controls"><button type="button" onClick=${() => this.toggle()}>${status === "live" ? "Pause" : "Follow"}</button>
      <span class="quiet" aria-live="off">${status === "live" ? "Following." : "Paused."} ${plural(count, "change")} since this view was opened${count > SHOWN ? `: the newest ${number(SHOWN)} are shown, ${number(count - SHOWN)} older ones are not` : ", the newest first"}.</span></p>
    <${Failure} error=${error} />
    <${Rows} label="Changes" rows=${changes} keyOf=${(row) => row.id} empty="No change has arrived yet." columns=${[
      { title: "arrived", cell: (row) => moment(row.at) },
      { title: "change", cell: (row) => html`<span class="operation ${row.operation}">${row.operation}</span>` },
      ...Object.entries(columns).map(([name, type]) => ({ title: name, number: isNumeric(type), text: true, cell: (row) => html`<${Value} text=${row.value?.[name]} />` })),
    ]} />`;
  }
}
