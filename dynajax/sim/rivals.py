"""Systems that place whole layers: how long they take for a token, in closed form. NumPy only."""

from __future__ import annotations

from dynajax.sim.hardware import Hardware
from dynajax.sim.models import WEIGHT_BYTES, Weights


def _layers_that_fit(weights: Weights, hardware: Hardware, context: int) -> int:
    """Whole layers with their cache, beside the head's table."""
    layer = weights.attention + weights.spec.ffn * weights.unit + weights.cache(context) / weights.spec.layers
    room = hardware.device_bytes - hardware.reserved_bytes - weights.head
    return max(0, min(weights.spec.layers, int(room / layer)))


def transformers_s(weights: Weights, hardware: Hardware, context: int) -> float:
    """Seconds of a token with Transformers and accelerate: what does not fit is copied in for every token.

    Layers that wait in host memory are there at 16 bit: quantised ones are only made on the device (bitsandbytes does
    not quantise modules that are dispatched to the CPU). Copies are from pageable memory and nothing overlaps.
    """
    spec, fits = weights.spec, _layers_that_fit(weights, hardware, context)
    elements = spec.block_parameters + spec.ffn * spec.ffn_parts * spec.unit_width
    streamed = (spec.layers - fits) * elements * max(WEIGHT_BYTES[weights.dtype], WEIGHT_BYTES["float16"])
    layer = elements * WEIGHT_BYTES[weights.dtype]
    read = fits * layer + streamed + weights.head + weights.cache(context)
    programs = spec.layers * hardware.layer_s
    return streamed / hardware.pageable_bps + read / hardware.device_bps + programs


def llama_cpp_s(weights: Weights, hardware: Hardware, context: int) -> float:
    """Seconds of a token with llama.cpp: as many whole layers on the device as fit, the others on the host, dense.

    One after the other: a layer needs the one before.
    """
    spec, fits = weights.spec, _layers_that_fit(weights, hardware, context)
    cache = weights.cache(context) / spec.layers
    layer = weights.attention + spec.ffn * weights.unit + cache
    device = fits * (layer / hardware.device_bps + hardware.layer_s) + weights.head / hardware.device_bps
    return device + (spec.layers - fits) * layer / min(hardware.host_rate(weights.host_dtype), hardware.host_bps)
