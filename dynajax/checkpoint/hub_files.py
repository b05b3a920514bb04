"""Which files of a hub repository a model needs, stage by stage, and whether a folder already holds them.

A stage is fetched whole before the next is asked for, so that a model this version does not run is refused by its
config.json, and the shards are those that the index names. A repository may hold the same weights several times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dynajax.checkpoint.json_file import read_json
from dynajax.checkpoint.paths import is_plain_name
from dynajax.checkpoint.shards import INDEX, INDEX_BYTES, SINGLE
from dynajax.checkpoint.spec import read_spec
from dynajax.checkpoint.stats import STATS_NAME
from dynajax.checkpoint.wording import listing
from dynajax.errors import ModelError

CONFIG = "config.json"
PICKLE_SUFFIX = ".bin"
PICKLE = f"pytorch_model{PICKLE_SUFFIX}"
PICKLE_INDEX = f"{PICKLE}.index.json"
SETTINGS = (CONFIG, "generation_config.json", STATS_NAME)
TEXT = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.model",
    "chat_template*",
)
PREDICTOR_LAYER = re.compile(r"model_(\d{1,4})\.pt")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to fetch of a repository, and when a folder needs nothing more.

    stages(names, folder): lists of names to fetch; `folder` holds those of a stage when the next is asked for.
    """

    stages: Callable[[Collection[str], Path], Iterator[list[str]]]
    is_complete: Callable[[Path], bool]


def needs_conversion(folder: Path) -> bool:
    """True for a model folder whose weights are PyTorch pickles only."""
    has = {name for name in (SINGLE, INDEX, PICKLE, PICKLE_INDEX) if (folder / name).exists()}
    return bool(has) and not has & {SINGLE, INDEX}


def _settings_stages(names: Collection[str], folder: Path) -> Iterator[list[str]]:
    if CONFIG not in names:
        raise ModelError(_no_model(names))
    yield [name for name in SETTINGS if name in names]


def _model_stages(names: Collection[str], folder: Path) -> Iterator[list[str]]:
    """Config; the index of the weights; then everything else, weights last: they are the sign of completeness."""
    if CONFIG not in names:
        raise ModelError(_no_model(names))
    yield [CONFIG]
    read_spec(folder)
    layout = next((name for name in (SINGLE, INDEX, PICKLE, PICKLE_INDEX) if name in names), None)
    if layout is None:
        raise ModelError(_no_weights(names))
    indexed = layout in (INDEX, PICKLE_INDEX)
    if indexed:
        yield [layout]
    weights = _indexed(folder / layout) if indexed else [layout]
    if missing := [name for name in weights if name not in names]:
        raise ModelError(f"{layout} names shards that the repository does not hold: {listing(missing)}")
    small = [name for name in names if name in SETTINGS or any(fnmatchcase(name, pattern) for pattern in TEXT)]
    yield [*sorted(small), *weights]


def is_complete(folder: Path) -> bool:
    """Whether config and weights of a model are there, as far as the names can say."""
    if not (folder / CONFIG).is_file():
        return False
    for layout in (SINGLE, INDEX, PICKLE, PICKLE_INDEX):
        if (folder / layout).is_file():
            names = _indexed(folder / layout) if layout in (INDEX, PICKLE_INDEX) else []
            return all((folder / name).is_file() for name in names)
    return False


def _predictor_stages(names: Collection[str], folder: Path) -> Iterator[list[str]]:
    layers = [name for name in names if PREDICTOR_LAYER.fullmatch(name)]
    if not layers:
        raise ModelError(f"no model_<layer>.pt in the repository; it has {listing(names)}")
    yield [*([CONFIG] if CONFIG in names else []), *sorted(layers, key=_layer)]


def _predictor_is_complete(folder: Path) -> bool:
    """As far as the names can say: layers from 0 on, without a gap. They are fetched in that order."""
    found = [path.name for path in folder.iterdir() if PREDICTOR_LAYER.fullmatch(path.name) and path.is_file()]
    return bool(found) and sorted(map(_layer, found)) == list(range(len(found)))


def _layer(name: str) -> int:
    return int(name.removeprefix("model_").removesuffix(".pt"))


def _indexed(path: Path) -> list[str]:
    """The shards an index names: plain names with the suffix of the index, else ModelError."""
    weight_map = read_json(path, INDEX_BYTES).get("weight_map")
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path.name} must hold an object weight_map, tensor name -> file name")
    names = list(weight_map.values())
    if bad := [str(name) for name in names if not is_plain_name(name) or not name.endswith(suffix)]:
        raise ModelError(f"{path.name} names shards that are not plain {suffix} files: {listing(set(bad))}")
    return sorted(set(names))


def _no_model(names: Collection[str]) -> str:
    gguf = [name for name in names if name.endswith(".gguf")]
    remedy = ": download one of them and give its path" if gguf else ""
    return f"no {CONFIG} in the repository, so it holds no model to run; it has {listing(gguf or names)}{remedy}"


def _no_weights(names: Collection[str]) -> str:
    return f"neither {SINGLE} nor {PICKLE} nor an index of either in the repository; it has {listing(names)}"


SETTINGS_ONLY = Wanted(_settings_stages, lambda folder: (folder / CONFIG).is_file())
MODEL = Wanted(_model_stages, is_complete)
PREDICTOR = Wanted(_predictor_stages, _predictor_is_complete)
