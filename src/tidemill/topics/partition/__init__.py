"""One partition: the log, its leader and its state.

    batch ─► batch_intake ─► leader ─► append_plan ─► appender ─► fenced log ─► state_machine ─► results
        received ─► reserved (in order) ─► checked ─► uploaded ─► its turn ─► appended ─► acknowledged
    live_batches, pending_batch: batches without a result
    sequence_gaps: idempotence;  transaction_verification: KIP-890
    recovery, rollup: opening a log, and its compact form

The package `state_machine` is pure. Only `leader` proposes commands.

Invariant (contiguous offsets): base offsets are contiguous from the log start to the high watermark.

Invariant (one append): at most one append is in flight. An append whose answer was lost is resolved by nonce before the
next one.
"""
