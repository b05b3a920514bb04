"""What a user types for --model -> a folder, or a .gguf file. Only names on the hub touch the network."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dynajax.checkpoint.aliases import FETCHED, HUB, SHIPPED, did_you_mean, predictor_repo, runnable
from dynajax.checkpoint.hub import Progress, is_repo, snapshot_folder
from dynajax.checkpoint.hub_files import MODEL, PREDICTOR, SETTINGS_ONLY
from dynajax.checkpoint.places import fetched_folder
from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import ModelError


def resolve_model(
    name: str, *, offline: bool = False, config_only: bool = False, progress: Progress | None = None
) -> Path:
    """The folder of an alias, of the local folder `name` or of user/repo[@revision]; or the .gguf file `name`.

    It holds a config.json and, unless `config_only`, tokenizer and weights of a hub model, which are downloaded if
    need be; the weights may be pickles (`needs_conversion`). An alias goes before a folder of the same name, and a
    folder before a repository: write ./tiny-relullama for the folder. progress("download", done, total) counts MiB.
    """
    if name in SHIPPED:
        return _shipped(name)
    if name in FETCHED:
        return _fetched(name)
    if (local := _local(name)) is not None:
        return local
    alias, at, revision = name.partition("@")
    repo = f"{HUB[alias]}{at}{revision}" if alias in HUB else name
    if is_repo(repo):
        wanted = SETTINGS_ONLY if config_only else MODEL
        return snapshot_folder(repo, wanted, offline=offline, progress=progress)
    raise ModelError(
        f"no model {plain(name)}: give a folder, a .gguf file, user/repo[@revision] on the hub, or one of "
        f"{', '.join(runnable())}{did_you_mean(name)}"
    )


def resolve_predictor(name: str, *, offline: bool = False, progress: Progress | None = None) -> Path | None:
    """The folder of model_<layer>.pt pickles published for an alias or its repository, downloaded if need be; None if
    there is none."""
    repo = predictor_repo(name)
    return None if repo is None else snapshot_folder(repo, PREDICTOR, offline=offline, progress=progress)


def _shipped(name: str) -> Path:
    folder = Path(str(resources.files("dynajax") / "assets" / SHIPPED[name]))
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} should be shipped in {located(folder)} but is not: install dynajax again")
    return folder


def _fetched(name: str) -> Path:
    folder = fetched_folder(name)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} is not in {located(folder)}: run python scripts/fetch_model.py {name}")
    return folder


def _local(name: str) -> Path | None:
    """The folder or .gguf file of that name, if there is one; ModelError for a folder without config.json."""
    if not name or name in HUB:
        return None
    try:
        path = Path(name).expanduser()
        if (path / "config.json").is_file() or (path.suffix == ".gguf" and path.is_file()):
            return path
        is_folder = path.is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a NUL
        return None
    if is_folder:
        raise ModelError(f"{quoted(name)} is a folder without config.json: name the folder of a downloaded model")
    return None
