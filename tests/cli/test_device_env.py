import os

import pytest

from dynajax.cli import device_env
from dynajax.errors import StorageError, UsageError

FAKE = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
{body}
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch, bare_environment):
    """install(body) puts a program of that name on PATH; -> the file that lists its calls."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(body):
        path = tmp_path / "nvidia-smi"
        path.write_text(FAKE.format(body=body))
        path.chmod(0o755)
        return tmp_path / "calls"

    yield install
    for name in (*device_env.OWN_CHOICE, *device_env.KEEPING):
        os.environ.pop(name, None)


def pool():
    return os.environ.get(device_env.FRACTION), os.environ.get(device_env.PREALLOCATE)


def test_an_absolute_budget_becomes_a_share_of_the_device(nvidia_smi):
    calls = nvidia_smi("echo 24576, 3; echo 8192, 8000")
    device_env.configure("8GiB")
    assert pool() == (f"{8 / 24 + device_env.SURPLUS:.6f}", "true")
    assert calls.read_text().split() == list(device_env.QUERY[1:])


@pytest.mark.parametrize("budget", ["900KiB", "7GiB", 2**30 + 1])
def test_the_share_holds_the_budget_and_little_more(nvidia_smi, budget):
    nvidia_smi("echo 24564, 24000")
    device_env.configure(budget)
    surplus_bytes = float(pool()[0]) * 24564 * 2**20 - device_env.parse_budget(budget)
    assert 0.029 < surplus_bytes / (24564 * 2**20) < 0.031


def test_almost_the_whole_device_is_the_most(nvidia_smi):
    nvidia_smi("echo 24576, 24576")
    device_env.configure(f"{24576 * 2**20 - 1}B")
    assert pool() == (f"{device_env.MOST:.6f}", "true")


@pytest.mark.parametrize("budget", ["auto", "0.85", 0.5])
@pytest.mark.parametrize(("free_mib", "fraction"), [(24576, "0.980000"), (18432, "0.740000"), (12288, "0.490000")])
def test_auto_and_shares_let_jax_use_what_is_free(nvidia_smi, budget, free_mib, fraction):
    nvidia_smi(f"echo 24576, {free_mib}")
    device_env.configure(budget)
    assert pool() == (fraction, "true")


@pytest.mark.parametrize(("budget", "free_mib"), [("24GiB", 24000), ("1TiB", 24000), ("auto", 200), ("0.85", 0)])
def test_nothing_is_set_for_what_no_device_has(nvidia_smi, budget, free_mib):
    nvidia_smi(f"echo 24576, {free_mib}")
    device_env.configure(budget)
    assert pool() == (None, None)


@pytest.mark.parametrize("budget", ["8GiB", "auto"])
@pytest.mark.parametrize(
    "body", ["exit 9", "echo No devices were found", "echo", "echo '[N/A], [N/A]'", "echo 24576", "echo 0, 0"]
)
def test_a_query_without_an_answer_changes_nothing(nvidia_smi, body, budget):
    nvidia_smi(body)
    device_env.configure(budget)
    assert pool() == (None, None)


def test_without_the_program_nothing_is_set(nvidia_smi):
    device_env.configure("8GiB")
    assert pool() == (None, None)


@pytest.mark.parametrize("name", device_env.OWN_CHOICE)
def test_a_choice_of_the_user_stands(nvidia_smi, monkeypatch, name):
    calls = nvidia_smi("echo 24576, 24000")
    monkeypatch.setenv(name, "0.5")
    device_env.configure("8GiB")
    assert [os.environ.get(other) for other in device_env.OWN_CHOICE if other != name] == [None, None]
    assert os.environ[name] == "0.5"
    assert not calls.exists()


@pytest.mark.parametrize(("platforms", "asked"), [("cpu", False), ("cpu,cuda", False), ("cuda,cpu", True), ("", True)])
def test_the_cpu_backend_is_not_asked_about_gpus(nvidia_smi, monkeypatch, platforms, asked):
    calls = nvidia_smi("echo 24576, 24000")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    device_env.configure("8GiB")
    assert (pool() != (None, None)) == calls.exists() == asked


def test_the_first_visible_device_is_the_one_asked(nvidia_smi, monkeypatch):
    calls = nvidia_smi("echo 16384, 1024")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert device_env.device_bytes() == (2**34, 2**30)
    assert "--id=2" in calls.read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_env.device_bytes() is None


def test_a_malformed_budget_is_a_usage_error(nvidia_smi):
    with pytest.raises(UsageError, match="has no unit"):
        device_env.configure("8")


def test_programs_are_kept_in_the_cache_by_kind_of_cpu(bare_environment, monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAJAX_CACHE", str(tmp_path))
    for name in (device_env.KEPT, *device_env.KEEPING):  # so that they are undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    device_env.keep_programs()
    folder = os.environ[device_env.KEPT]
    assert (
        folder.startswith(f"{tmp_path}/programs/") and os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] == "-1"
    )
    monkeypatch.setattr(device_env.Path, "read_text", lambda *_, **__: "flags : sse2 avx9\n")
    monkeypatch.delenv(device_env.KEPT)
    device_env.keep_programs()
    assert os.environ[device_env.KEPT] != folder


def test_the_users_own_place_for_programs_is_left_alone(bare_environment, monkeypatch):
    monkeypatch.setenv(device_env.KEPT, "/elsewhere")
    device_env.keep_programs()
    assert os.environ[device_env.KEPT] == "/elsewhere" and not set(device_env.KEEPING) & set(os.environ)


def test_without_a_home_nothing_is_kept(bare_environment, monkeypatch):
    def no_home():
        raise StorageError("no home")

    monkeypatch.setattr("dynajax.checkpoint.places.cache_folder", no_home)
    device_env.keep_programs()
    assert device_env.KEPT not in os.environ
