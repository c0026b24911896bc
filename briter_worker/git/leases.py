"""Find out whether a program has a file open for writing, by asking the kernel for a lease."""

from __future__ import annotations

import fcntl
import signal


def is_open_for_writing(handle: int) -> bool | None:
    """Return True if a program has the open file open for writing; None where the kernel does not say.

    It says so to the file's owner and to root, on file systems that have leases. The lease is given back at
    once: a program that opens the file in between waits for microseconds.
    """
    try:
        # The signal of a broken lease would end this process, if it were not an ignored one.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
