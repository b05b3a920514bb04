import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest

from dynajax.cli.app import application
from dynajax.cli.errors import run
from dynajax.config import ModelSpec
from dynajax.testing import make_checkpoint

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "dynajax" / "assets" / "tiny-relullama"
SPEC = ModelSpec(
    layers=3, hidden=32, ffn=64, heads=2, kv_heads=2, head_dim=16, vocab=4096, max_positions=512, bos_id=0, eos_ids=(0,)
)


@pytest.fixture(scope="session")
def bare_model(tmp_path_factory) -> Path:
    """A small random model without a tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "bare", SPEC)


@pytest.fixture(scope="session")
def model(bare_model) -> Path:
    """The same with the tokenizer that ships with the repository."""
    folder = shutil.copytree(bare_model, bare_model.with_name("small"))
    for path in ASSETS.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    return folder


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    def json(self, schema: str) -> dict:
        """The object on the only line of stdout, checked against docs/schemas."""
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        value = json.loads(self.out)
        rules = json.loads((ROOT / "docs" / "schemas" / f"{schema}.json").read_text())
        jsonschema.Draft202012Validator.check_schema(rules)
        jsonschema.Draft202012Validator(rules).validate(value)
        return value


@pytest.fixture
def command(capfd):
    """command("plan", "--json", ...) runs the command in this process."""

    def execute(verb: str, *argv: object) -> Ended:
        code = run(application(verb), [str(word) for word in argv])
        return Ended(code, *capfd.readouterr())

    return execute
