"""The import table: which unit may import which, and which packages. Imports inside functions count too.

A unit is a module or package directly below `dynajax`, or one of the other top-level folders. Adding a unit
means adding a row here; a module that no row covers fails the test.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = ("dynajax", "hostcompute", "predictors", "scripts")  # `predictors` comes with the learned predictor
ROOT_EXPORTS = {"Engine": "engine", "Event": "engine", "Result": "engine", "SamplingParams": "sampling"}
STDLIB = sys.stdlib_module_names
CLOCKS_AND_CHANCE = frozenset(
    {"threading", "_thread", "concurrent", "multiprocessing", "asyncio", "time", "datetime", "random", "secrets"}
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a unit may import: `ours` units, `third` party packages; `never` forbids standard modules too."""

    ours: frozenset[str] = frozenset()
    third: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()


def row(ours: str = "", third: str = "", never: frozenset[str] = frozenset()) -> Row:
    return Row(ours=frozenset(ours.split()), third=frozenset(third.split()), never=never)


RUN_TIME = (
    "policy budget quant ops models checkpoint bundles hostcompute hugepages pool staging transfer memory programs text"
)
ENGINE = (
    f"config plan sampling trace routing_trace timeline scheduler worker mover predictors model_folder chat {RUN_TIME}"
)
JAX_STACK = "jax flax numpy ml_dtypes"

# Everybody but `hostcompute` may import `errors`; every unit may import itself.
TABLE = {
    "dynajax": row("engine sampling"),  # the lazy exports of dynajax/__init__.py
    "errors": row(),
    "config": row("plan", "numpy"),
    "plan": row("config", "numpy"),
    "policy": row("config plan", "numpy scipy", never=CLOCKS_AND_CHANCE | {"logging"}),
    "budget": row("config", "numpy"),
    "quant": row("config", "numpy ml_dtypes"),
    "trace": row("policy plan config budget checkpoint", "numpy"),
    "routing_trace": row("trace checkpoint", "numpy"),
    "timeline": row("checkpoint"),
    "sim": row("policy plan config budget trace routing_trace", "numpy"),
    "sampling": row("config", "numpy"),
    "ops": row("config quant hostcompute.ffi", "jax numpy"),  # config: the Activation record only
    "models": row("ops config", JAX_STACK),
    "checkpoint": row("config quant", "numpy ml_dtypes orbax safetensors gguf huggingface_hub"),
    "convert": row("checkpoint config predictors text vocabulary", "numpy ml_dtypes safetensors gguf"),
    "model_folder": row("checkpoint convert config"),
    "bundles": row("config quant checkpoint", "numpy ml_dtypes orbax safetensors gguf"),
    "memory": row("", "jax"),
    "programs": row("ops models config predictors quant", "jax flax numpy"),
    "text": row("config checkpoint vocabulary", "numpy tokenizers"),
    "vocabulary": row("config checkpoint", "numpy tokenizers"),
    "chat": row("config checkpoint text", "jinja2"),
    "fetch": row("config checkpoint convert model_folder predictors"),
    "hugepages": row("bundles hostcompute", "jax numpy"),
    "pool": row("plan config bundles ops programs hostcompute hugepages budget policy.costs", "jax numpy ml_dtypes"),
    "staging": row("", "jax numpy"),
    "transfer": row("plan config bundles ops programs hostcompute budget policy.costs pool staging", "jax numpy"),
    "worker": row("", "jax"),
    "scheduler": row("plan config policy pool transfer programs worker", "jax numpy"),
    "mover": row("pool transfer programs bundles worker", "jax numpy"),
    "engine": row(ENGINE, JAX_STACK),
    "reference": row("", "numpy"),
    "verify": row("checkpoint config engine model_folder plan reference text", "jax numpy"),
    "testing": row("config models checkpoint quant reference hostcompute.packed", f"{JAX_STACK} safetensors"),
    "testing.families": row("", "numpy ml_dtypes safetensors"),  # shares nothing with what it is to test
    "training": row("config models ops checkpoint", f"{JAX_STACK} optax orbax safetensors tokenizers"),
    "cli": row(
        "dynajax engine sampling sim plan trace timeline predictors config budget checkpoint convert model_folder "
        "profiling memory text chat",
        "typer rich numpy",
    ),
    "cli.residency": row("trace checkpoint", "typer numpy matplotlib"),
    "cli.simulate": row("sim checkpoint", "typer"),
    "cli.simulate_tables": row("sim"),
    "cli.simulate_trace": row("sim trace checkpoint config model_folder", "matplotlib"),
    "cli.simulate_dali": row("sim"),
    "cli.simulate_imports": row("sim routing_trace checkpoint convert", "numpy pyarrow"),
    "cli.simulate_mixtures": row("sim trace routing_trace policy checkpoint config model_folder"),
    "cli.fetch": row("fetch config", "typer"),
    "cli.training": row("training config", "typer"),
    "collecting": row("checkpoint config engine text hostcompute.reference predictors.calibration", "numpy"),
    "evaluating": row("config engine", "numpy"),
    "cli.evaluate": row("collecting evaluating checkpoint config model_folder", "typer"),
    "cli.collecting": row("collecting checkpoint config model_folder", "typer numpy"),
    "predictor_training": row("collecting checkpoint config engine text predictors", "jax numpy orbax matplotlib"),
    "cli.predictors": row("predictor_training collecting checkpoint config model_folder", "typer"),
    "cli.verify": row("verify", "typer"),
    "profiling": row(
        "bundles checkpoint config engine hostcompute ops plan policy pool sim staging testing timeline trace",
        "jax numpy",
    ),
    "cli.profiling": row("profiling sim checkpoint", "typer"),
    "benching": row(
        "bundles budget checkpoint config engine hostcompute policy predictors profiling", "jax numpy ml_dtypes"
    ),
    "benching.worker": row("", "numpy"),  # runs in the Python of other engines
    "cli.bench": row("benching checkpoint config hostcompute model_folder", "typer"),
    "hostcompute": row("", "numpy"),
    "hostcompute.callback": row("hostcompute", "jax numpy"),
    "hostcompute.ffi": row("hostcompute", "jax numpy"),
    "predictors": row("config trace models ops bundles quant checkpoint hostcompute.ffi", f"{JAX_STACK} optax orbax"),
    "scripts": row("dynajax cli engine sampling sim plan trace predictors config budget checkpoint profiling", "typer"),
}


# --- reading imports ----------------------------------------------------------------------------------


def modules_of(root: Path) -> dict[str, Path]:
    """{dotted name: file} of every Python file below the top-level folders that exist."""
    files = [path for top in TOP_LEVEL for path in sorted((root / top).rglob("*.py"))]
    return {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in files}


def imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything `source` imports, `import_module("...")` with a literal included.

    `from a import b` gives `a.b`, which may name a module or something inside one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, argument.value


def below_root(name: str) -> str:
    """The dotted name without `dynajax.`; a lazy export counts as the module it lives in.

    `dynajax.policy.costs` -> `policy.costs`; `dynajax.Engine` -> `engine`; `dynajax` stays, as do other folders.
    """
    below = name.removeprefix("dynajax.")
    return "dynajax" if below.startswith("__") else ROOT_EXPORTS.get(below, below)


def unit_of(module: str) -> str:
    """The unit of a module: the longest prefix that has a row, `hostcompute.ffi` before `hostcompute`."""
    parts = below_root(module).split(".")
    return next((prefix for n in (2, 1) if (prefix := ".".join(parts[:n])) in TABLE), parts[0])


def is_allowed(name: str, unit: str) -> bool:
    """Whether a module of `unit` may import the dotted name `name`."""
    allowed, top, folder = TABLE[unit], name.split(".")[0], unit.split(".")[0]
    if top in allowed.never:
        return False
    if top not in TOP_LEVEL:
        return top in STDLIB or top in allowed.third
    entries = allowed.ours | {folder} | ({"errors"} if folder != "hostcompute" else set())
    below = below_root(name)
    return any(below == entry or below.startswith(f"{entry}.") for entry in entries)


def violations_of(root: Path) -> list[str]:
    """One line for every import the table does not allow, and for every module it does not know."""
    found = []
    for module, path in modules_of(root).items():
        unit, where = unit_of(module), path.relative_to(root)
        if unit not in TABLE:
            found.append(f"{where}: unit {unit!r} has no row in the import table")
            continue
        for line, name in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            if not is_allowed(name, unit):
                found.append(f"{where}:{line}: {unit} must not import {name}")
    return found


# --- tests --------------------------------------------------------------------------------------------


def test_imports_follow_the_table():
    assert violations_of(ROOT) == []


@pytest.mark.parametrize(
    ("where", "source", "expected"),
    [
        ("dynajax/policy/costs.py", "import numpy as np\nfrom dynajax.plan import Swap", []),
        ("dynajax/policy/costs.py", "import jax", ["1: policy must not import jax"]),
        ("dynajax/policy/costs.py", "import numpy.random", []),
        ("dynajax/policy/costs.py", "def f():\n    from time import sleep", ["2: policy must not import time.sleep"]),
        ("dynajax/policy/costs.py", "from ..engine import core", ["1: policy must not import dynajax.engine.core"]),
        ("dynajax/pool.py", "from dynajax.policy.costs import Costs\nfrom dynajax.policy import costs", []),
        ("dynajax/pool.py", "from dynajax.policy import swaps", ["1: pool must not import dynajax.policy.swaps"]),
        ("dynajax/sim.py", "from dynajax import Engine", ["1: sim must not import dynajax.Engine"]),
        ("dynajax/ops/ffn.py", "from hostcompute import ffi\nimport hostcompute.ffi", []),
        ("dynajax/ops/ffn.py", "import hostcompute", ["1: ops must not import hostcompute"]),
        ("dynajax/cli/app.py", "from dynajax import Engine, __version__\nfrom dynajax.errors import DynajaxError", []),
        ("dynajax/cli/app.py", "__import__('jax')", ["1: cli must not import jax"]),
        ("hostcompute/library.py", "from hostcompute.reference import ffn\nfrom . import reference", []),
        ("hostcompute/library.py", "import dynajax.errors", ["1: hostcompute must not import dynajax.errors"]),
        ("hostcompute/callback.py", "import jax\nimport hostcompute.library", []),
        ("hostcompute/ffi.py", "import_module('jaxlib')", ["1: hostcompute.ffi must not import jaxlib"]),
        ("scripts/plan.py", "from dynajax.cli import main", []),
        ("scripts/plan.py", "import dynajax.training", ["1: scripts must not import dynajax.training"]),
        ("dynajax/cli/training.py", "from dynajax.training import tiny\nfrom dynajax.errors import UsageError", []),
        ("dynajax/new.py", "", [" unit 'new' has no row in the import table"]),
    ],
)
def test_the_check_finds_what_it_must_and_no_more(tmp_path, where, source, expected):
    path = tmp_path / where
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert violations_of(tmp_path) == [f"{where}:{problem}" for problem in expected]


def test_policy_draws_no_numpy_random_numbers():
    for path in sorted((ROOT / "dynajax" / "policy").rglob("*.py")):
        attributes = {
            ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
        }
        assert not {name for name in attributes if name.startswith(("np.random", "numpy.random"))}, path


def test_top_level_folders_are_the_fixed_ones():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert {"dynajax", "hostcompute"} <= packages <= {"dynajax", "hostcompute", "predictors"}
    for needed in ("scripts", "tests", "docs", "pyproject.toml", "README.md", "Makefile", ".ci/run"):
        assert (ROOT / needed).exists(), needed


@pytest.mark.parametrize("module", ["dynajax", "dynajax.policy", "dynajax.config", "dynajax.budget", "dynajax.cli"])
def test_light_modules_do_not_load_jax(module):
    heavy = ("jax", "jaxlib", "flax", "transformers", "orbax", "tokenizers", "torch")
    code = f"import sys, {module}; print(*[name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_lazy_exports_have_a_home():
    import dynajax

    assert set(dynajax.__all__) == {*ROOT_EXPORTS, "__version__"}
    assert dynajax.SamplingParams.__module__ == "dynajax.sampling"
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = dynajax.Motor
