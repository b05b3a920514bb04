"""A model folder as a repository, and a hub on this machine that serves it."""

import pytest
from huggingface_hub import constants

from dynajax.checkpoint import download
from dynajax.config import ModelSpec
from dynajax.testing import make_checkpoint
from tests.hub_server import REPO, HubServer

SPEC = ModelSpec(
    layers=4, hidden=64, ffn=256, heads=2, kv_heads=2, head_dim=32, vocab=512, max_positions=64, bos_id=0, eos_ids=(0,)
)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """One file of weights, about 1.2 MiB, a tokenizer, and what is in a repository for other programs."""
    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "model", SPEC)
    for name in ("tokenizer.json", "vocab.json", "README.md", "flax_model.msgpack", "consolidated.safetensors"):
        (folder / name).write_text(f"this is {name}")
    return folder


@pytest.fixture
def on_hub(monkeypatch, tmp_path):
    """on_hub(folder) -> a running hub that serves it as maker/some-model to this process, and an empty cache."""
    servers = []

    def start(folder, **revisions):
        server = HubServer({REPO: {"main": folder, **revisions}}).__enter__()
        servers.append(server)
        point_at(monkeypatch, server.url, tmp_path / "hub")
        return server

    yield start
    for server in servers:
        server.__exit__()


def point_at(monkeypatch, url, cache):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "RETRY_S", (0.0, 0.0))
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    monkeypatch.setenv("DYNAJAX_CACHE", str(cache.parent / "dynajax"))
