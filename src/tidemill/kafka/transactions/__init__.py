"""The coordinator of Kafka's transactions (KIP-98, KIP-360, KIP-890).

    request ─► coordinator ─► transitions (pure) ─► state ─► store (one register per transactional id)
    group_offsets: offsets inside a transaction;  admin: aborts by an operator

TX1  A transaction is one register, changed by compare-and-set only: any node may change it, no node needs to be asked,
     and whoever coordinates it next reads all there is to know.
TX2  It is committed or aborted once its register says so (prepared); from then on nothing but its end can happen to it,
     and whoever finds it so carries it to its end. The end is told complete after every partition is marked and every
     group has its offsets.
TX3  Partitions take records only of a transaction whose register says that it is open and holds them, read after they
     were asked (X4 of `topics/partition/transaction_verification`).
"""
