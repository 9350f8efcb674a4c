"""One partition: the log, its leader and its state.

    validated batch ─► leader ─► append_plan ─► appender ─► fenced log ─► apply ─► state ─► produce_results
        received ─► reserved (in order) ─► checked ─► uploaded ─► its turn ─► appended ─► acknowledged
    producer_state, sequence_gaps: idempotence;  transactions, transaction_verification: KIP-890
    recovery, rollup_scheduler, rollup, row_codec: opening a log, and its compact forms

The modules state, commands, apply and codec are pure. Only `leader` proposes commands.

Invariant (contiguous offsets): base offsets are contiguous from the log start to the high watermark.

Invariant (replicated state): the state is a function of the partition's fenced log. A rejected command is a no-op on
every reader.

Invariant (one append): at most one append is in flight. An append whose answer was lost is resolved by nonce before the
next one.
"""
