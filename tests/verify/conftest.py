"""Programs are compiled once for all tests of this folder."""

import pytest

from tests.shared_programs import shared_programs


@pytest.fixture(scope="session", autouse=True)
def shared_compilation():
    with shared_programs():
        yield
