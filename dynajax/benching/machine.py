"""What a reader needs to place a figure: the machine, the commit and the command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from hostcompute import default_threads

CPUS = Path("/sys/devices/system/cpu")
ROOT = Path(__file__).parents[2]
FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "asimd", "sve")  # told of
SETTINGS = ("OMP_", "JAX_", "XLA_", "HOSTCOMPUTE_", "MKL_", "OPENBLAS_", "MALLOC_")  # of the environment, that matter
UNKNOWN_CACHE = 32 << 20  # where the system does not say


def last_level_cache_bytes() -> int:
    """The largest cache of CPU 0; 32 MiB where the system does not say."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [path.read_text().strip() for path in CPUS.glob("cpu0/cache/index*/size")]
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=UNKNOWN_CACHE)


def machine() -> dict[str, Any]:
    """The fingerprint that every result begins with. `commit` ends with "+changes" if a tracked file was changed.

    `shared` says that a hypervisor is there, and so perhaps others; `load_average` is that of the last minute.
    """
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.partition(":") for line in reversed(lines)]
    facts = {name.strip(): value.strip() for name, _, value in told}  # of the first CPU
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return {
        "date": date.today().isoformat(),
        "command": command(),
        "machine": facts.get("model name") or platform.processor() or platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "cores": default_threads(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cpu_flags": [name for name in FLAGS if name in flags],
        "governor": _governor(),
        "shared": "hypervisor" in flags,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "commit": commit(),
    }


def command() -> str:
    """The command line of this process as one could type it, with the settings of the environment that matter."""
    settings = [f"{name}={shlex.quote(os.environ[name])}" for name in sorted(os.environ) if name.startswith(SETTINGS)]
    words = sys.orig_argv[1:]
    installed = bool(words) and Path(words[0]).name == "dynajax"
    words = ["dynajax", *words[1:]] if installed else ["python", *words]
    return " ".join([*settings, shlex.join(words)])


def commit(root: Path = ROOT) -> str:
    """Of the checkout that this file is in; "unknown" where there is none."""
    git = ("git", "-C", str(root))
    if not (root / ".git").exists():  # installed: the folder may lie in a checkout of something else
        return "unknown"
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if changed.returncode else "")


def free_bytes() -> int:
    """Memory that a process may still take."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _governor() -> str | None:
    """How the clock is chosen; None where the system does not say, as in most virtual machines."""
    path = CPUS / "cpu0/cpufreq/scaling_governor"
    return path.read_text().strip() if path.exists() else None
