"""Which files of a model folder may be opened: plain names, and nothing that leads outside."""

from __future__ import annotations

from pathlib import Path

from dynajax.checkpoint.wording import located, plain


def is_plain_name(name: object) -> bool:
    """True for a bare file name: no folder, no "..", no backslash, nothing unprintable."""
    return isinstance(name, str) and name.isprintable() and not {"/", "\\"} & set(name) and name not in ("", ".", "..")


def stray_link(path: Path) -> str | None:
    """A problem if `path` is a link that leaves its folder, else None. The file need not exist.

    The one exception is the hub cache's own layout, `NAME/snapshots/REVISION/file -> ../../blobs/HASH`: a link into
    the `blobs` folder of the same cached model, or of the cache, is allowed.
    """
    folder = path.parent.resolve()
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed += [folder.parent.parent / "blobs", folder.parent.parent.parent / "blobs"]
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return f"{plain(path.name)} is a link that leads nowhere"
    if any(target.is_relative_to(base) for base in allowed):
        return None
    return f"{plain(path.name)} is a link that leads outside the model folder, to {located(target)}"
