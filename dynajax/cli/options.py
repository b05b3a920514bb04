"""The flags, declared once. A group is a frozen dataclass; `flat` turns a command's groups into its flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer

from dynajax.config import EngineConfig, HostMode, PolicyName, Sparsity, StagingName, WeightDType
from dynajax.config.engine import AssignName, CacheName, HostDense, PrefetchName

DEFAULT_MODEL = "tiny-relullama"


def _one_of(*names: str) -> str:
    return "|".join(names)


DTYPES = _one_of("auto", *get_args(WeightDType))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """What every command takes that plans or loads a model."""

    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|FOLDER|FILE.gguf|USER/REPO[@REVISION]",
            help="A short name, a local folder or file, or a repository on the Hugging Face hub.",
        ),
    ] = DEFAULT_MODEL
    vram_budget: Annotated[
        str,
        typer.Option(
            metavar="auto|8GiB|600MiB|900KiB|0.85", help="Device memory to use: what is free, a size, a share of it."
        ),
    ] = "auto"
    ctx: Annotated[int | None, typer.Option(metavar="N", help="Tokens the KV cache holds per row.")] = None
    batch: Annotated[int, typer.Option(metavar="N", help="Rows the KV cache holds.")] = 1
    sparsity: Annotated[
        str,
        typer.Option(
            metavar=_one_of(*get_args(Sparsity)),
            help="Compute every neuron, skip those that are zero, or also those predicted to be.",
        ),
    ] = "auto"
    policy: Annotated[
        str, typer.Option(metavar=_one_of(*get_args(PolicyName)), help="Which neurons or experts live on the device.")
    ] = "auto"
    assign: Annotated[
        str,
        typer.Option(metavar=_one_of(*get_args(AssignName)), help="Experts: who computes which; auto: the policy's."),
    ] = "auto"
    cache: Annotated[
        str, typer.Option(metavar=_one_of(*get_args(CacheName)), help="Experts: which stay; auto: the policy's.")
    ] = "auto"
    prefetch: Annotated[
        str,
        typer.Option(
            metavar=_one_of(*get_args(PrefetchName)), help="Experts: what foretells them; auto: the policy's."
        ),
    ] = "auto"
    stats: Annotated[
        str, typer.Option(metavar="auto|none|FILE", help="Activation statistics that decide the placement.")
    ] = "auto"
    dtype: Annotated[str, typer.Option(metavar=DTYPES, help="Type of weights and cache on the device.")] = "auto"
    host_dtype: Annotated[str, typer.Option(metavar=DTYPES, help="Type of the FFN weights in host memory.")] = "auto"
    host_mode: Annotated[
        str, typer.Option(metavar=_one_of(*get_args(HostMode)), help="How the host's share of the FFN is called.")
    ] = "auto"
    host_dense: Annotated[
        str, typer.Option(metavar=_one_of(*get_args(HostDense)), help="What multiplies experts on the host.")
    ] = "own"
    threads: Annotated[int | None, typer.Option(metavar="N", help="Host threads; physical cores if not given.")] = None
    predictor: Annotated[
        str,
        typer.Option(
            metavar="auto|mlp|gate|none|FOLDER",
            help="Guesses which neurons are needed: trained ones, low-bit copies of the gates, or nothing.",
        ),
    ] = "auto"
    staging: Annotated[
        str,
        typer.Option(metavar=_one_of(*get_args(StagingName)), help="How neurons or experts are sent to the device."),
    ] = "auto"
    set: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A constant of the policy; repeatable.")
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Equal runs, bit for bit, for the same --threads, at the price of waiting for plans.",
        ),
    ] = False
    offline: Annotated[
        bool, typer.Option("--offline", help="Never touch the network: models from folders and the cache only.")
    ] = False

    def config(self) -> EngineConfig:
        """The engine's settings; UsageError names the first flag that is out of range."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        values["set"] = tuple(self.set or ())
        return EngineConfig(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """How a command reports. `debug` is read from the command line by `errors.run`, even if parsing fails."""

    json: Annotated[bool, typer.Option("--json", help="One JSON object on the last line of stdout.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the fields of its dataclass parameters as parameters of its own, as typer reads them.

    plan(ctx, engine: EngineFlags, output: OutputFlags) becomes plan(ctx, *, model="...", ..., json=False, debug=False).
    """
    hints = get_type_hints(command)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    plain = [p for name, p in inspect.signature(command, eval_str=True).parameters.items() if name not in groups]

    def run(**values: Any) -> None:
        built = {name: group(**{f.name: values.pop(f.name) for f in fields(group)}) for name, group in groups.items()}
        command(**values, **built)

    flags = [flag for group in groups.values() for flag in _flags_of(group)]
    run.__dict__["__signature__"] = inspect.Signature([*plain, *flags])
    run.__doc__ = command.__doc__
    return run


def _flags_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]
