"""Model folders in the Hugging Face layout: names, config, shards, statistics. Never runs what it finds there."""

from dynajax.checkpoint.files import Checkpoint
from dynajax.checkpoint.names import resolve_model
from dynajax.checkpoint.spec import read_spec
from dynajax.checkpoint.stats import STATS_NAME, Statistics, read_contributions, read_stats, stats_path, write_stats

__all__ = [
    "STATS_NAME",
    "Checkpoint",
    "Statistics",
    "read_contributions",
    "read_spec",
    "read_stats",
    "resolve_model",
    "stats_path",
    "write_stats",
]
