"""PolicyConfig checks itself and can be spelt as NAME=VALUE."""

from dataclasses import FrozenInstanceError, asdict

import pytest

from dynajax.config import PolicyConfig, policy_from_settings
from dynajax.errors import UsageError


def test_nothing_set_is_the_default():
    assert policy_from_settings([]) == PolicyConfig()
    with pytest.raises(FrozenInstanceError):
        PolicyConfig().lam = 2.0  # ty: ignore[invalid-assignment]


def test_every_field_can_be_set_by_its_own_value():
    settings = [f"{name}={value}" for name, value in asdict(PolicyConfig()).items()]
    assert policy_from_settings(settings) == PolicyConfig()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["lam=2"], {"lam": 2}),
        ([" lam = 0.5 ", "decay=9e-1"], {"lam": 0.5, "decay": 0.9}),
        (["window_units=3", "window_s=0.001"], {"window_units": 3, "window_s": 0.001}),
        (["window_units=3", "window_units=none"], {"window_units": None}),
        (["swap_rule=paper", "ranking=flag"], {"swap_rule": "paper", "ranking": "flag"}),
        (["sparse_prefill=true", "record_scores=False"], {"sparse_prefill": True, "record_scores": False}),
        (["density=0.1", "lead=2", "skip_lead=1"], {"density": 0.1, "lead": 2, "skip_lead": 1}),
    ],
)
def test_settings(settings, expected):
    assert policy_from_settings(settings) == PolicyConfig(**expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lam", "--set takes NAME=VALUE, got 'lam'"),
        ("=1", "--set knows no ''"),
        ("lambda=1", "--set knows no 'lambda', only lam, decay, lead, skip_lead, "),
        ("lam=-1", "lam must be a number >= 0|lam must be a number between 0"),
        ("lam=much", "lam must be a number between 0 and 1e+06, got 'much'"),
        ("lam=nan", "lam must be a number"),
        ("lam=", "lam must be a number"),
        ("lam=none", "lam must be a number"),
        ("lam=true", "lam must be a number"),
        ("decay=1", "decay must be a number between 0 and 0.9999"),
        ("lead=1.5", "lead must be an integer"),
        ("skip_lead=2", "skip_lead must be an integer between 0 and 1, got 2"),
        ("window_s=-1", "window_s must be a number"),
        ("window_units=0.5", "window_units must be an integer"),
        ("keep_share=1.01", "keep_share must be a number between 0 and 1"),
        ("theta=2", "theta must be a number between 0 and 1"),
        ("density=0", "density must be > 0"),
        ("density=1.5", "density must be a number between 0 and 1"),
        ("err_scale=-0.1", "err_scale must be a number"),
        ("safety=80", "safety must be a number between 0 and 1"),
        ("ranking=best", "ranking must be one of score, flag, got 'best'"),
        ("swap_rule=true", "swap_rule must be one of gain, paper, got 'true'"),
        ("sparse_prefill=1", "sparse_prefill must be true or false, got 1"),
        ("record_scores=yes", "record_scores must be true or false, got 'yes'"),
    ],
)
def test_refused_settings(setting, message):
    with pytest.raises(UsageError) as caught:
        policy_from_settings([setting])
    assert any(str(caught.value).startswith(start) for start in message.split("|"))
