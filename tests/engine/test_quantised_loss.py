"""What few bits cost tiny-relullama on held-out texts, in nats a token."""

from pathlib import Path

import numpy as np
import pytest

from dynajax import Engine, quant

TEXTS = Path(__file__).parents[1] / "data" / "heldout"
TOKENS = 512  # of each text
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYNAJAX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def loss(dtype: str) -> float:
    """Mean negative log probability of 2,044 tokens of four texts."""
    found = []
    with Engine.from_pretrained("tiny-relullama", ctx=TOKENS, dtype=dtype) as engine:
        for name in ("moby_dick", "austen", "sotu", "jargon"):
            text = (TEXTS / f"{name}.txt").read_text(encoding="utf-8")
            found.append(engine.score(engine._parts.encode(text[: 8 * TOKENS])[:TOKENS]).logprobs)
    return -float(np.concatenate(found).mean(dtype=np.float64))


@pytest.fixture(scope="module")
def plain() -> float:
    return loss("float16")


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.002), ("int4", 0.01)])
def test_what_few_bits_cost(plain, dtype, most):
    """Measured: 4.5815 in float16, 0.0003 more in int8, 0.0051 in int4."""
    assert -most < loss(dtype) - plain < most


def test_the_bound_notices_scales_that_clip(plain, monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path))
    monkeypatch.setitem(quant.CLIPS, 4, (0.4 / 8,))
    assert loss("int4") - plain > 0.02
