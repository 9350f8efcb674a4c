"""`python unroot.py UID PROGRAM ARG…`: run a program as UID, keeping only the right to pass directories.

PostgreSQL refuses to run as root, yet a root user's data directory often lies below directories that
only root may enter (a home, a pytest or mktemp directory). Instead of widening their modes, the
program gets the ambient capability CAP_DAC_OVERRIDE and no other (capabilities(7)).

Stands alone on purpose: it is executed by path, before the package is importable for UID.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_KEEPCAPS = 8
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_OVERRIDE = 1
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


def drop_to(uid: int) -> None:
    """Become uid:uid. On failure to keep the capability the program still runs, only with fewer rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    number = SYS_CAPSET.get(os.uname().machine)
    if number is None:
        return
    bit = 1 << CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    # effective, permitted, inheritable of capabilities 0–31, then the same of 32–63
    data = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)
    if libc.syscall(number, header, data) == 0:
        libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_OVERRIDE, 0, 0)


if __name__ == "__main__":
    drop_to(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
