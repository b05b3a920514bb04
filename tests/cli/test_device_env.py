import os

import pytest

from dynajax.cli import device_env
from dynajax.errors import UsageError

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
    for name in device_env.OWN_CHOICE:
        os.environ.pop(name, None)


def pool():
    return os.environ.get(device_env.FRACTION), os.environ.get(device_env.PREALLOCATE)


def test_an_absolute_budget_becomes_a_share_of_the_device(nvidia_smi):
    calls = nvidia_smi("echo 24576; echo 8192")
    device_env.configure("8GiB")
    assert pool() == ("0.333333", "true")
    assert calls.read_text().split() == list(device_env.QUERY[1:])


@pytest.mark.parametrize("budget", ["900KiB", "7GiB", 2**30 + 1])
def test_the_share_never_exceeds_the_budget(nvidia_smi, budget):
    nvidia_smi("echo 24564")
    device_env.configure(budget)
    wanted = device_env.parse_budget(budget)
    assert 0.9 * wanted < float(pool()[0]) * 24564 * 2**20 <= wanted


@pytest.mark.parametrize("budget", ["auto", "0.85", "24GiB", "1TiB"])
def test_nothing_is_set_for_shares_and_for_budgets_no_device_has(nvidia_smi, budget):
    nvidia_smi("echo 24576")
    device_env.configure(budget)
    assert pool() == (None, None)


@pytest.mark.parametrize("body", ["exit 9", "echo No devices were found", "echo", "echo '[N/A]'"])
def test_a_query_without_an_answer_changes_nothing(nvidia_smi, body):
    nvidia_smi(body)
    device_env.configure("8GiB")
    assert pool() == (None, None)


def test_without_the_program_nothing_is_set(nvidia_smi):
    device_env.configure("8GiB")
    assert pool() == (None, None)


@pytest.mark.parametrize("name", device_env.OWN_CHOICE)
def test_a_choice_of_the_user_stands(nvidia_smi, monkeypatch, name):
    calls = nvidia_smi("echo 24576")
    monkeypatch.setenv(name, "0.5")
    device_env.configure("8GiB")
    assert [os.environ.get(other) for other in device_env.OWN_CHOICE if other != name] == [None, None]
    assert os.environ[name] == "0.5"
    assert not calls.exists()


def test_the_cpu_backend_is_not_asked_about_gpus(nvidia_smi, monkeypatch):
    calls = nvidia_smi("echo 24576")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    device_env.configure("8GiB")
    assert pool() == (None, None)
    assert not calls.exists()


def test_the_first_visible_device_is_the_one_asked(nvidia_smi, monkeypatch):
    calls = nvidia_smi("echo 16384")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert device_env.total_bytes() == 2**34
    assert "--id=2" in calls.read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_env.total_bytes() is None


def test_a_malformed_budget_is_a_usage_error(nvidia_smi):
    with pytest.raises(UsageError, match="has no unit"):
        device_env.configure("8")
