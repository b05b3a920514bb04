"""Write a random ReLU-sparse Llama of a known activity: a stand-in for models that take gigabytes to download.

    python -m benchmarks.make_checkpoint runs/synth-1.1b --shape 1.1b
    python -m benchmarks.make_checkpoint runs/synth-1.1b --check

Every neuron has its own firing probability, so that `--active` of a layer's neurons fire per token and the `--hot`
share of them covers `--cover` of the activations. Which ones fire depends on token, context and topic (id mod 16).
How: a constant unit vector, the bias, rides in the residual stream; the embeddings carry it and no layer writes to it.
Gate row i is random less beta_i times the bias, and beta_i is the quantile that makes it fire as often as it should on
a forward of random tokens. Layer outputs are scaled to a fixed share of the stream: finite at any depth.

The folder is an ordinary Hugging Face one. Beside the weights: `activations.npz`, how often each neuron fired on the
calibration tokens, and `predictors.safetensors`, per layer fc1 [R,D] and fc2 [F,R] with a relu between, fed with the
stream before the FFN norm; a logit above 0 means "fires". They know the gate but for its full-rank noise.

On 2 cores: tiny 4 s, 1.1b 2 minutes, 7b 10 minutes with 13.5 GB of disk and 4 GB of memory (a layer at a time).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dynajax.config import ModelSpec, Rope

F32 = npt.NDArray[np.float32]


def _shape(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        layers=layers, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, vocab=vocab,
        dtype="float16", bos_id=1, eos_ids=(2,),
    )  # fmt: skip


SHAPES = {
    "tiny": _shape(4, 256, 1024, 8, 2, 2048),
    "1.1b": _shape(22, 2048, 5632, 32, 4, 32000),
    "minicpm": _shape(52, 1536, 3840, 24, 8, 73440),
    "7b": _shape(32, 4096, 11008, 32, 32, 32000),
    "13b": _shape(40, 5120, 13824, 40, 40, 32000),
    "70b": _shape(80, 8192, 28672, 64, 8, 32000),
}
THETA = Rope().theta
TOPICS, FIRST_TOPIC_ID = 16, 512
ROWS, TOKENS = 8, 96  # of the calibration
GAIN = 0.25  # RMS of what a half-layer adds, as a share of the stream's
PREDICTORS = "predictors.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the activity should be like."""

    active: float = 0.125  # share of neurons that fire per token
    hot: float = 0.23  # this share of the neurons ...
    cover: float = 0.80  # ... covers this share of the activations
    rank: int = 191  # of the gate, at most D/4
    noise: float = 0.25  # full-rank part of the gate
    seed: int = 0


def rms(x: F32) -> float:
    """The size of a stream: the mean over its tokens of their root mean squares."""
    return float(np.sqrt((x.astype(np.float64) ** 2).mean(-1)).mean())


def normed(x: F32, eps: float = 1e-5) -> F32:
    """RMS norm with unit weights."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def rotate(x: F32, theta: float) -> F32:
    """Rotary positions 0.. in the rotate-half form. x [B,T,N,H]."""
    length, size = x.shape[1], x.shape[-1]
    angle = np.arange(length)[:, None] / theta ** (np.arange(0, size, 2) / size)  # [T, H/2]
    cos, sin = (np.concatenate([f(angle)] * 2, -1).astype(np.float32)[None, :, None] for f in (np.cos, np.sin))
    return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin


def attend(x: F32, weights: dict[str, F32], spec: ModelSpec) -> F32:
    """Causal attention over the normed stream [B,T,D], before the output projection -> [B*T, D]."""
    rows, length, hidden = x.shape
    flat, size, shared = normed(x).reshape(-1, hidden), spec.head_dim, spec.heads // spec.kv_heads
    q, k, v = ((flat @ weights[name].T).reshape(rows, length, -1, size) for name in ("q", "k", "v"))
    q, k = rotate(q, THETA), rotate(k, THETA)
    future = np.triu(np.full((length, length), -1e30, np.float32), 1)
    mixed = np.empty((rows, length, spec.heads, size), np.float32)
    for row, head in np.ndindex(rows, spec.heads):
        scores = q[row, :, head] @ k[row, :, head // shared].T / np.sqrt(size) + future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[row, :, head] = (scores / scores.sum(-1, keepdims=True)) @ v[row, :, head // shared]
    return mixed.reshape(-1, hidden)


def topic_ids(rng: np.random.Generator, rows: int, tokens: int, vocab: int, stay: float = 0.85) -> npt.NDArray:
    """Random prompts [B,T]: each keeps to its own topic with probability `stay`."""
    ids = rng.integers(FIRST_TOPIC_ID, vocab, (rows, tokens))
    home = rng.integers(0, TOPICS, (rows, 1))
    at_home = ids - ids % TOPICS + home
    return np.where((rng.random((rows, tokens)) < stay) & (at_home < vocab), at_home, ids).astype(np.int64)


@dataclass(slots=True, eq=False)
class Tally:
    """Collects what each layer did: figures by name, one value a layer, and firing frequencies [F].

    active: share of neurons that fire per token; hot_80: share of them covering 80 % of the activations; adjacent
    and prompts: Jaccard distance of adjacent tokens, and of two prompts' hottest 20 %; cosine: of the stream with
    the layer before; recall, precision: of the layer's predictor, and `early_` when fed the layer before's stream.
    """

    figures: dict[str, list[float]] = field(default_factory=dict)
    frequency: list[F32] = field(default_factory=list)
    before: F32 | None = None  # the stream of the layer before

    def note(self, **values: float) -> None:
        """One more layer's value of each figure."""
        for name, value in values.items():
            self.figures.setdefault(name, []).append(float(value))

    def add(self, fires: npt.NDArray[np.bool_], x: F32) -> None:
        """fires [B,T,F] and the stream before the FFN norm, x [B*T,D]."""
        self.frequency.append(fires.mean((0, 1)).astype(np.float32))
        units = fires.shape[-1]
        covered = np.cumsum(np.sort(self.frequency[-1].astype(np.float64))[::-1])
        both = (fires[:, :-1] & fires[:, 1:]).sum(-1)
        either = np.maximum((fires[:, :-1] | fires[:, 1:]).sum(-1), 1)
        hot = [set(np.argsort(-row.mean(0), kind="stable")[: int(0.2 * units)]) for row in fires]
        pairs = [(hot[i], hot[j]) for i in range(len(hot)) for j in range(i)]
        self.note(
            active=fires.mean(),
            hot_80=np.searchsorted(covered, 0.8 * covered[-1]) / units,
            adjacent=(1 - both / either).mean(),
            prompts=np.mean([1 - len(a & b) / len(a | b) for a, b in pairs]),
        )
        if self.before is not None:
            lengths = np.linalg.norm(self.before, axis=-1) * np.linalg.norm(x, axis=-1)
            self.note(cosine=((self.before * x).sum(-1) / lengths).mean())
        self.before = x.copy()

    def means(self) -> dict[str, float]:
        """Over layers."""
        return {name: float(np.mean(values)) for name, values in self.figures.items()}

    def show(self, title: str) -> None:
        print(title)
        for name, values in self.figures.items():
            spread = f"mean {np.mean(values):.3f}  min {min(values):.3f}  max {max(values):.3f}"
            print(f"  {name:16}{spread}")


def firing_probabilities(ffn: int, recipe: Recipe, most: float = 0.5) -> npt.NDArray[np.float64]:
    """A power law over ranks, clipped, with the wanted mean and the best match of the wanted coverage. [F]"""
    ranks = (np.arange(ffn) + 1.0) / ffn
    best_error, best = np.inf, ranks
    for offset in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4):
        for exponent in np.linspace(0.3, 6, 58):
            law = (ranks + offset) ** -exponent
            scale, p = recipe.active / law.mean(), law
            for _ in range(20):
                p = np.minimum(scale * law, most)
                scale *= recipe.active / p.mean()
            error = abs(p[: int(recipe.hot * ffn)].sum() / p.sum() - recipe.cover)
            if error < best_error:
                best_error, best = error, p
    return np.maximum(best, 0.002)


class Shards:
    """Writes tensors as float16: one shard for the tables, one for every layer, and the index with the last."""

    def __init__(self, folder: Path, count: int):
        self._folder, self._count = folder, count
        self._tensors: dict[str, npt.NDArray[np.float16]] = {}
        self._home: dict[str, str] = {}
        self._written = self._total_bytes = 0

    def put(self, name: str, value: npt.NDArray) -> F32:
        """Keep a tensor for the current shard; -> the values as they will be read."""
        half = np.ascontiguousarray(value, dtype=np.float16)
        self._tensors[name] = half
        self._total_bytes += half.nbytes
        return half.astype(np.float32)

    def end_shard(self) -> None:
        """Write what was put since the last call."""
        from safetensors.numpy import save_file

        self._written += 1
        file = f"model-{self._written:05}-of-{self._count:05}.safetensors"
        save_file(self._tensors, self._folder / file, metadata={"format": "pt"})
        self._home |= dict.fromkeys(self._tensors, file)
        self._tensors = {}
        if self._written == self._count:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": self._home}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


class Builder:
    """Draws the weights of one model, layer after layer, while the calibration tokens pass through them."""

    def __init__(self, spec: ModelSpec, recipe: Recipe, shards: Shards):
        self.spec, self.recipe, self.shards, self.tally = spec, recipe, shards, Tally()
        self.predictors: dict[str, npt.NDArray[np.float16]] = {}
        self._rng = np.random.default_rng(recipe.seed)
        self._bias = np.full(spec.hidden, 1 / np.sqrt(spec.hidden), np.float32)
        self._probabilities = firing_probabilities(spec.ffn, recipe)
        self._x = self._tables()

    def _normal(self, *shape: int) -> F32:
        return self._rng.standard_normal(shape, dtype=np.float32)

    def _clear_bias(self, rows: F32) -> None:
        """Remove the bias from every row, in place."""
        rows -= np.outer(rows @ self._bias, self._bias)

    def _tables(self) -> F32:
        """Embedding (bias, topic and token, of RMS 0.5 together), head and last norm -> the calibration's [B,T,D]."""
        spec = self.spec
        topics = self._normal(TOPICS, spec.hidden)
        topics /= np.linalg.norm(topics, axis=-1, keepdims=True)
        topic_of = np.arange(spec.vocab) % TOPICS
        embed = self._normal(spec.vocab, spec.hidden)
        self._clear_bias(embed)
        embed *= 0.64 / np.linalg.norm(embed, axis=-1, keepdims=True)
        embed += 0.54 * topics[topic_of]
        self._clear_bias(embed)
        embed = ((embed + 0.55 * self._bias) * np.sqrt(spec.hidden).astype(np.float32) * 0.5).astype(np.float16)
        head = self._normal(spec.vocab, spec.hidden) * np.float32(1.2 / np.sqrt(spec.hidden))
        head += topics[topic_of] * 1.2
        self._clear_bias(head)
        self.shards.put("model.embed_tokens.weight", embed)
        self.shards.put("lm_head.weight", head)
        self.shards.put("model.norm.weight", np.ones(spec.hidden))
        self.shards.end_shard()
        return embed[topic_ids(self._rng, ROWS, TOKENS, spec.vocab)].astype(np.float32)

    def layer(self, index: int) -> None:
        """One layer: weights, predictor, statistics, and the stream carried through it."""
        at = f"model.layers.{index}."
        self._attention(at)
        h = normed(self._x).reshape(-1, self.spec.hidden)
        gate, predictor = self._gate(h)
        self.predictors |= {f"layers.{index}.{name}.weight": value for name, value in predictor.items()}
        self._ffn(at, h, gate)
        self.shards.end_shard()
        if not np.isfinite(self._x).all():
            raise RuntimeError(f"the stream after layer {index} is not finite: lower --active or --noise")

    def _attention(self, at: str) -> None:
        spec, hidden, keys, weights = self.spec, self.spec.hidden, self.spec.kv_heads * self.spec.head_dim, {}
        for name, rows, scale in (("q", hidden, 1.3), ("k", keys, 1.3), ("v", keys, 1.0)):
            drawn = self._normal(rows, hidden) * np.float32(scale / np.sqrt(hidden))
            weights[name] = self.shards.put(f"{at}self_attn.{name}_proj.weight", drawn)
        self._add(f"{at}self_attn.o_proj.weight", attend(self._x, weights, spec), hidden)
        self.shards.put(f"{at}input_layernorm.weight", np.ones(hidden))
        self.shards.put(f"{at}post_attention_layernorm.weight", np.ones(hidden))

    def _gate(self, h: F32) -> tuple[F32, dict[str, npt.NDArray[np.float16]]]:
        """Gate rows [F,D] that fire on h [B*T,D] as often as they should, and the predictor that knows them."""
        spec, noise = self.spec, self.recipe.noise
        rank = min(self.recipe.rank, spec.hidden // 4)
        basis = np.linalg.qr(self._normal(spec.hidden, rank))[0].T  # [R,D]
        basis = basis - np.outer(basis @ self._bias, self._bias)
        mix = self._normal(spec.ffn, rank) * np.sqrt(1.0 / rank).astype(np.float32)  # [F,R]
        gate = mix @ basis * np.sqrt(1 - noise**2).astype(np.float32)
        gate += self._normal(spec.ffn, spec.hidden) * np.float32(noise / np.sqrt(spec.hidden))
        self._clear_bias(gate)
        wanted = self._rng.permutation(self._probabilities)
        beta = _quantile(h @ gate.T / (h @ self._bias)[:, None], 1 - wanted)
        gate = gate - np.outer(beta, self._bias)
        first = np.concatenate([basis, self._bias[None]], 0)  # relu(z) - relu(-z) = z: an exact product of two
        second = np.concatenate([mix * np.sqrt(1 - noise**2), -beta[:, None]], 1)
        padding = -(2 * (rank + 1)) % 64
        fc1 = np.concatenate([first, -first, np.zeros((padding, spec.hidden))], 0)
        fc2 = np.concatenate([second, -second, np.zeros((spec.ffn, padding))], 1)
        return gate, {"fc1": fc1.astype(np.float16), "fc2": fc2.astype(np.float16)}

    def _ffn(self, at: str, h: F32, gate: F32) -> None:
        spec = self.spec
        gate = self.shards.put(f"{at}mlp.gate_proj.weight", gate)
        drawn = self._normal(spec.ffn, spec.hidden) / np.sqrt(np.float32(spec.hidden))
        up = self.shards.put(f"{at}mlp.up_proj.weight", drawn)
        pre = h @ gate.T
        z = np.maximum(pre, 0) * (h @ up.T)
        self.tally.add((pre > 0).reshape(ROWS, TOKENS, -1), self._x.reshape(-1, spec.hidden))
        self._add(f"{at}mlp.down_proj.weight", z, spec.ffn)

    def _add(self, name: str, inner: F32, columns: int) -> None:
        """Draw an output projection [D, columns], scale it to GAIN, and add its product with `inner` to the stream."""
        weight = self._normal(self.spec.hidden, columns) / np.sqrt(np.float32(columns))
        weight = weight - np.outer(self._bias, self._bias @ weight)
        scale = GAIN * rms(self._x) / max(rms(inner @ weight.T), 1e-12)
        weight = self.shards.put(name, weight * np.float32(scale))
        self._x = self._x + (inner @ weight.T).reshape(self._x.shape)


def _quantile(values: F32, share: npt.NDArray[np.float64]) -> F32:
    """Column i of values [n,F] at its own share[i], interpolated. Sorts `values` in place. -> [F]"""
    values.sort(axis=0)
    at = np.clip(share * (len(values) - 1), 0, len(values) - 1)
    low, column = at.astype(np.int64), np.arange(values.shape[1])
    high = np.minimum(low + 1, len(values) - 1)
    weight = (at - low).astype(np.float32)
    return values[low, column] * (1 - weight) + values[high, column] * weight


def build(folder: Path, spec: ModelSpec, recipe: Recipe) -> Tally:
    """Write the whole folder, config and statistics last; -> what the calibration tokens showed."""
    from safetensors.numpy import save_file

    from dynajax.checkpoint import Checkpoint, write_stats

    folder.mkdir(parents=True, exist_ok=True)
    builder = Builder(spec, recipe, Shards(folder, spec.layers + 1))
    for layer in range(spec.layers):
        builder.layer(layer)
    save_file(builder.predictors, folder / PREDICTORS)
    (folder / "config.json").write_text(json.dumps(config_of(spec, recipe), indent=1), encoding="utf-8")
    frequency, fingerprint = np.stack(builder.tally.frequency), Checkpoint.open(folder).fingerprint()
    write_stats(folder / "activations.npz", fingerprint=fingerprint, frequency=frequency, tokens=ROWS * TOKENS)
    return builder.tally


def config_of(spec: ModelSpec, recipe: Recipe) -> dict[str, object]:
    """config.json of a folder."""
    sizes = {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions,
    }
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "relu", "dtype": spec.dtype}
    numbers = {"rms_norm_eps": spec.norm_eps, "rope_theta": THETA, "bos_token_id": 1, "eos_token_id": 2}
    return {**kind, **sizes, **numbers, "tie_word_embeddings": False, "synthetic": asdict(recipe)}


def check(folder: Path, rows: int = 6, tokens: int = 64, seed: int = 99) -> Tally:
    """A plain forward of the written weights on tokens never seen in the calibration."""
    from safetensors.numpy import load_file

    from dynajax.checkpoint import Checkpoint

    checkpoint, predictors, tally = Checkpoint.open(folder), load_file(folder / PREDICTORS), Tally()
    spec = checkpoint.spec
    units = np.empty((spec.ffn, 3, 1, spec.hidden), np.float32)
    x = checkpoint.embed("float32")[topic_ids(np.random.default_rng(seed), rows, tokens, spec.vocab)]
    for layer in range(spec.layers):
        weights = checkpoint.attention(layer, "float32")
        x = x + (attend(x, weights, spec) @ weights["o"].T).reshape(x.shape)
        flat, h = x.reshape(-1, spec.hidden), normed(x).reshape(-1, spec.hidden)
        checkpoint.fill_bundle(layer, units)
        gate, up, down = units[:, 0, 0], units[:, 1, 0], units[:, 2, 0]
        pre = h @ gate.T
        fc1, fc2 = (predictors[f"layers.{layer}.{name}.weight"].astype(np.float32) for name in ("fc1", "fc2"))
        for kind, stream in (("", flat), ("early_", tally.before)):
            if stream is not None:
                said = np.maximum(stream @ fc1.T, 0) @ fc2.T > 0
                right = (said & (pre > 0)).sum()
                tally.note(**{f"{kind}recall": right / (pre > 0).sum(), f"{kind}precision": right / max(said.sum(), 1)})
        tally.add((pre > 0).reshape(rows, tokens, spec.ffn), flat)
        x = x + ((np.maximum(pre, 0) * (h @ up.T)) @ down).reshape(x.shape)
    return tally


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="1.1b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer or more than the shape has")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--check", action="store_true", help="only report the statistics of a folder that is there")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    if not args.check:
        if args.folder.exists() and any(args.folder.iterdir()):
            parser.error(f"{args.folder} is not empty: choose a new folder")
        spec, recipe = SHAPES[args.shape], Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
        build(args.folder, replace(spec, layers=args.layers or spec.layers), recipe).show("on the calibration tokens:")
    tally = check(args.folder)
    tally.show("on fresh tokens:")
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"folder": str(args.folder), "seconds": seconds, **tally.means()}))


if __name__ == "__main__":
    main()
