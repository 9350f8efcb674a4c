"""One partition: the log, its leader and its state.

    validated batch ─► leader ─► append_plan ─► appender ─► fenced log ─► apply ─► state ─► produce_results
        received ─► reserved (in order) ─► checked ─► uploaded ─► its turn ─► appended ─► acknowledged
    producer_state, sequence_gaps: idempotence;  transactions, transaction_verification: KIP-890
    recovery, rollup_scheduler, rollup, row_codec: opening a log, and its short form

state, commands, apply and codec are pure. `leader` is the only module that proposes.

R1  Base offsets are contiguous from the log start to the high watermark.
R2  The state is a function of the partition's fenced log; a rejected command is a no-op everywhere.
R3  At most one append is under way; an append whose answer was lost is resolved by nonce before the next.
"""
