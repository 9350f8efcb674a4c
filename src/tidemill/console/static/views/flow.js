// The flow as a graph: columns of boxes in HTML, and edges as an SVG below them, measured after each layout.
// Narrow windows show the columns one below the other, without edges: each box then has the delay of its input.
import { Component, createRef } from "../vendor/preact.mjs";
import { html, Age, State, duration, isLate, plural } from "../parts.js";
import { linkTo } from "../store.js";

const TITLES = { sources: "Sources", topics: "Topics", pipelines: "Pipelines", tables: "Tables", clients: "Live clients" };
const GAP = 88; // between two columns, in px: 5.5rem of console.css at 16 px
const PASSAGE = 30; // below the boxes, for edges past other columns: the padding of .flow
const LABEL_PX = 30; // from a box to the middle of an edge's label: there the edges of a fan are apart
const LABEL_WIDTH = 40, LABEL_HEIGHT = 14; // room of a label
const LABELS_MAX = 40; // with more edges than that, only late ones have a label

export class Flow extends Component {
  box = createRef();
  state = { lines: [], width: 0, height: 0 };

  componentDidMount() {
    this.observer = new ResizeObserver(() => this.measure());
    this.observer.observe(this.box.current);
  }
  componentWillUnmount() { this.observer.disconnect(); }
  componentDidUpdate(previous) { if (previous.flow !== this.props.flow) this.measure(); }

  /** Find where the edges begin and end; nothing is drawn while the columns are stacked. */
  measure() {
    const box = this.box.current;
    if (!box) return;
    const outer = box.getBoundingClientRect();
    const places = new Map();
    for (const element of box.querySelectorAll("[data-node]")) {
      const at = element.getBoundingClientRect();
      places.set(element.dataset.node, { left: at.left - outer.left, right: at.right - outer.left, y: at.top - outer.top + at.height / 2 });
    }
    const lines = [], fanIn = countBy(this.props.flow.edges, "to"), fanOut = countBy(this.props.flow.edges, "from");
    for (const edge of this.props.flow.edges) {
      const from = places.get(edge.from), to = places.get(edge.to);
      if (!from || !to || from.right >= to.left) continue;
      const { right: x1, y: y1 } = from, { left: x2, y: y2 } = to, reach = (x2 - x1) / 2;
      if (reach < outer.width / 8) {
        const ends = [[x1 + LABEL_PX, y1], [x2 - LABEL_PX, y2]];
        const places = [...(fanOut.get(edge.from) > fanIn.get(edge.to) ? ends.reverse() : ends), [(x1 + x2) / 2, (y1 + y2) / 2]];
        const [x, y] = places.find(([x, y]) => isFree(lines, x, y)) ?? places[0];
        lines.push({ edge, x, y, d: `M${x1} ${y1}C${x1 + reach} ${y1} ${x2 - reach} ${y2} ${x2} ${y2}` });
      } else { // past other columns: through the gaps, and below all boxes
        const low = outer.height - PASSAGE / 2, gap = GAP / 2;
        lines.push({ edge, x: (x1 + x2) / 2, y: low, d: `M${x1} ${y1}C${x1 + gap} ${y1} ${x1 + gap / 2} ${low} ${x1 + 2 * gap} ${low}`
          + `L${x2 - 2 * gap} ${low}C${x2 - gap / 2} ${low} ${x2 - gap} ${y2} ${x2} ${y2}` });
      }
    }
    const drawn = JSON.stringify(lines);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    this.setState({ lines, width: outer.width, height: outer.height });
  }

  render({ flow, at }, { lines, width, height }) {
    const labelled = withoutRepeats(lines.filter(({ edge }) => edge.behind_ms !== null && (lines.length <= LABELS_MAX || isLate(edge.state))));
    return html`<div class="flow" ref=${this.box}>
      <svg class="edges" width=${width} height=${height} viewBox="0 0 ${width} ${height}" aria-hidden="true">
        ${lines.map(({ edge, d }) => html`<path key=${`${edge.from}>${edge.to}`} class=${edge.state || "unknown"} d=${d} />`)}
      </svg>
      ${labelled.map(({ edge, x, y }) => html`<span key=${`${edge.from}>${edge.to}`} class="edge-label ${edge.state}" style=${{ left: `${x}px`, top: `${y}px` }}><${Age} ms=${edge.behind_ms} at=${at} grows=${isLate(edge.state)} /></span>`)}
      ${flow.columns.map((column) => html`<div class="column" key=${column.name}>
        <h3>${TITLES[column.name]}</h3>
        <ul>${column.nodes.map((node) => html`<${Box} key=${node.name} column=${column.name} node=${node} at=${at} />`)}
          ${column.more && html`<li class="node more ${column.more.state}" data-node="more:${column.name}">
            ${column.name === "tables" ? html`<a class="title" href=${linkTo("tables")}>${plural(column.more.count, "other")}</a>` : html`<span class="title">${plural(column.more.count, "other")}</span>`}
            <span class="note">up to ${duration(column.more.behind_ms)} behind</span></li>`}
          ${!column.nodes.length && html`<li class="node none"><span class="note">none</span></li>`}</ul>
      </div>`)}
    </div>`;
  }
}

/** Edges from tables to the clients have one delay, that of the shapes: only the middle one has a label. */
function withoutRepeats(lines) {
  const same = lines.filter(({ edge }) => edge.to === "clients" && edge.from.startsWith("shard:"));
  return lines.filter((line) => !same.includes(line) || line === same[same.length >> 1]);
}

const isFree = (lines, x, y) => lines.every((line) => line.edge.behind_ms === null || Math.abs(line.x - x) >= LABEL_WIDTH || Math.abs(line.y - y) >= LABEL_HEIGHT);

function countBy(edges, end) {
  const found = new Map();
  for (const edge of edges) found.set(edge[end], (found.get(edge[end]) ?? 0) + 1);
  return found;
}

const LINKS = {
  sources: (node) => (node.name.startsWith("capture:") ? linkTo("captures", node.title) : null),
  topics: (node) => (node.name.startsWith("capture:") ? linkTo("captures", node.title) : null),
  tables: (node) => linkTo("tables", node.title),
};

function Box({ column, node, at }) {
  const href = LINKS[column]?.(node);
  return html`<li class="node ${node.state || "unknown"}" data-node=${node.name} title=${node.sentence || undefined}>
    ${href ? html`<a class="title" href=${href}>${node.title}</a>` : html`<span class="title">${node.title}</span>`}
    <span class="behind"><${Age} ms=${node.behind_ms} at=${at} grows=${isLate(node.state)} /></span>
    <span class="note">${node.note}</span>
    <${State} state=${node.state} />
  </li>`;
}
