"""Recall of every kind of predictor at equal bytes, per layer and lead, on text that none of them was fitted on.

python -m benchmarks.predictors --tokens 200000 --passes 4

Fitted on corpus/tokens if that is there (scripts/train_tiny.py makes it), else on the first half of every held-out
text; measured on the second halves. Recall: share of the live neurons found when 1.0, 1.3, 1.6, 2.0 x the true
number of (token, neuron) pairs of a layer are predicted. Bytes: against the layer's 16-bit gate matrix.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt

from benchmarks.layers import layers_of
from dynajax.benching.machine import machine
from dynajax.checkpoint import Checkpoint
from dynajax.models.decoder import Decoder
from dynajax.testing import load_decoder
from dynajax.text import load_tokenizer
from predictors.calibration import recall_at
from predictors.fitting import Settings
from predictors.forms import Form, Shape
from predictors.gate import GateSource
from predictors.selection import mlp_rank
from predictors.training import Trainer

ROOT = Path(__file__).parents[1]
WINDOW = 256  # tokens a document
BATCH = 4  # documents at once
FACTORS = ("1.0", "1.3", "1.6", "2.0")


def windows(streams: Sequence[npt.NDArray[np.integer]]) -> npt.NDArray[np.int32]:
    """All whole windows [n, WINDOW] of the streams."""
    cut = [stream[: len(stream) // WINDOW * WINDOW].reshape(-1, WINDOW) for stream in streams]
    return np.concatenate(cut).astype(np.int32)


def texts(model: Path, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], str]:
    """(windows to fit on, about `count` tokens of them in random order; windows to measure on; where from)."""
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")
    paths = sorted((ROOT / "tests/data/heldout").glob("*.txt"))
    held = [np.array(tokenizer.encode(path.read_text(encoding="utf-8"))) for path in paths]
    test = windows([ids[len(ids) // 2 :] for ids in held])
    corpus = sorted((ROOT / "corpus/tokens").glob("*.npy"))
    fit = windows([np.load(path) for path in corpus] if corpus else [ids[: len(ids) // 2] for ids in held])
    order = np.random.default_rng(0).permutation(len(fit))[: max(1, count // WINDOW)]
    return fit[order], test, "corpus" if corpus else "heldout"


def runner(model: Decoder):
    """tokens [B, T] -> streams and inputs [B*T, D], live [B*T, F]; NumPy lists over layers."""
    run = layers_of(model)

    def flat(tokens: npt.NDArray[np.int32]) -> list[list[npt.NDArray]]:
        layers = run(tokens)
        parts = jax.device_get((layers.streams, layers.inputs, layers.live))
        return [[array.reshape(-1, array.shape[-1]) for array in part] for part in parts]

    return flat


def batches(ids: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.int32]]:
    for at in range(0, len(ids) - BATCH + 1, BATCH):
        yield ids[at : at + BATCH]


def source_of(model: Decoder, layer: int) -> GateSource:
    gate, norm = model.ffn[layer].gate, model.attention[layer].ffn_norm
    if gate is None or norm is None:
        raise SystemExit("only gated models with a norm of their own before each FFN are measured here")
    return GateSource(rows=(np.asarray(gate[...]),), norm=np.asarray(norm[...]))


def forms_of(shape: Shape, kinds: str) -> list[Form]:
    gates = [Form(kind="gate", bits=bits) for bits in (1, 2, 4, 8)]
    gates += [Form(kind="gate", bits=bits, rank=16) for bits in (1, 2, 4)]
    mlps = [Form(kind="mlp", rank=mlp_rank(shape, bits)) for bits in (1, 2, 4)]
    return [*(gates if "gate" in kinds else []), *(mlps if "mlp" in kinds else [])]


def measure(args: argparse.Namespace) -> tuple[list[dict], dict]:
    """One row a form, layer and lead; and what the run was."""
    model = load_decoder(Checkpoint.open(args.model))
    shape = Shape.of(model.spec)
    if shape.activation.kind != "relu" or shape.ffn_bias:
        raise SystemExit(f"live sets are those of relu without biases, the model has {shape.activation.kind}")
    fit, test, origin = texts(args.model, args.tokens)
    settings = Settings(tokens=fit.size, batch=args.batch, passes=args.passes, rate=args.rate)
    trainer = Trainer(
        shape, args.leads, forms_of(shape, args.kinds), settings, sources=lambda layer: source_of(model, layer)
    )
    run, frequency, begin = runner(model), np.zeros((shape.layers, shape.ffn)), time.perf_counter()
    for tokens in batches(fit):
        streams, inputs, live = run(tokens)
        frequency += [part.mean(axis=0) for part in live]
        trainer.feed(streams, inputs, live)
    trainer.finish()
    train_s = time.perf_counter() - begin
    parts = zip(*(run(tokens) for tokens in batches(test[: args.test_windows])), strict=True)
    streams, inputs, live = ([np.concatenate(layer) for layer in zip(*part, strict=True)] for part in parts)
    rows = []
    for one in trainer.evaluate(streams, inputs, live):
        told, entry = one.entry.metrics or {}, one.entry
        if entry.layer:
            rows.append(
                {"form": entry.form.name, "lead": entry.lead, "layer": entry.layer, "bytes": one.bytes,
                 **{name: told[name] for name in ("density", "recall", "entropy", "calibration_error")}}
            )  # fmt: skip
    for layer in range(1, shape.layers):
        z = np.broadcast_to(frequency[layer], live[layer].shape)
        recall = {factor: recall_at(z, live[layer], float(factor))[0] for factor in FACTORS}
        rows.append({"form": "frequency", "lead": 0, "layer": layer, "bytes": 4 * shape.ffn, "recall": recall})
    told = {"fit": origin, "fit_tokens": trainer.tokens, "steps": trainer.step, "train_s": round(train_s, 1)}
    return rows, told | {"test_tokens": len(live[0]), "gate_bytes": 2 * shape.hidden * shape.ffn}


def show(rows: list[dict], gate_bytes: int) -> None:
    """Recall at the four factors, in percent: a table a lead."""
    layers = sorted({row["layer"] for row in rows})
    for lead in sorted({row["lead"] for row in rows}):
        print(f"\nlead {lead}   bytes  " + "  ".join(f"layer {layer:<9}" for layer in layers))
        for form in dict.fromkeys(row["form"] for row in rows):
            found = {row["layer"]: row for row in rows if (row["form"], row["lead"]) == (form, lead)}
            cells = [
                " ".join(f"{100 * found[layer]['recall'][factor]:3.0f}" for factor in FACTORS) if layer in found else ""
                for layer in layers
            ]
            if found:
                share = next(iter(found.values()))["bytes"] / gate_bytes
                print(f"{form:9} {share:6.3f}  " + "  ".join(f"{cell:15}" for cell in cells))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "dynajax/assets/tiny-relullama")
    parser.add_argument("--tokens", type=int, default=200_000, help="of text to fit on")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rate", type=float, default=Settings().rate)
    parser.add_argument("--leads", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", default="gate,mlp")
    parser.add_argument("--test-windows", type=int, default=64, help="of 256 tokens")
    args = parser.parse_args(argv)
    rows, told = measure(args)
    show(rows, told["gate_bytes"])
    print(json.dumps({"machine": machine(), "model": args.model.name, **told, "rate": args.rate, "rows": rows}))


if __name__ == "__main__":
    main()
