"""One step of training one layer's predictor, and how what is trained becomes what is used.

Trained numbers are relative to `unit`, the size of an element of an mlp's input or of what a corrector is to give,
measured before the first step, so one learning rate fits every model. `folded` gives the numbers that
`scoring.scores` takes: training goes through the function that is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from predictors.forms import Form, Shape
from predictors.mlp import mlp_start
from predictors.scoring import scores

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The recipe. Defaults follow the paper (tokens, of as many samples of text) and Deja Vu (balance, decay, held-out
    share); rate and passes are ours.

    Live neurons weigh 1 in the loss, others the batch's density + balance. AdamW, cosine schedule to zero at the end
    of `tokens`. passes: how often each token is used, as far as the shuffle buffer remembers it. Of every `span` tokens
    x 1 / held_share one span is held out. buffer_bytes: of all tokens kept, three quarters to train on.
    """

    tokens: int = 700_000
    samples: int = 2_000
    batch: int = 512
    passes: int = 4
    buffer_bytes: int = 2**30
    held_share: float = 0.05
    span: int = 256
    rate: float = 2e-3
    warmup: int = 50
    decay: float = 0.01
    balance: float = 0.005
    goal: float = 0.95  # recall at 1.6 x density (silu: 1.0) that `selection.choose` is content with

    def __post_init__(self) -> None:
        for name in ("tokens", "samples", "batch", "passes", "span"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if not 0 < self.held_share <= 0.5:
            raise ValueError(f"held_share must be above 0 and at most 0.5, got {self.held_share}")

    @property
    def sample_tokens(self) -> int:
        """The length to which texts are to be cut, so that `samples` of them give `tokens`."""
        return max(1, self.tokens // self.samples)

    @property
    def steps(self) -> int:
        """Until the schedule ends."""
        return max(1, round(self.tokens * (1 - self.held_share) / self.batch) * self.passes)


def start(shape: Shape, form: Form, rng: np.random.Generator) -> Tree:
    """What is trained, at step 0: an mlp that knows nothing, or a corrector that changes nothing."""
    if form.kind == "mlp":
        return dict(mlp_start(shape, form.rank, rng))
    narrow = rng.standard_normal((form.rank, shape.hidden), np.float32) * np.float32(shape.hidden**-0.5)
    return {
        "shift": np.zeros(shape.hidden, np.float32),
        "narrow": narrow,
        "wide": np.zeros((shape.hidden, form.rank), np.float32),
        "slope": np.zeros((), np.float32),
        "intercept": np.zeros((), np.float32),
    }


def fixed(shape: Shape) -> Tree:
    """Neutral values of what is measured before the first step: a size, a shift, a first calibration."""
    one, none = np.ones((), np.float32), np.zeros((), np.float32)
    return {"unit": one, "shift": np.zeros(shape.hidden, np.float32), "slope": one.copy(), "intercept": none}


def folded(form: Form, trained: Tree, known: Tree) -> Tree:
    """The arrays that a folder keeps and `scores` reads."""
    if form.kind == "mlp":
        return {"fc1": trained["fc1"] / known["unit"], "fc2": trained["fc2"]}
    return {
        "shift": known["shift"] + known["unit"] * trained["shift"],
        "narrow": trained["narrow"],
        "wide": known["unit"] * trained["wide"],
    }


def loss_of(logits: jax.Array, live: jax.Array, balance: float) -> jax.Array:
    """Balanced binary cross-entropy, mean over [B, F]: weight 1 where live, density + balance elsewhere."""
    target = live.astype(jnp.float32)
    weight = jnp.where(live, jnp.float32(1), jnp.mean(target) + jnp.float32(balance))
    return jnp.mean(weight * optax.losses.sigmoid_binary_cross_entropy(logits, target))


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    def matrices(params: Tree) -> Tree:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    warmup = min(settings.warmup, settings.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, settings.rate, warmup, settings.steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=settings.decay, mask=matrices)
    )


def make_update(shape: Shape, form: Form, settings: Settings) -> Callable:
    """Jitted: (trained, optimizer state, known, base, x float16 [B, D], scale [B], live [B, F/8]) -> both new, loss.

    trained and the optimizer's state are donated. base: what `gate_params` gives, or nothing. Layers of one shape
    share the program.
    """
    optimizer = make_optimizer(settings)

    def update(trained, state, known, base, x, scale, bits):
        live = jnp.unpackbits(bits, axis=1, count=shape.ffn, bitorder="little").astype(bool)
        x32 = x.astype(jnp.float32) * scale[:, None]

        def loss(trained):
            z = scores({**base, **folded(form, trained, known)}, x32, shape, form)
            if form.kind == "gate":
                slope = known["slope"] * jnp.exp(trained["slope"])
                z = z * slope + known["intercept"] + trained["intercept"]
            return loss_of(z, live, settings.balance)

        value, grads = jax.value_and_grad(loss)(trained)
        updates, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state, value

    return jax.jit(update, donate_argnums=(0, 1))


def rounded(tree: Tree, entry_arrays: dict[str, tuple[tuple[int, ...], bool]], dtype: np.dtype) -> Tree:
    """The arrays as a folder holds them: matrices in `dtype`, vectors float32."""
    kinds = {name: dtype if is_matrix else np.dtype(np.float32) for name, (_, is_matrix) in entry_arrays.items()}
    return {name: np.asarray(value).astype(kinds[name]) for name, value in tree.items()}


def widened(tree: Tree) -> dict[str, npt.NDArray[np.float32]]:
    """Those arrays as float32, to be measured with."""
    return {name: value.astype(np.float32) for name, value in tree.items()}
