"""DALI's tables and the seed's figures: what is beside what, with little text, and what the published figures are."""

from dataclasses import replace

import pytest

from dynajax.sim.experts import compare, paper, published, seed
from dynajax.sim.experts.compare import MixtureJob, bound, outcomes, speed
from dynajax.sim.experts.paper import changed, job_of, mean_cells, mixture_cells_of
from dynajax.sim.experts.shapes import MIXTURES
from dynajax.sim.experts.systems import RIVALS
from dynajax.sim.hardware import load_hardware


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Three layers, few tokens, two batches."""
    specs = dict(MIXTURES)
    for name in published.MODELS:
        spec = MIXTURES[name]
        specs[name] = replace(spec, layers=4, experts=replace(spec.experts, layers=(1, 2, 3)))
    for module in (compare, seed):
        monkeypatch.setattr(module, "MIXTURES", specs)
    monkeypatch.setattr(published, "SIMULATED", 5)
    monkeypatch.setattr(published, "PROMPT", 8)
    monkeypatch.setattr(published, "PREFILL_BATCHES", (8, 32))
    monkeypatch.setattr(published, "DECODE_BATCHES", (32,))
    compare._drawn.cache_clear()
    yield
    compare._drawn.cache_clear()


def test_the_cells_of_a_model(monkeypatch):
    monkeypatch.setattr(paper, "OPEN", (("share", 0.25, (0.5,)), ("host_gb_s", 50.0, (100.0,))))
    cells = mixture_cells_of("qwen3-30b-a3b")
    found = {(cell.table, cell.row, cell.system): cell for cell in cells}
    assert len(found) == len(cells) and {cell.row.split("/")[0] for cell in cells} >= {"dali-pc"}
    row = "dali-pc/qwen3-30b-a3b/batch 32"
    assert found["moe_decode_tok_s_row", row, "dali"].published == 1.96
    assert found["moe_decode_tok_s_row", row, "hybrimoe"].published == 1.75
    assert found["moe_decode_tok_s_row", row, "ours"].published is None
    systems = {cell.system for cell in cells if cell.table == "moe_prefill_tok_s"}
    assert systems == {*RIVALS, "ours-engine", "bound"}
    for table in ("moe_decode_tok_s_row", "moe_prefill_tok_s"):
        for batch in (1, 8, 32):
            of = {name: found[table, f"dali-pc/qwen3-30b-a3b/batch {batch}", name].simulated for name in systems}
            assert max(of.values()) == of["bound"]
    ours, other = (found["moe_decode_tok_s_row", row, name].simulated for name in ("ours", "ktransformers"))
    assert ours >= other  # the guard
    lead = found["moe_over", "decode over ktransformers/qwen3-30b-a3b/batch 32", "ours"]
    assert lead.simulated == pytest.approx(ours / other)
    assert not [cell for cell in cells if cell.row.startswith("decode over") and "batch 8" in cell.row]
    more = found["moe_sensitivity", f"{row}/share=0.5", "ktransformers"].simulated
    assert more > other and found["moe_sensitivity", f"{row}/host_gb_s=100.0", "llama.cpp"].simulated > 0


def test_means_stand_beside_what_was_published():
    cells = [paper.Cell(table="moe_over", row=f"{phase} over llama.cpp/m/batch {b}", system=system, published=None,
                        simulated=value) for phase, system, b, value in
             (("decode", "dali", 16, 2.0), ("decode", "dali", 32, 4.0), ("prefill", "ours", 8, 5.0))]  # fmt: skip
    dali, ours = mean_cells(cells)
    assert (dali.row, dali.simulated, dali.published) == ("decode over llama.cpp", 3.0, 3.97)
    assert dali.error == pytest.approx(3 / 3.97 - 1) and (ours.simulated, ours.published) == (5.0, None)
    assert published.PREFILL_OVER == {"llama.cpp": 7.62, "ktransformers": 3.80, "moe-lightning": 2.45, "hybrimoe": 2.0}
    assert published.DECODE_OVER == {"llama.cpp": 3.97, "ktransformers": 2.16, "moe-lightning": 1.48, "hybrimoe": 1.32}
    assert published.UNMODELLED not in RIVALS


def test_the_pool_is_a_share_or_what_fits(monkeypatch):
    monkeypatch.setattr(compare, "MIXTURES", MIXTURES)
    hardware = load_hardware("dali-pc")
    jobs = [MixtureJob(model="mixtral-8x7b", batch=batch, hardware=hardware, share=1.0) for batch in (1, 128)]
    assert jobs[1].pool_bytes < jobs[0].pool_bytes  # the cache takes its part
    small = replace(jobs[0], share=0.125)
    assert small.pool_bytes == int(0.125 * small.weights.experts) < jobs[0].pool_bytes


def test_other_choices():
    job = job_of("mixtral-8x7b", 32)
    assert changed(job, "share", 0.5).share == 0.5 and changed(job, "dtype", "int4").weights.unit < job.weights.unit
    fast = changed(job, "host_gb_s", 100.0)
    assert fast.hardware.host_rate("bfloat16") == 100e9 and job.hardware.host_rate("bfloat16") == 50e9
    slow, quick = (outcomes(each, ("llama.cpp",))["llama.cpp"] for each in (job, fast))
    assert speed(quick) > 1.2 * speed(slow)
    assert bound(fast).decode_tok_s > bound(job).decode_tok_s


def test_the_guard_goes_back_to_what_is_faster():
    job = job_of("mixtral-8x7b", 1)
    slow = replace(job, hardware=replace(job.hardware, link_bps=1e6, pageable_bps=1e6))
    found = outcomes(slow, ("ktransformers", "ours"))
    assert speed(found["ours"]) >= speed(found["ktransformers"])


def test_the_seeds_figures(monkeypatch):
    monkeypatch.setattr(seed, "MOST_RUNS", 1)
    monkeypatch.setattr(seed, "STEPS", 12)
    cells = list(seed.seed_cells())
    figures = {cell.row.split("/")[0] for cell in cells}
    assert figures <= set(seed.DEFINITIONS) == set(seed.VERDICTS) == set(seed.PUBLISHED)
    assert {"recall", "top-1", "weighted hits", "host share", "over static", "over layer split"} <= figures
    sources = {cell.row.split("/")[1] for cell in cells}
    assert {"tiny-moe, batch 1", "tiny-moe, batch 16"} <= sources and len(sources) == 8
    for source in sources:
        told = {(cell.row.split("/")[0], cell.system): cell.simulated for cell in cells if cell.row.endswith(source)}
        assert 0 < told["host share", "ours"] < told["host share", "static"] <= 1
        assert told["over static", "ours"] >= 1 and 0 < told["recall", "count"] < 1
        if source.startswith("synthetic"):
            assert told["recall", "predicted"] == pytest.approx(0.88, abs=0.08)  # 0.85 and what chance adds
    shares = {cell.system: cell.published for cell in cells if cell.row.startswith("host share/tiny")}
    assert shares == {"static": 0.70, "ours": 0.45}
    assert any("GLaM" in text for text in seed.VERDICTS.values())
