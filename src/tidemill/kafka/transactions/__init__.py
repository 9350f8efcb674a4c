"""Coordinator of Kafka's transactions (KIP-98, KIP-360, KIP-890).

    request ─► coordinator ─► transitions (pure) ─► state ─► store (one register per transactional id)
    group_offsets: offsets inside a transaction;  hints: notices between nodes

Invariant (one register): a transaction is one register, changed by compare-and-set only. Any node may change it without
asking another node, and its next coordinator reads its complete state there.

Invariant (decided once): a transaction is committed or aborted once its register is prepared. From then on it can only
be completed, and any node that finds it prepared completes it. It is reported as complete after every partition is
marked and every group has its offsets.

Invariant (open transactions only): partitions accept only records of a transaction whose register is open and contains
the partition. The register is read after the request arrived (`topics/partition/transaction_verification`).
"""
