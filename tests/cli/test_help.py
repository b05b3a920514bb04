import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from dynajax import __version__
from dynajax.cli.app import VERBS, application
from dynajax.cli.generate import SamplingFlags
from dynajax.cli.options import EngineFlags
from dynajax.config import EngineConfig

ROOT = Path(__file__).parents[2]
MAIN = "import sys; sys.argv[0] = 'dynajax'; from dynajax.cli import main; main()"
SCRIPTS = {verb: f"{verb.replace('-', '_')}.py" for verb in VERBS}
HEAVY = ("jax", "jaxlib", "flax", "transformers", "orbax", "optax", "tokenizers", "numpy", "torch")


def ran(*argv):
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_script_lists_its_flags(verb):
    done = ran(f"scripts/{SCRIPTS[verb]}", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"Usage: {SCRIPTS[verb]} [OPTIONS]")
    assert "--json" in done.stdout
    assert "Exit codes: 0 ok" in done.stdout
    takes_a_model = verb in (
        "generate",
        "plan",
        "verify",
        "collect-stats",
        "train-predictors",
        "evaluate",
        "simulate",
        "bench",
    )
    for field in fields(EngineFlags) if takes_a_model else ():
        assert f"--{field.name.replace('_', '-')} " in done.stdout
    assert ("--vram-budget" in done.stdout) == takes_a_model


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("generate", "--help"),
        ("plan", "-h"),
        ("verify", "-h"),
        ("collect-stats", "-h"),
        ("train-predictors", "-h"),
        ("simulate", "-h"),
        ("bench", "-h"),
        ("--version",),
    ],
)
def test_help_loads_nothing_heavy(argv):
    code = f"""
import atexit, sys
sys.argv = ["dynajax", *{argv!r}]
atexit.register(lambda: print(*sorted(set({HEAVY!r}) & set(sys.modules)), file=sys.stderr))
from dynajax.cli import main
main()"""
    done = ran("-c", code)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert done.stdout


def test_the_installed_command_knows_the_verbs_and_its_version():
    done = ran("-c", MAIN, "--help")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    assert ran("-c", MAIN, "--version").stdout == f"dynajax {__version__}\n"
    done = ran("-c", MAIN)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = ran("-c", MAIN, "generat")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_engine_flags_are_the_engine_settings_with_the_same_defaults():
    assert EngineFlags().config() == EngineConfig()
    assert {field.name for field in fields(EngineFlags)} == {field.name for field in fields(EngineConfig)} | {"model"}


def test_sampling_flags_have_the_defaults_of_the_engine():
    from dynajax.sampling import SamplingParams

    assert SamplingFlags().params() == SamplingParams()
    assert SamplingFlags(stop=["a", "b"]).params().stop == ("a", "b")


def test_a_verb_alone_takes_no_verb():
    assert application("plan").registered_commands[0].name == "plan"
    assert len(application().registered_commands) == len(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_scripts_are_thin(verb):
    lines = (ROOT / "scripts" / SCRIPTS[verb]).read_text().splitlines()
    assert len(lines) <= 20
    assert f"python scripts/{SCRIPTS[verb]} --" in "\n".join(lines)
