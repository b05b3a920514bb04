"""The jitted programs of the engine: their shapes, their bodies, and the cache that compiles them once."""

from dynajax.programs.cache import MAX_PROGRAMS, Programs, Scoring
from dynajax.programs.encoded import EncodedPrograms
from dynajax.programs.making import make_programs
from dynajax.programs.mixture import MixturePrograms
from dynajax.programs.shapes import Shapes, bucket_of, prefix_buckets, split_chunks

__all__ = [
    "MAX_PROGRAMS",
    "EncodedPrograms",
    "MixturePrograms",
    "Programs",
    "Scoring",
    "Shapes",
    "bucket_of",
    "make_programs",
    "prefix_buckets",
    "split_chunks",
]
