// How to use a table: lines to copy, with its name, its key and the address of this node.
import { Component } from "../vendor/preact.mjs";
import { html } from "../parts.js";

/** Without `table`, only a shape exists: a captured table, and the line of a pipeline that would maintain it. With
 *  `lake`, tables are published as Iceberg tables. */
export function Snippets({ table, shape, maintain, lake }) {
  const [curl, javaScript] = shapeSnippets(shape);
  const shown = [
    ...(maintain ? [["Pipeline", maintain, "In the build function of a pipeline: the table becomes an exact, versioned one."]] : []),
    curl, ...(table ? tableSnippets(table) : []), ...(table && lake ? [icebergSnippet(table)] : []), javaScript,
  ];
  return html`<div class="snippets">${shown.map(([title, text, note]) => html`<${Snippet} key=${title} title=${title} text=${text} note=${note} />`)}</div>`;
}

function shapeSnippets(shape) {
  const origin = location.origin;
  return [
    ["curl", `curl -i '${origin}/v1/shape?table=${shape}&offset=-1'`,
      "Repeat with electric-handle and electric-offset of the response, and &live=true: it returns when the table changes."],
    ["JavaScript", `import { Shape, ShapeStream } from "@electric-sql/client";

const stream = new ShapeStream({
  url: "${origin}/v1/shape",
  params: { table: "${shape}" },
});
new Shape(stream).subscribe(({ rows }) => console.log(rows));`, "The unmodified Electric client: all rows, then every change."],
  ];
}

function tableSnippets({ shard: name, key, columns }) {
  const first = key[0] ?? Object.keys(columns)[0];
  const variable = /^[a-z_][a-z0-9_]*$/i.test(name) ? name : "table";
  return [
    ["Python", `import tidemill

with tidemill.connect("tidemill.toml") as cluster:
    ${variable} = cluster.table("${name}")
    print(${variable}.count(), ${variable}.to_arrow(as_of="latest"))`, "Without a node, without Spark: as Arrow, Polars or DuckDB."],
    ["PySpark", `${variable} = spark.read.format("tidemill").load("${name}")
${variable}.show()`, "In any Spark session that has tidemill; append with df.write.format(\"tidemill\")."],
    ["SQL", `tidemill sql 'SELECT * FROM "${name}" ORDER BY "${first}" LIMIT 20'`, "DuckDB in a terminal, at one exact time (--as-of)."],
  ];
}

function icebergSnippet({ shard: name }) {
  return ["Iceberg", `from pyiceberg.catalog.rest import RestCatalog

catalog = RestCatalog("lake", uri="${location.origin}/iceberg")
print(catalog.load_table(("tidemill", ${JSON.stringify(name)})).scan().to_arrow())`, "Any engine with an Iceberg REST catalogue, such as Spark, Trino or DuckDB: it reads the bucket itself."];
}

class Snippet extends Component {
  async copy() {
    const { text } = this.props;
    try { await navigator.clipboard.writeText(text); this.setState({ said: "Copied." }); } catch {
      getSelection().selectAllChildren(this.code);
      this.setState({ said: "Selected: press Ctrl+C." });
    }
  }
  render({ title, text, note }, { said }) {
    return html`<figure><figcaption><h3>${title}</h3><button type="button" onClick=${() => this.copy()} aria-label=${`Copy ${title}`}>Copy</button> <span class="quiet" aria-live="polite">${said}</span></figcaption>
      <pre ref=${(element) => { this.code = element; }}><code>${text}</code></pre><p class="quiet">${note}</p></figure>`;
  }
}
