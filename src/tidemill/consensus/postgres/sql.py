"""SQL of the contract. Every write decides and changes in one statement, under the row's lock.

A statement that affects no row was rejected. The reason is read afterwards, by a new statement with a new snapshot.
Sequences, terms and positions only grow, so that later state still explains the rejection.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.consensus.engine_state import LEASE_SPAN_TTLS

NOW_MS = "(extract(epoch FROM clock_timestamp()) * 1000)::int8"

LOG_IDS = "SELECT name, id FROM tidemill.logs WHERE name = ANY(%b::text[])"

CREATE_LOGS = (
    'INSERT INTO tidemill.logs (name) SELECT n FROM unnest(%b::text[]) AS n ORDER BY n COLLATE "C"'
    " ON CONFLICT (name) DO NOTHING"
)

# A group is one statement. Two statements of one transaction would be two messages: a process that is frozen between
# them would hold the row locks of the first one against every other process. `UNION ALL` executes its branches in
# order, so every group locks heads before registers. Columns of the result: whether the row is a log's, the log's id or
# the register's key, the log's start.

# Parameters: per log id, term, expected next, record count; per record log id, ordinal, nonce, data.
# `locked_logs` takes the row locks in id order before anything changes.
APPEND = (
    """appends AS (
    SELECT * FROM unnest(%b::int8[], %b::int8[], %b::int8[], %b::int8[]) AS i (id, term, expected, count)
), locked_logs AS MATERIALIZED (
    SELECT l.id FROM tidemill.logs l JOIN appends i ON i.id = l.id ORDER BY l.id FOR NO KEY UPDATE OF l
), moved AS (
    UPDATE tidemill.logs l SET term = i.term, next = l.next + i.count
    FROM appends i JOIN locked_logs k ON k.id = i.id
    WHERE l.id = i.id AND l.term <= i.term AND l.next = i.expected
    RETURNING l.id, l.term, l.start, i.expected
), written AS (
    INSERT INTO tidemill.log_records (log, position, term, nonce, data)
    SELECT m.id, m.expected + r.ordinal, m.term, r.nonce, r.data
    FROM unnest(%b::int8[], %b::int8[], %b::text[], %b::bytea[]) AS r (id, ordinal, nonce, data)
    JOIN moved m ON m.id = r.id
)""",
    "SELECT true, id::text, start FROM moved",
)

# Parameters: keys, expected sequences, nonces, data.
UPDATE_REGISTERS = (
    """updates AS (
    SELECT * FROM unnest(%b::text[], %b::int8[], %b::text[], %b::bytea[]) AS i (key, expected, nonce, data)
), locked_registers AS MATERIALIZED (
    SELECT r.key FROM tidemill.registers r JOIN updates i ON i.key = r.key ORDER BY r.key FOR NO KEY UPDATE OF r
), updated AS (
    UPDATE tidemill.registers r SET seq = r.seq + 1, nonce = i.nonce, data = i.data
    FROM updates i JOIN locked_registers k ON k.key = i.key
    WHERE r.key = i.key AND r.seq = i.expected
    RETURNING r.key
)""",
    "SELECT false, key, 0::int8 FROM updated",
)

# Parameters: keys, nonces, data.
CREATE_REGISTERS = (
    """created AS (
    INSERT INTO tidemill.registers (key, seq, nonce, data)
    SELECT i.key, 1, i.nonce, i.data FROM unnest(%b::text[], %b::text[], %b::bytea[]) AS i (key, nonce, data)
    ORDER BY i.key COLLATE "C"
    ON CONFLICT (key) DO NOTHING
    RETURNING key
)""",
    "SELECT false, key, 0::int8 FROM created",
)


def group_statement(parts: Sequence[tuple[str, str]]) -> str:
    """Build one statement from some of the three, in this order."""
    return f"WITH {', '.join(with_ for with_, _ in parts)} {' UNION ALL '.join(rows for _, rows in parts)}"


HEADS_BY_ID = "SELECT id, term, start, next FROM tidemill.logs WHERE id = ANY(%b::int8[])"

DROP = "DELETE FROM tidemill.registers WHERE key = %b::text AND seq = %b::int8 RETURNING key"

REGISTERS = "SELECT key, seq, data, nonce FROM tidemill.registers WHERE key = ANY(%b::text[])"
HEADS = "SELECT name, term, start, next FROM tidemill.logs WHERE name = ANY(%b::text[])"
PARTS = 512
"""Number of parts into which the logs are divided, by id, to detect which of them changed."""

# All addends only grow, so the sum of a part changes whenever one of its logs changes or is new.
SUMS = (
    f"SELECT id & {PARTS - 1}, sum(term + start + next + 1)::int8 FROM tidemill.logs WHERE name ^@ %b::text GROUP BY 1"
)

# Parameters: prefix, name, a bit for each part, limit.
HEADS_AFTER = (
    "SELECT name, term, start, next FROM tidemill.logs WHERE name ^@ %b::text AND name > %b::text"
    f" AND get_bit(%b::bytea, id & {PARTS - 1}) = 1 ORDER BY name LIMIT %b::int8"
)
SCAN = "SELECT key, seq, data, nonce FROM tidemill.registers WHERE key ^@ %b::text ORDER BY key"

# Parameters: start, record limit, byte limit, log. One row with a null position when there is nothing to read.
READ = """
SELECT h.term, h.start, h.next, r.position, r.term, r.nonce, r.data
FROM tidemill.logs h
LEFT JOIN LATERAL (
    SELECT * FROM (
        SELECT c.position, c.term, c.nonce, c.data,
            sum(octet_length(c.data)) OVER (ORDER BY c.position) AS total_bytes,
            row_number() OVER (ORDER BY c.position) AS number
        FROM (
            SELECT position, term, nonce, data FROM tidemill.log_records
            WHERE log = h.id AND position >= %b::int8 ORDER BY position LIMIT %b::int8
        ) c
    ) s WHERE s.total_bytes <= %b::int8 OR s.number = 1
) r ON true
WHERE h.name = %b::text
ORDER BY r.position
"""

FENCE = "UPDATE tidemill.logs SET term = %b::int8 WHERE id = %b::int8 AND term <= %b::int8 RETURNING term, start, next"

TRUNCATE = (
    "UPDATE tidemill.logs SET start = greatest(start, %b::int8)"
    " WHERE name = %b::text AND next >= %b::int8 RETURNING id, term, start, next"
)

# Deletes truncated records, a bounded number at a time, outside the head row's lock.
SWEEP = """
DELETE FROM tidemill.log_records WHERE log = %b::int8 AND position < (
    SELECT min(position) + %b::int8 FROM tidemill.log_records WHERE log = %b::int8
) AND position < %b::int8
"""

# The condition is the opposite of LeaseRow.is_live.
ACQUIRE = f"""
INSERT INTO tidemill.leases AS l (name, holder, term, ttl_ms, expires_ms, info)
VALUES (%b::text, %b::text, 1, %b::int8, {NOW_MS} + %b::int8, %b::bytea)
ON CONFLICT (name) DO UPDATE SET
    holder = excluded.holder, ttl_ms = excluded.ttl_ms, info = excluded.info,
    term = l.term + (l.holder <> excluded.holder)::int4,
    expires_ms = {NOW_MS} + excluded.ttl_ms
WHERE l.holder = excluded.holder OR l.holder = '' OR l.expires_ms <= {NOW_MS}
    OR l.expires_ms > {NOW_MS} + {LEASE_SPAN_TTLS} * l.ttl_ms
RETURNING name, holder, term, ttl_ms, expires_ms, info, {NOW_MS}
"""

LEASE = f"SELECT name, holder, term, ttl_ms, expires_ms, info, {NOW_MS} FROM tidemill.leases WHERE name = %b::text"

RELEASE = (
    "UPDATE tidemill.leases SET holder = '', expires_ms = 0"
    " WHERE name = %b::text AND holder = %b::text AND term = %b::int8"
)

LEASES = (
    f"SELECT name, holder, term, ttl_ms, expires_ms, info, {NOW_MS} FROM tidemill.leases"
    " WHERE name ^@ %b::text ORDER BY name"
)

NOTIFY = "SELECT pg_notify('tidemill', p) FROM unnest(%b::text[]) AS p"

# Whether the server is a standby, and its life: the server process, by its start time, and the timeline that it writes.
LIFE = (
    "SELECT pg_is_in_recovery(), CASE WHEN pg_is_in_recovery() THEN '' ELSE"
    " extract(epoch FROM pg_postmaster_start_time())::text || '/' ||"
    " left(pg_walfile_name(pg_current_wal_insert_lsn()), 8) END"
)

# Parameters: names of logs, one position each. Returns the log's head (zero if absent), and the nonce there or null.
HISTORY = """
SELECT i.name, coalesce(l.term, 0), coalesce(l.start, 0), coalesce(l.next, 0), r.nonce
FROM unnest(%b::text[], %b::int8[]) AS i (name, position)
LEFT JOIN tidemill.logs l ON l.name = i.name
LEFT JOIN tidemill.log_records r ON r.log = l.id AND r.position = i.position AND r.position < l.next
"""

LEASES_NAMED = (
    f"SELECT name, holder, term, ttl_ms, expires_ms, info, {NOW_MS} FROM tidemill.leases WHERE name = ANY(%b::text[])"
)
