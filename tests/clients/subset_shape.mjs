// Follows the changes of one shape with the stock client, and asks for subsets of it; prints one JSON line per event:
//   {"event": "batch", "rows": {key: value, …}, "offset", "upToDate", "refetches", "duplicates": [keys inserted twice]}
//   {"event": "snapshot", "ids": […], "metadata": {…}, "tag": …}         after each request, or {"event": "error", …}
// Requests are lines on stdin: {"kind": "request" | "fetch", "tag": …, "opts": {where, params, limit, offset, orderBy, …}}
// Usage: node subset_shape.mjs URL PARAMS_JSON OPTIONS_JSON
import { createInterface } from "node:readline";
import { ShapeStream, isChangeMessage, isControlMessage } from "@electric-sql/client";

const [url, paramsText, optionsText] = process.argv.slice(2);
const stream = new ShapeStream({
  url,
  params: JSON.parse(paramsText),
  log: "changes_only",
  offset: "now",
  warnOnHttp: false,
  backoffOptions: { initialDelay: 50, maxDelay: 500, multiplier: 2 },
  ...JSON.parse(optionsText ?? "{}"),
});
const plain = (key, value) => (typeof value === "bigint" ? `${value}n` : value);
const say = (line) => process.stdout.write(JSON.stringify(line, plain) + "\n");
const rows = new Map();
const duplicates = [];
let refetches = 0;

stream.subscribe(
  (batch) => {
    const controls = [];
    for (const message of batch) {
      if (isChangeMessage(message)) {
        const { operation } = message.headers;
        const injected = message.headers.snapshot_mark !== undefined;
        if (operation === "delete") rows.delete(message.key);
        else if (operation === "insert") {
          if (rows.has(message.key) && !injected) duplicates.push(message.key);
          rows.set(message.key, message.value);
        } else if (rows.has(message.key)) rows.set(message.key, { ...rows.get(message.key), ...message.value });
      } else if (isControlMessage(message)) {
        controls.push(message.headers.control);
        if (message.headers.control === "must-refetch") {
          rows.clear();
          refetches += 1;
        }
      }
    }
    const upToDate = stream.isUpToDate;
    say({ event: "batch", rows: Object.fromEntries(rows), offset: stream.lastOffset, upToDate, refetches, duplicates, controls });
  },
  (error) => say({ event: "error", error: String(error), status: error.status ?? 0 }),
);

createInterface({ input: process.stdin }).on("line", async (line) => {
  const { kind, tag, opts } = JSON.parse(line);
  try {
    const call = kind === "fetch" ? stream.fetchSnapshot(opts) : stream.requestSnapshot(opts);
    const { metadata, data } = await call;
    say({ event: "snapshot", tag, metadata, ids: data.map((message) => message.value.id) });
  } catch (error) {
    say({ event: "snapshot", tag, error: String(error), status: error.status ?? 0 });
  }
}).on("close", () => process.exit(0));
