"""Consumer groups of both protocols (classic and KIP-848).

    request ─► coordinator (groups of this node) ─► group_runner (timer) ─► protocol_dispatch
        classic protocol    classic/      join, sync, heartbeat; phases of a rebalance
        consumer protocol   consumer/     targets and assignments
        migration           protocol_migration, consumer/classic_members    members of both in one group
        writes              group_writer (one write of a group at a time), group_store, group_records
    subscriptions, topic_patterns: names and RE2 patterns

The cores are pure: time and ids are arguments, answers are put into an outbox.

Invariants:

- Fencing: a group's rows are written only under the seqno of its head row, which every takeover changes. A replaced
  coordinator can write nothing more, neither an assignment nor an offset.
- Durable assignments: members receive an assignment after it is durable. So it survives its coordinator, and no other
  node can assign differently in the same generation.
- Write order: writes of one group are appended one after the other, in the order of the requests.
- Unknown outcomes: after a write of unknown outcome nothing is written until the head row has been changed, which
  fences the write if it is still in flight.
- Protocol: a group uses the consumer protocol while any member speaks it, else the classic one. While it has no
  members, the next member to join determines the protocol. The committed offsets stay, and generations and epochs
  continue.
"""
