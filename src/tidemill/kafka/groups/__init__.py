"""Consumer groups, of both protocols (classic, and KIP-848).

    request ─► coordinator (groups of this node) ─► group_runner (writes in order, timer) ─► protocol_dispatch
        classic protocol    classic, classic_rebalance, classic_state      join, sync, heartbeat; phases of a rebalance
        consumer protocol   consumer, consumer_reconciliation, consumer_state, assignors      targets and assignments
        migration           protocol_migration, classic_members            members of both in one group
    group_records, group_store: rows of a group in the metastore;  subscriptions, topic_patterns: RE2

The cores are pure: time and ids come in, answers go to an outbox.

CG1  A group's rows are written only with the seqno of its head row, which every take-over changes: a coordinator that
     was replaced writes nothing more, neither an assignment nor an offset.
CG2  An assignment reaches its members after it is durable, so it survives its coordinator and nobody else can hand out
     another one of the same generation.
CG3  Writes of one group are appended one after the other, in the order in which they were asked for.
CG4  After a write of unknown outcome nothing is written before the head row was changed: what may still be on its way
     is fenced by then.
CG5  A group is of the consumer protocol while anybody in it speaks that, else of the classic one; while nobody is in
     it, whoever comes next decides. What it has committed stays, and its generations and epochs go on.
"""
