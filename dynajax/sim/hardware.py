"""A machine in figures, and the files that describe one."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from dynajax.errors import StorageError, UsageError

VERSION = 1
NAMED = ("pc-high", "pc-low", "pc-low-12gb", "dali-pc")
_MOST_BYTES = 2**20  # of a file
_COUNTS = ("device_bytes", "reserved_bytes", "cores")


PROGRAMS = ("attend", "score", "rank", "hot", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a kind of program takes: seconds at some sizes in bytes, straight lines between them and behind the last.

    Example: sizes (0, 100), seconds (1, 3): 2 s for 50 bytes, 5 s for 200.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not (isinstance(self.sizes, Sequence) and isinstance(self.seconds, Sequence)):
            raise UsageError("a program has lists of sizes and seconds")
        if not len(self.sizes) == len(self.seconds) >= 2:
            raise UsageError("a program needs two points or more, as many sizes as seconds")
        for value in self.seconds:
            _check("seconds", value, whole=False)
        steps = [b - a for a, b in pairwise(self.sizes)], [b - a for a, b in pairwise(self.seconds)]
        if not (self.sizes[0] >= 0 and min(steps[0]) > 0 and min(steps[1]) >= 0):
            raise UsageError("a program's sizes must rise from 0 or more, and its seconds must not fall")

    @classmethod
    def plain(cls, fixed_s: float, bps: float) -> Program:
        """A fixed time, and bytes at a rate."""
        return cls(sizes=(0.0, bps), seconds=(fixed_s, fixed_s + 1.0))

    @property
    def fixed_s(self) -> float:
        """At the first size."""
        return self.seconds[0]

    def at(self, size: float) -> float:
        """Seconds for so many bytes."""
        last = max(1, min(bisect_right(self.sizes, size), len(self.sizes) - 1))
        first = last - 1
        share = (size - self.sizes[first]) / (self.sizes[last] - self.sizes[first])
        return self.seconds[first] + max(0.0, share) * (self.seconds[last] - self.seconds[first])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU, one host and the link between them. Rates are what programs reach, not what data sheets promise.

    `shared`: the device is the host's own CPU (the CPU backend): it computes on the same cores, from the same memory.
    Example: `cpu_bps={"float16": 44e9}`, host rows of 16 bit are read and multiplied at 44 GB/s by all cores together.
    """

    name: str
    source: str = ""  # where the figures come from
    shared: bool = False
    device_bytes: int  # of device memory
    reserved_bytes: int = 0  # of these, what no plan may use: contexts, libraries, fragments
    device_bps: float  # weights that a dense product of one row reads
    device_flops: float  # floating point operations of dense products with many rows
    launch_s: float  # a program on the device that has nothing to do
    link_bps: float  # to the device, from pinned memory
    pageable_bps: float  # from memory that is not
    t0_s: float  # a transfer of nothing
    host_bps: float  # bytes of host memory read or written, all cores together
    cores: int  # physical
    cpu_bps: Mapping[str, float]  # rows that host kernels read and multiply, all cores together, by type
    cpu_flops: float  # dense products with many rows on the host
    gather_bps: float  # rows that are copied into one block
    call_s: float  # a host kernel that has nothing to do
    sync_s: float  # a layer's FFN input to the host, and the host's part back
    dispatch_s: float  # of the main thread, a program
    layer_s: float  # of the main thread, a layer, beside programs and host kernels
    token_s: float  # of the main thread, a token, beside its layers
    plan_s: float  # of the scheduler's thread, a plan
    plan_unit_s: float  # and for each unit of the layer
    balance_s: float  # and where it balances thresholds
    programs: Mapping[str, Program] = field(default_factory=dict)  # of the device, by kind, that were measured apart
    systems: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of others: their figures that differ

    def __post_init__(self) -> None:
        for name in _names("float"):
            _check(name, getattr(self, name), whole=False)
        for name in _COUNTS:
            _check(name, getattr(self, name), whole=True)
        if not self.name or not isinstance(self.shared, bool) or not isinstance(self.source, str):
            raise UsageError("a machine needs a name, and shared must be true or false")
        if not isinstance(self.cpu_bps, Mapping) or not self.cpu_bps:
            raise UsageError("cpu_bps must give a rate for at least one type")
        for name, value in self.cpu_bps.items():
            _check(f"cpu_bps of {name}", value, whole=False)
        if not isinstance(self.programs, Mapping) or set(self.programs) - set(PROGRAMS):
            raise UsageError(f"programs must be of the kinds {', '.join(PROGRAMS)}, got {self.programs!r}")
        known = set(_names("float")) | {*_COUNTS, "cpu_bps"}
        for name, own in self.systems.items():
            if not isinstance(own, Mapping) or set(own) - known:
                raise UsageError(f"systems must give known figures by name, {name} gives {own!r}")
            self.for_system(name)
        if self.cores < 1 or self.reserved_bytes >= self.device_bytes:
            raise UsageError("a machine needs a core, and more device memory than is reserved")

    def host_rate(self, dtype: str) -> float:
        """`cpu_bps` of a type; UsageError if this machine was not measured with it."""
        if dtype not in self.cpu_bps:
            raise UsageError(f"{self.name} has no host rate for {dtype}, only for {', '.join(self.cpu_bps)}")
        return self.cpu_bps[dtype]

    def program(self, kind: str) -> Program:
        """What a program of a kind takes, measured or by the device's figures."""
        return self.programs.get(kind) or Program.plain(self.launch_s, self.device_bps)

    def for_system(self, name: str) -> Hardware:
        """The same machine as another system uses it: other kernels, other hand-overs."""
        return replace(self, **self.systems.get(name, {}), systems={})

    def to_json(self) -> dict[str, Any]:
        """The object that a file holds."""
        return {"version": VERSION, **asdict(self)}


def _names(kind: str) -> list[str]:
    return [entry.name for entry in fields(Hardware) if entry.type == kind]


def _check(name: str, value: Any, *, whole: bool) -> None:
    right = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not right or not math.isfinite(value) or value < 0 or (not whole and value == 0):
        what = "an integer >= 0" if whole else "a number > 0"
        raise UsageError(f"{name} must be {what}, got {value!r}")


def load_hardware(which: str) -> Hardware:
    """A machine by its name (`NAMED`) or from a file that `profile_machine.py` wrote.

    UsageError for what is no such file, with what is wrong; StorageError if it cannot be read.
    """
    if which in NAMED:
        text = resources.files("dynajax").joinpath("assets", "hardware", f"{which}.json").read_text(encoding="utf-8")
        return parse_hardware(text, which)
    path = Path(which)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is no hardware file: it is larger than {_MOST_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"--hardware must be {', '.join(NAMED)} or a file; there is no {path}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no hardware file: it is no text") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    return parse_hardware(text, str(path))


def parse_hardware(text: str, where: str) -> Hardware:
    """The machine that a file's text describes; UsageError names what is missing, unknown or out of range."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no hardware file: {error}") from error
    if not isinstance(values, dict) or values.pop("version", None) != VERSION:
        raise UsageError(f"{where} is no hardware file of version {VERSION}: write one with profile_machine.py --out")
    known = {entry.name for entry in fields(Hardware)}
    if unknown := sorted(set(values) - known):
        raise UsageError(f"{where} has figures that are not known: {', '.join(unknown)}")
    try:
        programs = {
            kind: Program(**{name: tuple(points) for name, points in figures.items()})
            for kind, figures in values.pop("programs", {}).items()
        }
        return Hardware(**values, programs=programs)
    except (TypeError, AttributeError) as error:
        missing = sorted(known - set(values) - {"source", "shared", "reserved_bytes", "programs", "systems"})
        raise UsageError(f"{where} lacks figures: {', '.join(missing) or error}") from error
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
