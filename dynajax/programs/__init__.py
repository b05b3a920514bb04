"""The jitted programs of the engine: their shapes, their bodies, and the cache that compiles them once."""

from dynajax.programs.cache import MAX_PROGRAMS, Programs, Scoring
from dynajax.programs.mixture import MixturePrograms, make_programs
from dynajax.programs.shapes import Shapes, bucket_of, prefix_buckets, split_chunks

__all__ = [
    "MAX_PROGRAMS",
    "MixturePrograms",
    "Programs",
    "Scoring",
    "Shapes",
    "bucket_of",
    "make_programs",
    "prefix_buckets",
    "split_chunks",
]
