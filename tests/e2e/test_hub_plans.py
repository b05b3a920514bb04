"""`plan` of the published ReLULLaMA shapes: the sizes of models whose weights are never asked for.

The expected sizes are those of the paper's models as notes/neuron_offloading.md, section 6.2, derives them.
"""

import json
from dataclasses import dataclass

import jsonschema
import pytest

from dynajax.checkpoint.aliases import HUB
from tests.e2e.relullama import ROOT, Machine, published_config
from tests.hub_server import HubServer

HALF = ("--dtype", "float16", "--host-dtype", "float16", "--json")
FROM_4_5_BIT = 16 / 4.5  # the 70B row of the table is for 4.5 bit a weight


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of the table in bytes of float16, and the shape it belongs to."""

    ffn: float
    attention: float
    tables: float  # embedding and head
    kv_per_token: float
    budget: str
    shape: tuple[int, ...]  # layers, hidden, ffn, heads, kv heads, context
    dtype: str = "float32"  # of the files

    def config(self) -> dict:
        names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                 "max_position_embeddings")  # fmt: skip
        sizes = dict(zip(names, self.shape, strict=True))
        return published_config(**sizes, vocab_size=32_000, torch_dtype=self.dtype)


MODELS = {
    "relullama-7b": Published(
        ffn=8.66e9, attention=4.29e9, tables=0.52e9, kv_per_token=524e3, budget="11GiB",
        shape=(32, 4096, 11008, 32, 32, 2048),
    ),
    "relullama-13b": Published(
        ffn=16.99e9, attention=8.39e9, tables=0.66e9, kv_per_token=819e3, budget="24GiB",
        shape=(40, 5120, 13824, 40, 40, 2048),
    ),
    "relullama-70b": Published(
        ffn=31.71e9 * FROM_4_5_BIT, attention=6.79e9 * FROM_4_5_BIT, tables=0.29e9 * FROM_4_5_BIT, kv_per_token=328e3,
        budget="80GiB", shape=(80, 8192, 28672, 64, 8, 4096), dtype="float16",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Repositories of a config and shards that only pretend to hold something."""
    root = tmp_path_factory.mktemp("shapes")
    for alias, model in MODELS.items():
        (root / alias).mkdir()
        (root / alias / "config.json").write_text(json.dumps(model.config()))
        (root / alias / "pytorch_model-00001-of-00001.bin").write_text("no weights")
        index = {"weight_map": {"model.norm.weight": "pytorch_model-00001-of-00001.bin"}}
        (root / alias / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        (root / alias / "tokenizer.model").write_text("no tokenizer")
    with HubServer({HUB[alias]: root / alias for alias in MODELS}) as hub:
        yield hub, Machine.at(root / "home", hub.url)


def near(size, expected):
    return size == pytest.approx(expected, rel=0.02)


def check_device(plan, model):
    """What no budget and no host mode changes."""
    rules = json.loads((ROOT / "docs" / "schemas" / "plan.json").read_text())
    jsonschema.Draft202012Validator(rules).validate(plan)
    assert near(plan["device"]["dense"], model.attention + model.tables / 2)
    assert near(plan["device"]["kv"] / model.shape[-1], model.kv_per_token)
    assert near(plan["host"]["embed"], model.tables / 2)
    assert plan["units"]["total"] == model.shape[0] * model.shape[2]


@pytest.mark.parametrize(
    "alias", ["relullama-13b", *(pytest.param(f"relullama-{size}", marks=pytest.mark.slow) for size in ("7b", "70b"))]
)
def test_sizes_of_the_published_models(shapes, alias):
    hub, machine = shapes
    model = MODELS[alias]
    hub.forget()
    argv = ("--model", alias, "--vram-budget", model.budget, "--host-mode", "threads")
    plan = machine.run("plan", *argv, *HALF).json
    check_device(plan, model)
    assert near(plan["host"]["units"], model.ffn)
    assert plan["device"]["pool"] <= plan["plan_bytes"] <= plan["budget_bytes"]
    assert 0.3 < plan["units"]["share"] < 1
    assert [seen.path for seen in hub.files] == [f"{HUB[alias]}/config.json"]
    hub.forget()
    assert machine.run("plan", *argv, *HALF, "--offline").json == plan
    assert hub.requests == 0


@pytest.mark.slow
@pytest.mark.parametrize("alias", MODELS)
def test_whole_token_programs_of_the_published_models(shapes, alias):
    """The host mode that `auto` chooses: one program of all layers, compiled from shapes alone."""
    hub, machine = shapes
    model = MODELS[alias]
    plan = machine.run("plan", "--model", alias, "--vram-budget", "1000GiB", "--policy", "none", *HALF).json
    check_device(plan, model)
    assert near(plan["host"]["units"], model.ffn)
    assert plan["device"]["pool"] == 0
    assert {seen.path.split("/")[-1] for seen in hub.files} <= {"config.json"}
