"""What the tests of mixtures share."""

from tests.engine.mixture.zoo import zoo  # noqa: F401
