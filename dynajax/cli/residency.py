"""`plot-residency`: the heat map of a recording."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynajax.cli.options import OutputFlags
from dynajax.cli.output import figure, note, write_json
from dynajax.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dynajax.trace import Trace

STATES = ("on the host, idle", "on the device, idle", "on the host, live", "on the device, live")
COLOURS = ("#f4f4f2", "#c9dcf0", "#c8402f", "#1f5fa8")
MOST_PIXELS = 4000  # of tokens, and of neurons: more are drawn as every second, third, ...
_PICTURE_BYTES = 2**24


def plot_residency(
    output: OutputFlags,
    record: Annotated[Path, typer.Option(metavar="FILE.npz", help="What generate --record wrote.")],
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="The picture to write.")],
    layer: Annotated[int, typer.Option(min=0, metavar="N", help="Which layer; the first is 0.")] = 0,
) -> None:
    """Draw which neurons of a layer were on the device and which were live, token by token of a recording.

    Needs matplotlib: pip install dynajax[plot].
    """
    from dynajax.checkpoint.drafts import draft_file, refuse_unwritable
    from dynajax.trace import DECODE, read_trace, unpack

    refuse_unwritable(out)
    if unpack(record, lambda members, where: members.word("kind")) == "expert":
        raise UsageError(f"{record} holds experts, only neurons are drawn: read it with scripts/simulate.py --trace")
    try:
        figures = importlib.import_module("matplotlib.figure")
        colours = importlib.import_module("matplotlib.colors")
    except ImportError as error:
        raise UsageError("matplotlib is not installed: pip install dynajax[plot]") from error
    trace = read_trace(record)
    if layer >= trace.head.layers:
        raise UsageError(f"--layer must be below the {trace.head.layers} layers of the recording, got {layer}")
    if not len(trace.phase):
        raise UsageError(f"{record} holds no token: generate some")
    states, decoded = states_of(trace, layer), trace.phase == DECODE
    live = int((states[decoded] >= 2).sum())
    share = int((states[decoded] == 3).sum()) / live if live else None
    drawn = picture(figures.Figure, colours.ListedColormap(COLOURS), states)
    drawn.axes[0].set_title(
        f"layer {layer}: {figure(share, '.1%')} of the live neurons of decoded tokens on the device"
    )
    if prompts := int((~decoded).sum()):
        drawn.axes[0].set_xlabel(f"token, {prompts} of {len(decoded)} read as prompts")
    with draft_file(out, _PICTURE_BYTES) as file:
        drawn.savefig(file, format="png", dpi=110)
    if output.json:
        tokens = {"tokens": len(decoded), "decoded": int(decoded.sum())}
        write_json({"record": str(record), "out": str(out), "layer": layer, **tokens, "hot_share": share})
    else:
        note(f"written to {out}")


def states_of(trace: Trace, layer: int) -> npt.NDArray[np.uint8]:
    """[T, F] an index of STATES for each neuron, those most often live first."""
    import numpy as np

    live = trace.live_of(layer)
    order = np.argsort(-live.sum(axis=0), kind="stable")
    return (2 * live.astype(np.uint8) + trace.resident_of(layer))[:, order]


def picture(make: Any, colours: Any, states: npt.NDArray[np.uint8]) -> Any:
    """A figure of the states; x token, y neuron. Long recordings and wide layers are thinned out."""
    tokens, neurons = states.shape
    steps = [1 + (count - 1) // MOST_PIXELS for count in (tokens, neurons)]
    drawn = make(figsize=(11, 7), layout="constrained")
    axes = drawn.subplots()
    thin = states[:: steps[0], :: steps[1]].T
    shown = axes.imshow(thin, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=3.5,
                        extent=(-0.5, tokens - 0.5, neurons - 0.5, -0.5))  # fmt: skip
    axes.set(xlabel="token", ylabel="neuron, most often live first")
    drawn.colorbar(shown, ax=axes, ticks=range(len(STATES)), shrink=0.5).ax.set_yticklabels(STATES)
    return drawn
