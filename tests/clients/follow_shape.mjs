// Follows one shape with the stock client and prints one JSON line per batch:
//   {"rows": {key: value, …}, "upToDate": bool, "handle": "...", "refetches": n, "messages": n}
// Usage: node follow_shape.mjs URL PARAMS_JSON [sse | ""] [HEADERS_JSON]
import { ShapeStream, isChangeMessage, isControlMessage } from "@electric-sql/client";

const [url, paramsText, mode, headersText] = process.argv.slice(2);
const stream = new ShapeStream({
  url,
  params: JSON.parse(paramsText),
  headers: JSON.parse(headersText ?? "{}"),
  liveSse: mode === "sse",
  warnOnHttp: false,
  backoffOptions: { initialDelay: 50, maxDelay: 500, multiplier: 2 },
  onError: (error) => {
    console.log(JSON.stringify({ error: String(error), status: error.status ?? 0 }));
    process.exit(3);
  },
});
const rows = new Map();
let refetches = 0;
let messages = 0;

const plain = (key, value) => (typeof value === "bigint" ? `${value}n` : value);

stream.subscribe((batch) => {
  for (const message of batch) {
    if (isChangeMessage(message)) {
      messages += 1;
      const { operation } = message.headers;
      if (operation === "delete") rows.delete(message.key);
      else if (operation === "insert") rows.set(message.key, message.value);
      else rows.set(message.key, { ...rows.get(message.key), ...message.value });
    } else if (isControlMessage(message) && message.headers.control === "must-refetch") {
      rows.clear();
      refetches += 1;
    }
  }
  const line = {
    rows: Object.fromEntries(rows),
    upToDate: stream.isUpToDate,
    handle: stream.shapeHandle,
    refetches,
    messages,
  };
  process.stdout.write(JSON.stringify(line, plain) + "\n");
});
process.stdin.resume();
process.stdin.on("end", () => process.exit(0));
