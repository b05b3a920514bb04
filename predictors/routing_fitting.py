"""One step of training what is added to a layer's input before a later layer's frozen router reads it.

The loss is about order alone (RankNet, Burges et al. 2005): every expert that a token goes to is to stand before every
other one. On tiny-moe it finds more than the divergence of the routers' probabilities, or than cross-entropy of the
chosen set, does (docs/predictors.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from dynajax.config import ModelSpec, RouterSpec
from dynajax.ops.routing import route, router_logits
from predictors.fitting import Settings, make_optimizer
from predictors.routing import corrected

Tree = dict[str, Any]
Router = Mapping[
    str, Any
]  # router [E, D] and, if there, router_bias and selection_bias [E]; as `RoutingBlock` has them
RANKS = (32, 128)
SHARP = 4.0  # slope of the loss, over the spread of a token's scores
ROUTER_NAMES = ("router", "router_bias", "selection_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """What of a ModelSpec these predictors depend on; static under jit."""

    layers: tuple[int, ...]  # of the decoder, those that have experts
    hidden: int
    router: RouterSpec

    @classmethod
    def of(cls, spec: ModelSpec) -> RoutingShape:
        assert spec.experts is not None, "a dense model routes nothing"
        return cls(layers=spec.experts.layers, hidden=spec.hidden, router=spec.experts.router)

    @property
    def experts(self) -> int:
        return self.router.experts

    @property
    def top_k(self) -> int:
        return self.router.top_k


def rate_of(hidden: int) -> float:
    """A learning rate for vectors of that many numbers: what served 192 of them, falling with the root of more."""
    return 4e-3 * min(1.0, (256 / hidden) ** 0.5)


def scores(h: jax.Array, leaves: Router, router: RouterSpec) -> jax.Array:
    """By what a router ranks experts: h [T, D] -> [T, E]. Its groups are left out."""
    logits = router_logits(h, leaves["router"], leaves.get("router_bias"), router)
    bias = leaves.get("selection_bias")
    if bias is None:
        return logits
    given = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    return (logits if router.score == "chosen" else given) + bias.astype(jnp.float32)[None, :]


def chosen(h: jax.Array, correction: Sequence[jax.Array], leaves: Router, router: RouterSpec) -> jax.Array:
    """Where h [T, D], corrected, would go: experts [T, K] int32. What `programs.mixture_bodies.foretell` computes."""
    logits = router_logits(corrected(h, *correction), leaves["router"], leaves.get("router_bias"), router)
    return route(logits, leaves.get("selection_bias"), router)[0]


def ranking_loss(z: jax.Array, live: jax.Array, sharp: jax.Array, top_k: int) -> jax.Array:
    """Mean over tokens and pairs of softplus(sharp (z_other - z_live)) / sharp; z [T, E], live bool [T, E]."""
    _, members = jax.lax.top_k(live.astype(jnp.float32), top_k)
    ahead = jnp.take_along_axis(z, members, axis=1)[:, :, None] - z[:, None, :]  # [T, K, E]
    pairs = jax.nn.softplus(-sharp * ahead) * ~live[:, None, :]
    others = max(1, z.shape[1] - top_k)
    return jnp.sum(pairs) / (sharp * (z.shape[0] * top_k * others))


def start(shape: RoutingShape, rank: int, rng: np.random.Generator) -> Tree:
    """What is trained, at step 0: it adds nothing to the residual."""
    return {
        "shift": np.zeros(shape.hidden, np.float32),
        "down": rng.standard_normal((rank, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5),
        "up": np.zeros((shape.hidden, rank), np.float32),
    }


def fixed(shape: RoutingShape) -> Tree:
    """Neutral values of what is measured before the first step: the sizes of an element of input and output, the
    residual, the slope of the loss."""
    one = np.ones((), np.float32)
    return {"size_in": one, "size_out": one.copy(), "shift": np.zeros(shape.hidden, np.float32), "sharp": one.copy()}


def folded(trained: Tree, known: Tree) -> Tree:
    """shift [D], down [r, D] and up [D, r] as `corrected` takes them."""
    return {
        "shift": known["shift"] + known["size_out"] * trained["shift"],
        "down": trained["down"] / known["size_in"],
        "up": known["size_out"] * trained["up"],
    }


def make_update(shape: RoutingShape, settings: Settings) -> Callable:
    """Jitted: (trained, states, known, router, x float16 [B, D], scale [B], live [B, E/8]) -> trained, states.

    trained and states: one a rank, donated; each rank is a training of its own. All layers share the program.
    """
    optimizer = make_optimizer(settings)

    def loss(tree, known, leaves, x, live):
        arrays = folded(tree, known)
        guess = corrected(x, arrays["shift"], arrays["down"], arrays["up"])
        return ranking_loss(scores(guess, leaves, shape.router), live, known["sharp"], shape.top_k)

    def update(trained, states, known, leaves, x, scale, bits):
        live = jnp.unpackbits(bits, axis=1, count=shape.experts, bitorder="little").astype(bool)
        x32 = x.astype(jnp.float32) * scale[:, None]
        new, kept = {}, {}
        for rank, tree in trained.items():
            grads = jax.grad(loss)(tree, known, leaves, x32, live)
            updates, kept[rank] = optimizer.update(grads, states[rank], tree)
            new[rank] = optax.apply_updates(tree, updates)
        return new, kept

    return jax.jit(update, donate_argnums=(0, 1))


# --- how good ---------------------------------------------------------------------------------------------------------


def recall_of(ids: npt.NDArray[np.integer], live: npt.NDArray[np.bool_]) -> float:
    """Share of the experts that tokens go to, live [N, E], among those predicted [N, K]."""
    return float(np.take_along_axis(live, ids, axis=1).sum() / live.sum())


def top1_of(ids: npt.NDArray[np.integer], live: npt.NDArray[np.bool_], batch: int, seed: int) -> float | None:
    """How often the expert predicted to have most tokens has most: batches of random tokens; None: there are too few.

    ids [N, K] and live [N, E]; of equal ones predicted the one of lower number.
    """
    batches = len(ids) // batch
    if not batches:
        return None
    order = np.random.default_rng(seed).permutation(len(ids))[: batches * batch]
    tokens = live[order].reshape(batches, batch, -1).sum(axis=1)
    expected = np.zeros_like(tokens)
    np.add.at(expected, (np.arange(batches)[:, None], ids[order].reshape(batches, -1)), 1)
    first = expected.argmax(axis=1)
    return float((tokens[np.arange(batches), first] == tokens.max(axis=1)).mean())
