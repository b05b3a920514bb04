"""What a user types for --model -> a folder. No network: aliases of shipped models, and local folders."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from dynajax.checkpoint.wording import located, plain, quoted
from dynajax.errors import ModelError

SHIPPED = {"tiny-relullama": "tiny-relullama"}  # alias -> folder below dynajax/assets


def resolve_model(name: str) -> Path:
    """The folder of an alias or the local folder `name`; it holds a config.json, unread so far.

    An alias goes before a folder of the same name: write ./tiny-relullama for the folder.
    """
    if name in SHIPPED:
        folder = Path(str(resources.files("dynajax") / "assets" / SHIPPED[name]))
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} should be shipped in {located(folder)} but is not: install dynajax again")
        return folder
    try:
        folder = Path(name).expanduser()
        if name and (folder / "config.json").is_file():
            return folder
        is_folder = bool(name) and folder.is_dir()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown ~user, a NUL
        is_folder = False
    if is_folder:
        raise ModelError(f"{quoted(name)} is a folder without config.json: name the folder of a downloaded model")
    near = difflib.get_close_matches(name[:100], SHIPPED, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(near)}?" if near else ""
    known = ", ".join(SHIPPED)
    raise ModelError(f"no model {plain(name)}: this version runs local folders and the aliases {known}{hint}")
