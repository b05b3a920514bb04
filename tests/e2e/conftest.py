"""ReLULLaMA-13B in small, as its two layouts and its predictors, on a hub that real commands are pointed at."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.relullama import PREDICTOR_REPO, REPO, Machine, write_model, write_predictors
from tests.hub_server import HubServer


@dataclass(frozen=True)
class Repositories:
    """Folders with equal weights, and the predictors' files."""

    safetensors: Path
    pickles: Path
    predictors: Path


@pytest.fixture(scope="session")
def repositories(tmp_path_factory) -> Repositories:
    root = tmp_path_factory.mktemp("repositories")
    return Repositories(
        write_model(root / "safetensors", pickles=False),
        write_model(root / "pickles", pickles=True),
        write_predictors(root / "predictors"),
    )


@pytest.fixture
def hub(repositories) -> Iterator[HubServer]:
    """The model as pickles, which is its main revision as published, and as safetensors in the revision `safe`."""
    model = {"main": repositories.pickles, "safe": repositories.safetensors}
    with HubServer({REPO: model, PREDICTOR_REPO: repositories.predictors}) as server:
        yield server


@pytest.fixture
def machine(hub, tmp_path) -> Machine:
    return Machine.at(tmp_path / "home", hub.url)
