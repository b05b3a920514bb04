"""What the tests of this folder run, and how an engine is given wrong weights."""

from dynajax.checkpoint import Checkpoint
from dynajax.config import EngineConfig
from dynajax.verify import Report, Settings, verify

FILE = "model.safetensors"
THREADS = {"dtype": "float32", "host_mode": "threads"}
HOST = {**THREADS, "policy": "none"}


def checked(model, *, against=None, tolerance=None, **config) -> Report:
    against = None if against is None else str(against)
    settings = Settings(model=str(model), config=EngineConfig(**config), against=against, tolerance=tolerance)
    return verify(settings, lambda stage, done, total: None, lambda run: None)


def damage_reads(monkeypatch, method, layer, choose, change):
    """`choose(result)` of what `Checkpoint.method` gives a loader of this layer is changed in place."""
    read = getattr(Checkpoint, method)

    def damaged(self, *args, **more):
        result = read(self, *args, **more)
        if layer is None or args[0] == layer:
            change(choose(result, *args, **more))
        return result

    monkeypatch.setattr(Checkpoint, method, damaged)
