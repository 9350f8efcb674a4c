"""First program of a supervised child: it arranges to end with its parent, then executes its command.

    usage: child_launch.py PARENT_PID COMMAND [ARGUMENT ...]

The supervisor does not do this between fork and exec (`preexec_fn`), because it has threads: a lock that one of them
holds at that moment stays held in the child forever, and the parent waits for it (CPython's documentation of subprocess
warns of that). The program is started by its path and imports nothing from tidemill, so that it costs almost no time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_NOT_RUN = 127
"""Exit code of a shell for a command that cannot be run."""


def main(parent: int, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before prctl, so the signal will not come
        return 0
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores both, and the executed command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
    return EXIT_NOT_RUN


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
