"""Shapes of mixtures against what is published of them, and what experts take on each side."""

import numpy as np
import pytest

from dynajax.sim.experts.shapes import MIXTURES, MixtureWeights
from dynajax.sim.experts.sides import Sides
from dynajax.sim.hardware import load_hardware
from tests.sim.experts.cases import small_load, small_machine


def weights(name: str, dtype: str = "bfloat16") -> MixtureWeights:
    return MixtureWeights(spec=MIXTURES[name], dtype=dtype, host_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "expert_mb", "experts_gb", "billions", "active"),
    [
        ("mixtral-8x7b", 352, 90.2, 46.7, 12.9),
        ("qwen3-30b-a3b", 9.4, 58.0, 30.5, 3.3),
        ("deepseek-v2-lite", 17.3, 28.8, 15.7, 2.4),
    ],
)
def test_sizes_are_the_published_ones(name, expert_mb, experts_gb, billions, active):
    sizes, spec = weights(name), MIXTURES[name]
    assert sizes.unit / 1e6 == pytest.approx(expert_mb, rel=0.01)
    assert sizes.experts / 1e9 == pytest.approx(experts_gb, rel=0.005)
    rest = sizes.dense / 2 + spec.vocab * spec.hidden  # the table of embeddings stays on the host
    assert (rest + sizes.experts / 2) / 1e9 == pytest.approx(billions, rel=0.01)
    chosen = len(spec.unit_layers) * spec.experts.router.top_k * sizes.unit / 2
    assert (rest + chosen) / 1e9 == pytest.approx(active, rel=0.12)  # by some without embeddings


def test_latents_make_a_small_cache():
    assert weights("deepseek-v2-lite").cache(1) == 27 * (512 + 64) * 2
    assert weights("qwen3-30b-a3b").cache(1) == 48 * 2 * 4 * 128 * 2


def test_what_a_step_meets():
    spec, load = MIXTURES["deepseek-v2-lite"], weights("deepseek-v2-lite").mixture_load()
    assert (load.layers, len(load.unit_layers), load.units, load.top_k) == (27, 26, 64, 6)
    assert load.always[0] == 3 * 2048 * 10944 * 2 and set(load.always[1:]) == {3 * 2048 * 2816 * 2}
    assert load.unit_flops == load.unit and load.always_flops == load.always  # two operations, two bytes
    assert load.unit / weights("deepseek-v2-lite", "int4").unit == pytest.approx(32 / 9)
    assert load.attend / 2 == spec.block_parameters + 64 * 2048


def test_an_expert_takes_the_longer_of_reading_and_computing():
    sides = Sides.of(small_load(), small_machine())
    assert (1e3 * sides.device_s(np.array([1, 3, 4, 10]))).tolist() == pytest.approx([1, 1, 1.2, 3])
    assert (1e3 * sides.host_s(np.array([1, 2, 3, 10]))).tolist() == pytest.approx([10, 10, 12, 40])
    pieces = Sides.of(small_load(), small_machine(t0_s=1.0), piece=30.0)
    assert pieces.copy_fixed_s == pytest.approx(4e-3)  # 100 bytes in pieces of 30


def test_lines_through_rooflines():
    sides = Sides.of(small_load(), small_machine())
    few, many = sides.fitted(range(1, 3)), sides.fitted(range(40, 80))
    assert few.cpu(1) == pytest.approx(0.010, rel=0.02) and few.gpu(2) == pytest.approx(0.001, rel=0.02)
    assert many.cpu(60) == pytest.approx(0.240, rel=0.01) and many.gpu(60) == pytest.approx(0.018, rel=0.01)
    mixed = sides.fitted(range(1, 9))
    assert abs(mixed.cpu(np.arange(1, 9)) / sides.host_s(np.arange(1, 9)) - 1).max() < 0.25
    assert mixed.copy_s == pytest.approx(0.004) and sides.fitted([0, 0]).copy_s == pytest.approx(0.004)


def test_the_machine_is_the_papers():
    machine = load_hardware("dali-pc")
    assert machine.device_bytes == 24 * 2**30 and machine.cores == 16 and machine.link_bps == 25e9
    assert set(machine.cpu_bps.values()) == {50e9}
    for word in ("RTX 3090", "EPYC 7532", "Not measured", "assumed", "overheads"):
        assert word in machine.source
