"""Standard streams that are always there, also where the process was started with some of them closed."""

from __future__ import annotations

import os
import sys


def fill_standard_streams() -> None:
    """Open /dev/null for whichever of stdin, stdout and stderr is closed; call it before anything opens a file.

    Otherwise a socket gets the free number, what is printed goes to a client, and the event loop dies over its own
    descriptors. Children inherit what is filled in.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given out, and the ones below are taken.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    # Python has no objects for streams that were closed when it started.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
