"""Builds the optional C++ libraries of `hostcompute`; everything else is in pyproject.toml.

    python setup.py build_ext --inplace

Without a compiler the build goes on without them, and `hostcompute` computes in NumPy. `_ffi` is built against the
headers of the jaxlib that is there: a jaxlib older than that refuses it when it is used. No flag names a CPU: the
kernels are there for several instruction sets, and one is picked at run time.
"""

from glob import glob
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup


def extension(name: str, folder: str, *, depends: list[str], flags: list[str]) -> Extension:
    return Extension(
        f"hostcompute.{name}",
        sources=sorted(glob(f"hostcompute/{folder}/*.cpp")),
        depends=depends,
        language="c++",
        extra_compile_args=["-std=c++17", "-O3", "-pthread", "-fvisibility=hidden", "-g0", *flags],
        extra_link_args=["-pthread"],
        optional=True,
    )


def ffi_headers() -> Path | None:
    """Where `jax.ffi.include_dir()` is, without importing jax, which a build environment need not have."""
    spec = find_spec("jaxlib")
    folders = [Path(folder) / "include" for folder in spec.submodule_search_locations or ()] if spec else []
    return next((folder for folder in folders if (folder / "xla" / "ffi" / "api" / "ffi.h").exists()), None)


headers = sorted(glob("hostcompute/src/*.h"))
ext_modules = [extension("_native", "src", depends=headers, flags=[])]
if (jaxlib_headers := ffi_headers()) is None:
    print("hostcompute._ffi is left out: no jaxlib with its headers here (needs jaxlib >= 0.10.2)")  # noqa: T201
else:
    headers = [*headers, *sorted(glob("hostcompute/ffi_src/*.h"))]
    flags = ["-isystem", str(jaxlib_headers)]  # without the warnings of headers that are not ours
    ext_modules.append(extension("_ffi", "ffi_src", depends=headers, flags=flags))

setup(ext_modules=ext_modules)
