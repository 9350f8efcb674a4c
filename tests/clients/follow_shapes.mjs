// Follows any number of shapes with the stock client, in one process. Each line of stdin is a command, answered by a line:
//   {"follow": name, "url": URL, "params": {…}, "sse": bool}
//   {"tell": name}   →   {"name", "rows": [{column: text|null|array}], "upToDate", "refetches", "refused", "failed"}
// Values stay PostgreSQL's text (arrays become lists). A refusal of the server is tried again, as an application would; of
// an error of another kind the client itself says that it must not be.
import { createInterface } from "node:readline";
import { ShapeStream, isChangeMessage, isControlMessage } from "@electric-sql/client";

const same = (value) => value;
const parser = Object.fromEntries(
  ["int2", "int4", "int8", "bool", "float4", "float8", "json", "jsonb"].map((type) => [type, same]),
);
const followed = new Map();

function follow({ follow: name, url, params, sse }) {
  const state = { name, rows: new Map(), refetches: 0, refused: "", failed: "" };
  const stream = new ShapeStream({
    url,
    params,
    parser,
    liveSse: sse,
    warnOnHttp: false,
    backoffOptions: { initialDelay: 50, maxDelay: 500, multiplier: 2 },
    onError: async (error) => {
      if (error.status === undefined) {
        state.failed = String(error.stack ?? error);
        return undefined;
      }
      state.refused = `${error.status} ${error}`;
      await new Promise((resolve) => setTimeout(resolve, 200));
      return {};
    },
  });
  state.stream = stream;
  stream.subscribe((batch) => {
    state.refused = "";
    for (const message of batch) {
      if (isChangeMessage(message)) {
        const { operation } = message.headers;
        if (operation === "delete") state.rows.delete(message.key);
        else if (operation === "insert") state.rows.set(message.key, message.value);
        else state.rows.set(message.key, { ...state.rows.get(message.key), ...message.value });
      } else if (isControlMessage(message) && message.headers.control === "must-refetch") {
        state.rows.clear();
        state.refetches += 1;
      }
    }
  });
  followed.set(name, state);
}

createInterface({ input: process.stdin })
  .on("line", (line) => {
    const command = JSON.parse(line);
    if (command.follow) return follow(command);
    const { name, rows, stream, refetches, refused, failed } = followed.get(command.tell);
    const told = { name, rows: [...rows.values()], upToDate: stream.isUpToDate, refetches, refused, failed };
    process.stdout.write(JSON.stringify(told) + "\n");
  })
  .on("close", () => process.exit(0));
