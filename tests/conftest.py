"""What every test relies on: the CPU backend, no silent rank promotion, and no GPU test without a GPU."""

import atexit
import gc
import importlib.util
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

# Tests compile far more than they run. The last flag alone is two thirds less time: loops fused without MLIR.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
NO_EMITTERS = "xla_cpu_use_fusion_emitters"


def _quick_flags() -> str:
    """At a flag that it does not know XLA aborts, and a newer one does not know this. The name of a flag ends with a
    zero in jaxlib's library; of one that is gone it does not."""
    package = importlib.util.find_spec("jaxlib")
    library = Path(package.origin).with_name("libjax_common.so") if package and package.origin else None
    if library is None or not library.is_file():
        return QUICK
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return f"{QUICK} --{NO_EMITTERS}=false" if text.find(NO_EMITTERS.encode() + b"\0") >= 0 else QUICK


# By environment, so that it is set before jax is imported and holds in child processes too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
if os.environ["JAX_PLATFORMS"] == "cpu" and "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = _quick_flags()
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # both processes of a run, and every child, compile a program once
    _compiled = tempfile.mkdtemp(prefix="dynajax-tests-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
if "DYNAJAX_CACHE" not in os.environ:  # whoever runs the tests keeps their own models and packed weights as they are
    _cache = tempfile.mkdtemp(prefix="dynajax-tests-cache-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["DYNAJAX_CACHE"] = _cache
if "jax" in sys.modules:
    raise pytest.UsageError(
        "a pytest plugin imported jax before tests/conftest.py could set its platform: use -p no:NAME"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` unless jax has a CUDA device; jax is imported only if such a test was chosen."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _cuda_is_there():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or JAX_PLATFORMS does not name it"))


def _cuda_is_there() -> bool:
    import jax

    return jax.default_backend() == "gpu"


@pytest.fixture(scope="module", autouse=True)
def only_new_garbage() -> None:
    """Every engine collects garbage when it opens. It need not look through what was there before this module: all
    that was imported and collected, and the traces that jax keeps. By the end of a run that takes a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """os.environ without the variables that steer colours, jax or this program; undone after the test."""
    for name in list(os.environ):
        if name.startswith(("XLA_PYTHON_CLIENT_", "CUDA_", "JAX_")) or name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
            monkeypatch.delenv(name)
    return os.environ
