"""One partition: state, commands, apply, codec (pure) and machine (the only async file that proposes).

R1  Base offsets are contiguous from the log start to the high watermark.
R2  The state is a function of the partition's fenced log; a rejected command is a no-op everywhere.
R3  At most one append is under way; an append whose answer was lost is resolved by nonce before the next.
"""
