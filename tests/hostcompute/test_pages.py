"""Memory is put on huge pages, and nothing in it changes."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from hostcompute import pages

SIZE = 16 * pages.HUGE


def huge_bytes() -> int:
    """Of this process, on huge pages."""
    return 1024 * int(re.search(r"AnonHugePages: *(\d+)", Path("/proc/self/smaps_rollup").read_text())[1])


def small_paged() -> np.ndarray:
    """On small pages, though huge ones are allowed from now on."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return array


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc")
def test_it_lies_on_huge_pages_and_keeps_its_content():
    array = small_paged()
    expected, before = array.copy(), huge_bytes()
    if not pages.gather_pages(array.ctypes.data, array.nbytes):
        pytest.skip("this system has no huge pages to give on request")
    assert huge_bytes() - before >= SIZE - 2 * pages.HUGE
    np.testing.assert_array_equal(array, expected)


def test_what_holds_no_whole_page_is_left_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *call: asked.append(call) or 0)
    assert not pages.gather_pages(pages.HUGE + 1, 2 * pages.HUGE - 2) and not asked
    assert pages.gather_pages(pages.HUGE - 1, pages.HUGE + 5) and asked == [(pages.HUGE, pages.HUGE, 25)]


def test_a_system_without_the_request_is_no_error(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda: None)
    assert not pages.gather_pages(0, 8 * pages.HUGE)
    monkeypatch.setattr(pages, "_madvise", lambda: lambda *_: -1)
    assert not pages.gather_pages(0, 8 * pages.HUGE)
