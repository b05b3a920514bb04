"""How well, and to what use, it is foretold where a mixture's tokens go: six kinds, on text none of them was fitted on.

python -m benchmarks.prefetch --model tiny-moe --tokens 150000 --out prefetch.md
python -m benchmarks.prefetch --model tiny-moe --predictor DIR

Fitted on corpus/train unless a predictor folder is given, which must reach as far ahead as --leads. Measured on
tests/data/heldout, teacher-forced: rows are windows of different texts at one position. The first fifth of the windows
says which experts are most frequent, hence resident; what follows is measured.

recall: of a token's experts, the share among as many foretold ones. busiest: of the steps in which an expert that is
not resident is live, those in which the one foretold to have most tokens of these has most. value: decoding is replayed
with one prefetch a layer-step at most, by the planner that drives the engine; of the time that perfect foresight of the
same layers saves, the share that is saved (-: it saves less than 1 %). Times are modelled: host and device of
benchmarks.expert_cache, and a link over which an expert takes 0.9 of the mean layer. A prefetch has one layer's time
with every lead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from benchmarks.expert_cache import COSTS, DENSE_S
from dynajax.benching.machine import machine
from dynajax.checkpoint import Checkpoint
from dynajax.collecting import read_texts
from dynajax.config import EngineConfig
from dynajax.engine import Engine
from dynajax.engine.observing import Seen
from dynajax.model_folder import model_folder
from dynajax.policy.experts.config import ExpertConfig
from dynajax.policy.experts.planner import ExpertPlanner
from dynajax.policy.experts.prefetch import CountPredictor
from dynajax.policy.experts.presets import expert_policy
from dynajax.policy.experts.records import ExpertCosts
from dynajax.policy.experts.replay import replay
from dynajax.predictor_training.experts import routers_of, train_experts
from dynajax.predictor_training.texts import Text, encode_texts, samples_of
from dynajax.predictor_training.train import Recipe
from predictors.routing import KINDS, Correction, choice_weights, load_corrections
from predictors.routing_fitting import RoutingShape, chosen
from predictors.routing_folder import read_routing_manifest

ROOT = Path(__file__).parents[1]
GRADED = "corrected, graded"  # a token's first expert counts more than its last; else all count 1
ALL = (GRADED, *KINDS, "count", "random")
LEAST_GAIN = 0.01  # of the time, that perfect foresight must save for a share of it to mean anything
STATISTICS = 5  # the first 1/5 of the windows
SHARES = (0.25, 0.4)  # of the experts, resident
LINK = 0.9  # of a layer's time, for one expert
PIECE = 512  # tokens asked about at once

Ids = npt.NDArray[np.int32]
Loads = npt.NDArray[np.float64]  # [..., M, E] tokens of experts


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """n windows of T tokens as the model read them, in M layers that have experts."""

    h: npt.NDArray[np.float16]  # [n, T, M, D]
    ids: Ids  # [n, T, M, K]


def read(model: str, checkpoint: Checkpoint, windows: Sequence[Ids]) -> Read:
    """The last token of a window is not seen."""
    hidden: list[npt.NDArray] = []
    ids: list[npt.NDArray] = []

    def tell(seen: Seen) -> None:
        hidden.append(seen.hidden.astype(np.float16))
        ids.append(np.nonzero(seen.live)[1].reshape(len(seen.live), -1).astype(np.int32))

    with Engine.from_pretrained(model, folder=checkpoint.folder, ctx=len(windows[0]), policy="static") as engine:
        engine.watch(tell)
        for window in windows:
            engine.generate(window.tolist(), max_new_tokens=0)
    count = len(checkpoint.spec.unit_layers)
    h, where = (np.stack(parts).reshape(len(windows), count, *parts[0].shape) for parts in (hidden, ids))
    return Read(h.swapaxes(1, 2), where.swapaxes(1, 2))


def fit(model: str, checkpoint: Checkpoint, args: argparse.Namespace, out: Path) -> float:
    """Train into `out`; seconds."""
    begin = time.perf_counter()
    streams = encode_texts(read_texts(args.text), checkpoint.folder)
    text = Text(samples_of(streams, args.tokens, args.length, args.seed), f"{args.tokens} tokens of {args.text}")
    recipe = Recipe(lead=max(args.leads), seed=args.seed)
    config = EngineConfig(ctx=args.length + 1)
    train_experts(model, checkpoint, config, recipe, text, out, resume=False, progress=lambda *_: None)
    return time.perf_counter() - begin


# --- foretelling ------------------------------------------------------------------------------------------------------


def foretold(seen: Read, kind: str, lead: int, checkpoint: Checkpoint, trained: Path, seed: int) -> Ids:
    """[n, T, M, K] experts that tokens are expected to go to; -1 in layers that nobody foretells."""
    shape, routers = RoutingShape.of(checkpoint.spec), routers_of(checkpoint)
    found, count = np.full(seen.ids.shape, -1, np.int32), len(shape.layers)
    if kind == "random":
        rng = np.random.default_rng(seed)
        scores = rng.random((*seen.ids.shape[:2], count - lead, shape.experts))
        found[:, :, lead:] = np.argpartition(scores, shape.top_k - 1)[..., : shape.top_k]
        return found
    known = load_corrections(trained, kind, lead, count, shape.hidden, checkpoint.fingerprint())
    ask = jax.jit(chosen, static_argnums=3)
    for asked in range(count - lead):
        correction = known.get(asked, Correction.none(shape.hidden))
        leaves = jax.device_put(dict(routers(asked + lead)))
        flat = seen.h[:, :, asked].reshape(-1, shape.hidden)
        parts = [
            np.asarray(ask(padded(flat[at : at + PIECE]), correction.arrays, leaves, shape.router))
            for at in range(0, len(flat), PIECE)
        ]
        found[:, :, asked + lead] = np.concatenate(parts)[: len(flat)].reshape(*seen.ids.shape[:2], -1)
    return found


def padded(part: npt.NDArray) -> npt.NDArray[np.float32]:
    """[PIECE, D] float32."""
    return np.pad(part.astype(np.float32), ((0, PIECE - len(part)), (0, 0)))


def grouped(ids: Ids, rows: int, experts: int, *, graded: bool = False) -> Iterator[Loads]:
    """Tokens of every expert [T, M, E], of one group of `rows` windows after the other; -1 counts nowhere. graded: as
    `predictors.routing.expected_tokens` counts them."""
    places = ids.shape[-1]
    weights = np.tile(choice_weights(places) if graded else np.ones(places), rows)
    for first in range(0, len(ids) - rows + 1, rows):
        group = ids[first : first + rows].transpose(1, 2, 0, 3)  # [T, M, rows, K]
        flat = group.reshape(*group.shape[:2], -1)
        loads = np.zeros((*flat.shape[:2], experts + 1))
        step, layer, _ = np.indices(flat.shape)
        np.add.at(loads, (step, layer, flat), np.broadcast_to(weights, flat.shape))
        yield loads[..., :experts]


def counted(loads: Loads, lead: int) -> Loads:
    """What the decayed past of each layer's workload makes expect of loads [T, M, E]."""
    predictor = CountPredictor(*loads.shape[1:], ExpertConfig().count_decay)
    expected = np.zeros_like(loads)
    for step, tokens in enumerate(loads):
        for layer in range(lead, loads.shape[1]):
            expected[step, layer] = predictor.predict(layer)
            predictor.observe(layer, tokens[layer])
    return expected


# --- measuring --------------------------------------------------------------------------------------------------------


def recalls(seen: Read, expected: Ids | None, lead: int, experts: int) -> list[float]:
    """By layer that is foretold; None: by what each row's own past makes expect."""
    if expected is None:
        loads = np.stack(list(grouped(seen.ids, 1, experts)))
        past = np.stack([counted(part, lead) for part in loads])
        expected = np.argsort(-past, axis=-1, kind="stable")[..., : seen.ids.shape[-1]].astype(np.int32)
    hits = (expected[..., None] == seen.ids[..., None, :]).any(axis=-1)
    return hits.mean(axis=(0, 1, 3))[lead:].tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """So many rows at once, with the most frequent experts resident; the first `some` groups are replayed."""

    rows: int
    loads: list[Loads]  # by group of windows [T, M, E]
    some: int
    buckets: list[npt.NDArray[np.int32]]
    frequency: Loads  # [M, E]
    costs: ExpertCosts

    @classmethod
    def of(cls, ids: Ids, frequency: Loads, rows: int, share: float, steps: int) -> Case:
        experts = frequency.shape[1]
        slots = max(1, round(share * experts))
        buckets = [np.argsort(-row, kind="stable")[:slots].astype(np.int32) for row in frequency]
        loads = list(grouped(ids, rows, experts))
        case = cls(rows, loads, max(1, min(len(loads), steps // ids.shape[1])), buckets, frequency, COSTS)
        for _ in range(3):  # what an expert takes on the link decides what a layer takes
            layer_s = replace(case, some=1).replayed(None)[0] + DENSE_S
            case = replace(case, costs=replace(COSTS, t_trans_s=LINK * layer_s - COSTS.t0_s))
        return case

    def replayed(self, expected: Sequence[Loads] | None) -> tuple[float, float]:
        """Modelled seconds of a layer's experts, and the share of prefetches that were of use."""
        layers, experts = self.frequency.shape
        policy = expert_policy("scan")
        planner = ExpertPlanner(layers, experts, policy, ExpertConfig(), self.buckets, self.frequency)
        spent_s = prefetched = useful = 0.0
        for number, part in enumerate(self.loads[: self.some]):
            planner.start_sequence()
            predict = None if expected is None else (lambda step, layer, guess=expected[number]: guess[step, layer])
            tally = replay(part.astype(np.int64), planner, self.costs, dense_s=DENSE_S, predict=predict)
            spent_s += tally.makespan_s.sum()
            prefetched += tally.prefetched.sum()
            useful += tally.useful.sum()
        return spent_s / sum(part.shape[0] * layers for part in self.loads[: self.some]), useful / max(prefetched, 1)

    def busiest(self, expected: Sequence[Loads], lead: int) -> list[float | None]:
        """By layer that is foretold; None: no expert that is absent was ever live."""
        found: list[float | None] = []
        for layer in range(lead, len(self.buckets)):
            absent = np.setdiff1d(np.arange(self.frequency.shape[1]), self.buckets[layer])
            tokens, guess = (
                np.concatenate([part[:, layer, absent] for part in parts]) for parts in (self.loads, expected)
            )
            most = tokens.max(axis=1)
            right = (tokens[np.arange(len(guess)), guess.argmax(axis=1)] == most) & (guess.max(axis=1) > 0)
            found.append(float(right[most > 0].mean()) if (most > 0).any() else None)
        return found

    def perfect(self, lead: int) -> list[Loads]:
        """What happens, of the layers that can be foretold."""
        return [np.where(np.arange(part.shape[1])[None, :, None] >= lead, part, 0.0) for part in self.loads]


def thirds(values: Sequence[float | None]) -> dict[str, float | None]:
    """Means over the first, middle and last third of the layers, and over all."""
    numbers = np.array(values, np.float64)
    parts = dict(zip(("first", "middle", "last"), np.array_split(numbers, 3), strict=True)) | {"all": numbers}
    return {name: None if np.isnan(part).all() else float(np.nanmean(part)) for name, part in parts.items()}


def measure(seen: Read, told: Mapping[tuple[str, int], Ids], args: argparse.Namespace, experts: int) -> list[dict]:
    """A row a kind and lead, and in it a record a case. told: by kind and lead; `count` is made of what came before."""
    first = max(1, len(seen.ids) // STATISTICS)
    past, now = seen.ids[:first], Read(seen.h[first:], seen.ids[first:])
    frequency = sum(part.sum(axis=0) for part in grouped(past, 1, experts)) / (past.shape[0] * past.shape[1])
    cases = {
        f"{rows} rows, {share:.0%}": Case.of(now.ids, frequency, rows, share, args.steps)
        for rows in args.rows
        for share in SHARES
    }
    none_s = {name: case.replayed(None)[0] for name, case in cases.items()}
    found = []
    for lead in args.leads:
        best_s = {name: case.replayed(case.perfect(lead))[0] for name, case in cases.items()}
        for kind in ALL:
            ids = None if kind == "count" else told["corrected" if kind == GRADED else kind, lead][first:]
            row: dict[str, Any] = {"kind": kind, "lead": lead, "recall": thirds(recalls(now, ids, lead, experts))}
            for name, case in cases.items():
                if ids is None:
                    expected = [counted(part, lead) for part in case.loads]
                else:
                    expected = list(grouped(ids, case.rows, experts, graded=kind == GRADED))
                spent_s, useful = case.replayed(expected)
                gain_s = none_s[name] - best_s[name]
                row[name] = {
                    "busiest": thirds(case.busiest(expected, lead)),
                    "value": (none_s[name] - spent_s) / gain_s if gain_s > LEAST_GAIN * none_s[name] else None,
                    "useful": useful,
                    "perfect_saves": gain_s / none_s[name],
                    "link_over_layer": case.costs.copy_s / (none_s[name] + DENSE_S),
                }
            found.append(row)
    return found


# --- telling ----------------------------------------------------------------------------------------------------------


def cell(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def table(rows: list[dict], leads: Sequence[int]) -> str:
    """Markdown, percent."""
    cases = [name for name in rows[0] if "rows" in name]
    lines = []
    for lead in leads:
        mine = [row for row in rows if row["lead"] == lead]
        saves = ", ".join(f"{cell(mine[0][name]['perfect_saves'])} at {name}" for name in cases)
        lines += [f"| lead {lead}: recall | first third | middle | last third | all |", "|---|---|---|---|---|"]
        lines += [f"| {r['kind']} | {' | '.join(cell(value) for value in r['recall'].values())} |" for r in mine]
        for what in ("busiest", "value"):
            lines += ["", f"| lead {lead}: {what} | {' | '.join(cases)} |", "|---" * (1 + len(cases)) + "|"]
            for row in mine:
                values = (row[name][what] for name in cases)
                told = (cell(value["all"] if isinstance(value, dict) else value) for value in values)
                lines.append(f"| {row['kind']} | {' | '.join(told)} |")
        lines += ["", f"Perfect foresight saves, of the time of a layer's experts, in percent: {saves}.", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-moe")
    parser.add_argument("--predictor", type=Path, help="a folder; else one is fitted")
    parser.add_argument("--text", type=Path, default=ROOT / "corpus/train", help="to fit on")
    parser.add_argument("--heldout", type=Path, default=ROOT / "tests/data/heldout", help="to measure on")
    parser.add_argument("--tokens", type=int, default=150_000, help="to fit on")
    parser.add_argument("--windows", type=int, default=160, help="to measure on")
    parser.add_argument("--length", type=int, default=255, help="of a window")
    parser.add_argument("--leads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--steps", type=int, default=1020, help="replayed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the tables as markdown")
    args = parser.parse_args(argv)
    checkpoint = Checkpoint.open(model_folder(args.model, offline=True, progress=lambda *_: None))
    experts = RoutingShape.of(checkpoint.spec).experts
    streams = encode_texts(read_texts(args.heldout), checkpoint.folder)
    windows = [w for w in samples_of(streams, 2**31, args.length, args.seed) if len(w) == args.length + 1]
    with tempfile.TemporaryDirectory() as folder:
        trained, seconds = args.predictor, None
        if trained is None:
            trained = Path(folder) / "predictors"
            seconds = fit(args.model, checkpoint, args, trained)
        source = read_routing_manifest(trained).source
        seen = read(args.model, checkpoint, windows[: args.windows])
        kinds = [(kind, lead) for kind in (*KINDS, "random") for lead in args.leads]
        told = {(kind, lead): foretold(seen, kind, lead, checkpoint, trained, args.seed) for kind, lead in kinds}
        rows = measure(seen, told, args, experts)
    text = table(rows, args.leads)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    head = {
        "machine": machine(),
        "model": args.model,
        "fingerprint": checkpoint.fingerprint()[:12],
        "fitted_on": source,
    }
    tokens = seen.ids.shape[0] * seen.ids.shape[1]
    print(json.dumps({**head, "fit_s": seconds, "measured_tokens": tokens, "simulated": ["value"], "rows": rows}))


if __name__ == "__main__":
    main()
