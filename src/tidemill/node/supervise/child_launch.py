"""What a supervised child runs first: it asks to end with its parent, and becomes its command.

usage: child_launch.py PARENT_PID COMMAND [ARGUMENT ...]

Not between fork and exec of the parent (`preexec_fn`), which has threads: a lock that one of them holds at that moment
is held in the child for ever, and the parent waits for it (CPython's documentation of subprocess warns of that).
Started by its path and with nothing of ours, so that it takes no time to speak of.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NOT_RUN = 127
"""What a shell ends with where a command cannot be run."""


def main(parent: int, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that was asked: nobody is there to be told
        return 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and what it becomes would, too
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
    return EXIT_NOT_RUN


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
