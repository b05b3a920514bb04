"""Builds the optional C++ library of `hostcompute`; everything else is in pyproject.toml.

    python setup.py build_ext --inplace

Without a compiler the build goes on without it, and `hostcompute` computes in NumPy. No flag names a CPU: the
library holds several instruction sets and picks one at run time.
"""

from glob import glob

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "hostcompute._native",
            sources=sorted(glob("hostcompute/src/*.cpp")),
            depends=sorted(glob("hostcompute/src/*.h")),
            language="c++",
            extra_compile_args=["-std=c++17", "-O3", "-pthread", "-fvisibility=hidden", "-g0"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
