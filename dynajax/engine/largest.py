"""The programs of an engine whose temporaries bound those of all others: what the budget keeps free for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dynajax.policy.placement import block_units
from dynajax.programs import Programs, Shapes

Progress = Callable[[str, int, int], None]


def largest_temporary(programs: Programs, mode: str, progress: Progress, further: Sequence[tuple] = ()) -> int:
    """Bytes of temporaries that no program of the engine exceeds, nor one of the `further`."""
    keys = [*largest_programs(programs.shapes, mode), *further]
    largest = 0
    for done, key in enumerate(keys, start=1):
        unseen = _unseen_bytes(programs.shapes, mode) if key[0] == "token_rows" else 0
        largest = max(largest, programs.temp_bytes(*key) + unseen)
        progress("compile", done, len(keys))
    return largest


def largest_programs(shapes: Shapes, mode: str) -> list[tuple]:
    """The programs whose temporaries bound those of all others: longest prefix, largest chunk, fullest pool."""
    spec, chunk, prefix = shapes.spec, shapes.chunks[-1], shapes.prefixes[-1]
    if spec.experts is not None:
        return _with_experts(shapes, mode)
    prefill = [("attend_chunk", chunk, prefix), ("hot_chunk", chunk, spec.ffn)]
    full, masked = (spec.ffn,) * spec.layers, ("hot_admitted_chunk", chunk, spec.ffn)
    match mode:
        case "threads":
            return [*prefill, ("head",), ("attend_rows", prefix), ("hot_rows", spec.ffn)]
        case "planned":
            return [*prefill, ("head",), ("attend_rows", prefix), ("hot_admitted_rows", spec.ffn), masked]
        case "resident":
            return [*prefill, ("token_rows", prefix, *full)]
        case "skipping":
            return [*prefill, ("head",), masked]  # and what depends on the predictors
    almost = (max(0, spec.ffn - block_units(spec.ffn)),) * spec.layers  # a share for the host in every layer
    return [*prefill, ("token_rows", prefix, *almost)]


def _unseen_bytes(shapes: Shapes, mode: str) -> int:
    """What a full pool adds to the temporaries of a token's program whose pools lack one block; saves compiling it."""
    if mode in ("threads", "planned", "resident") or shapes.spec.experts is not None:
        return 0
    return 4 * 4 * shapes.batch * block_units(shapes.spec.ffn)


def _with_experts(shapes: Shapes, mode: str) -> list[tuple]:
    """Of a mixture: a group of experts has the temporaries of one expert and its tokens, however full the pool."""
    spec, chunk, prefix = shapes.spec, shapes.chunks[-1], shapes.prefixes[-1]
    assert spec.experts is not None
    found: list[tuple] = [("route_chunk", chunk, prefix), ("experts_chunk", chunk, spec.units, 1, chunk), ("head",)]
    if spec.encoder is not None:
        found = _with_encoder(shapes)
    elif len(spec.unit_layers) < spec.layers:
        found += [("attend_chunk", chunk, prefix), ("always_chunk", "plain", chunk)]
    if spec.experts.shared_width:
        found += [("always_chunk", "experts", chunk)]
    if mode in ("threads", "planned"):
        return [*found, ("route_rows", prefix), ("experts_rows", spec.units, 1, shapes.batch)]
    left = 0 if mode == "resident" else 1  # for the host in every layer
    return [*found, ("token_rows", prefix, *(spec.units - left,) * len(spec.unit_layers))]


def _with_encoder(shapes: Shapes) -> list[tuple]:
    """An encoder reads a prompt at once, whatever fits the context."""
    spec, size = shapes.spec, shapes.ctx
    found: list[tuple] = [("seen", size), ("remember", size), ("head",)]
    found += [("experts_chunk", size, spec.units, 1, shapes.chunks[-1])]
    kinds = {"experts" if layer in spec.unit_layers else "plain" for layer in range(spec.layers)}
    found += [("read", kind, size) for kind in sorted(kinds)]
    found += [("always_chunk", "plain", size)] if "plain" in kinds else []
    return found + ([("attend_rows", shapes.prefixes[-1])] if not set(spec.stepped) <= set(spec.unit_layers) else [])
