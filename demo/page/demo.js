// The page of Harbour Shop: three shapes, followed by the unmodified Electric client, and the status of every stage.
import { ShapeStream } from "/console/vendor/electric-client.mjs";

const SHOWN_ROWS = 18;
const KEPT_HISTORY = 5000;
const STALE_AFTER_MS = 3000;
const RETRY_MS = 1000;
const BACKOFF = { initialDelay: 250, maxDelay: 2000, multiplier: 2 };
const $ = (id) => document.getElementById(id);
const base = new URL("/v1/shape", location.href).href;

/**
 * Follow a shape; store its rows by key and call `changed(item, row)` for each change. A rejected shape (its shard does
 * not exist until Spark has created it) is requested again every second; the client's own pause grows to half a minute.
 */
function follow(params, { changed = () => {}, upToDate = () => {}, reset = () => {} }) {
  const rows = new Map();
  const connect = () => {
    rows.clear();
    reset();
    const stream = new ShapeStream({ url: base, params, backoffOptions: BACKOFF, onError: () => { setTimeout(connect, RETRY_MS); } });
    stream.subscribe((items) => {
      for (const item of items) {
        const { operation, control } = item.headers;
        if (control === "must-refetch") { rows.clear(); reset(); continue; }
        if (control === "up-to-date") { upToDate(item.headers); continue; }
        if (!operation) continue;
        if (operation === "delete") rows.delete(item.key);
        else rows.set(item.key, { ...rows.get(item.key), ...item.value });
        changed(item, rows.get(item.key));
      }
      touched = performance.now();
    });
  };
  connect();
  return rows;
}

let touched = performance.now();
const dirty = { orders: true, conversion: true };
const seen = new Map();

// Open orders, from Postgres --------------------------------------------------------------------------
const orders = follow({ table: "public.orders", where: "w_id = 1 AND status = 'open'" }, {
  changed: (item, row) => {
    dirty.orders = true;
    if (item.headers.operation === "insert" && row) {
      const age = Date.now() - Date.parse(row.placed_at.replace(" ", "T").replace(/\+00$/, "Z"));
      seen.set(item.key, { at: performance.now(), age });
      if (age < 60_000) $("orders-age").textContent = `newest arrived ${Math.max(0, Math.round(age))} ms after its commit`;
    }
  },
});

function cell(text, number = false) {
  const td = document.createElement("td");
  td.textContent = text;
  if (number) td.className = "n";
  return td;
}

function fill(body, rows) {
  body.replaceChildren(...rows.map(({ cells, fresh }) => {
    const tr = document.createElement("tr");
    if (fresh) tr.className = "flash";
    tr.append(...cells);
    return tr;
  }));
}

function drawOrders() {
  $("orders-count").textContent = orders.size;
  const newest = [...orders.entries()].sort((a, b) => Number(b[1].o_id) - Number(a[1].o_id)).slice(0, SHOWN_ROWS);
  fill($("orders"), newest.map(([key, o]) => {
    const mark = seen.get(key);
    const age = mark && mark.age < 60_000 ? `${Math.max(0, Math.round(mark.age))} ms` : "snapshot";
    return { cells: [cell(o.o_id), cell(o.d_id), cell(o.c_id), cell(o.total, true), cell(age, true)],
      fresh: mark && performance.now() - mark.at < 800 };
  }));
  for (const key of seen.keys()) if (!orders.has(key)) seen.delete(key);
}

// Conversion by product, from Spark -------------------------------------------------------------------
const changedAt = new Map();
const conversion = follow({ table: "tidemill.conversion_by_product" }, {
  changed: (item) => { dirty.conversion = true; changedAt.set(item.key, performance.now()); },
});

function drawConversion() {
  $("conversion-count").textContent = conversion.size;
  const best = [...conversion.entries()].sort((a, b) => Number(b[1].revenue) - Number(a[1].revenue)).slice(0, SHOWN_ROWS);
  fill($("conversion"), best.map(([key, c]) => ({
    cells: [cell(c.product_id), cell(c.clicks, true), cell(c.sold, true), cell(c.revenue, true),
      cell(Number(c.clicks) ? (Number(c.sold) / Number(c.clicks)).toFixed(3) : "–", true)],
    fresh: performance.now() - (changedAt.get(key) ?? -1e9) < 800,
  })));
}

// Money: sums in cents as BigInt, recorded by LSN so that all three are compared at the same LSN -------
const cents = (text) => BigInt(text.replace(".", ""));
let history = [];
const total = () => [...warehouses.values()].reduce((sum, w) => sum + cents(w.ytd), 0n);
const remember = (lsn) => {
  history.push([BigInt(lsn), total()]);
  if (history.length > KEPT_HISTORY) history = history.slice(-KEPT_HISTORY / 2);
};
let pendingLsn = 0n;
const warehouses = follow({ table: "public.warehouse" }, {
  changed: (item) => { if (item.headers.lsn) pendingLsn = BigInt(item.headers.lsn); if (pendingLsn) remember(pendingLsn); },
  upToDate: (headers) => { if (headers.global_last_seen_lsn) remember(headers.global_last_seen_lsn); },
  reset: () => { history = []; pendingLsn = 0n; },
});

/** Return the browser's sum at `lsn`: the last one at or before it; null until a change at or after it has arrived. */
function moneyAt(lsn) {
  if (!history.length || history.at(-1)[0] < lsn || history[0][0] > lsn) return null;
  let found = null;
  for (const [at, sum] of history) { if (at > lsn) break; found = sum; }
  return found;
}

function drawMoney(checks) {
  for (const check of [...checks].reverse()) {
    const mine = moneyAt(BigInt(check.lsn));
    if (mine === null) continue;
    const browser = `${mine / 100n}.${String(mine % 100n).padStart(2, "0")}`;
    $("money-postgres").textContent = check.postgres;
    $("money-shard").textContent = check.shard;
    $("money-browser").textContent = browser;
    const shardEqual = check.postgres === check.shard, browserEqual = check.postgres === browser;
    $("sign-shard").textContent = shardEqual ? "=" : "≠";
    $("sign-browser").textContent = browserEqual ? "=" : "≠";
    $("strip").className = `strip ${shardEqual && browserEqual ? "equal" : "unequal"}`;
    $("strip-note").textContent = `at LSN ${check.lsn}, ${new Date(check.time_ms).toLocaleTimeString()}`;
    return;
  }
}

// Stages ----------------------------------------------------------------------------------------------
async function drawStatus() {
  try {
    const status = await (await fetch("/api/status")).json();
    drawMoney(status.facts?.demo?.money ?? []);
    fill($("marks"), status.marks.map((m) => {
      const state = cell(m.state);
      state.className = m.state;
      return { cells: [cell(m.name), state, cell(`${(m.report_age_ms / 1000).toFixed(1)} s`, true),
        cell([m.held_by, m.reason].filter(Boolean).join(" "))] };
    }));
  } catch {
    $("freshness").textContent = "the node does not respond; retrying";
  }
}

setInterval(() => {
  if (dirty.orders) { dirty.orders = false; drawOrders(); }
  if (dirty.conversion) { dirty.conversion = false; drawConversion(); }
  const age = performance.now() - touched;
  document.body.classList.toggle("stale", age > STALE_AFTER_MS);
  $("freshness").textContent = age > STALE_AFTER_MS ? `no update for ${Math.round(age / 1000)} s` : "live";
}, 400);
setInterval(drawStatus, 1000);
