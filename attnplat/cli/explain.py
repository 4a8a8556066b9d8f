"""`attnplat explain`: which backend each layer would use, why, and why not the others."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from attnplat.cli.main import EXIT_NO, EXIT_OK
from attnplat.cli.tables import print_table
from attnplat.config.layer import LayerConfig, config_class
from attnplat.config.names import Feature, Operation, parse_name
from attnplat.config.run import RunContext
from attnplat.config.serial import layer_from_dict
from attnplat.errors import ConfigError, ConflictError
from attnplat.platforms import current_platform, platform_for
from attnplat.platforms.explain import describe, describe_device, plan_remarks
from attnplat.platforms.planning import ModelPlan, PlannedLayer, changes_since
from attnplat.platforms.platform import Platform

# Options that describe one layer, and the config fields they set.
_LAYER_OPTIONS = {
    "head_size": int,
    "v_head_size": int,
    "num_heads": int,
    "num_kv_heads": int,
    "dtype": str,
    "kv_cache_dtype": str,
    "block_size": int,
    "attn_type": str,
    "role": str,
    "logits_soft_cap": float,
    "chunk_size": int,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="such as rocm:gfx950, sm90, cpu:amx; repeat for several; default this machine",
    )
    parser.add_argument(
        "--assume-packages",
        metavar="PROFILE",
        help="packages of a simulated device: all (default), installed, minimal, or a profile",
    )
    parser.add_argument(
        "--model", metavar="CONFIG", help="a config.json, its folder, or a known shape"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks")
    layer = parser.add_argument_group("one layer, when no model is given")
    layer.add_argument("--layer", metavar="JSON", help="the layer config as a JSON object")
    layer.add_argument("--operation", choices=[str(o) for o in Operation], help="default mha")
    for name, kind in _LAYER_OPTIONS.items():
        layer.add_argument("--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper())
    layer.add_argument("--sliding-window", type=int, metavar="W", help="a model's window in tokens")
    layer.add_argument("--sinks", action="store_true", help="one learned logit per head")
    layer.add_argument("--alibi", action="store_true", help="linear position biases")
    layer.add_argument(
        "--need", action="append", default=[], metavar="FEATURE", help="a further want"
    )
    parser.add_argument("--allow-reference", action="store_true", help="let REFERENCE be chosen")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="results independent of mates"
    )
    parser.add_argument("--diff", metavar="OLD.json", help="what changed since an earlier --json")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the decisions; 1 when some layer has no backend on some device."""
    asked = _asked(args)
    layers = list(asked.layers)
    platforms = list(_platforms(args))
    plans = [
        p.plan_model(
            layers,
            args.attention,
            run=_run_context(p, args, asked),
            allow_reference=args.allow_reference,
        )
        for p in platforms
    ]
    report = [
        {"device": str(p.device), **plan.to_dict()}
        for p, plan in zip(platforms, plans, strict=True)
    ]
    if args.diff is not None:
        _print_changes(args.diff, report, args.json)
    elif args.json:
        print(json.dumps(report, indent=2, sort_keys=True))
    elif len(platforms) > 1:
        _print_matrix(platforms, layers, plans)
    elif args.model is not None:
        print(f"{args.model} on {describe_device(plans[0].layers[0].selection)}")
        print(plans[0].explain())
    else:
        print(plans[0].layers[0].selection.explain())
    if not args.json:
        for note in asked.notes:
            print(f"note: {note}")
    return EXIT_OK if all(plan.ok for plan in plans) else EXIT_NO


def _platforms(args: argparse.Namespace) -> Iterator[Platform]:
    if not args.device:
        if args.assume_packages:
            raise ConfigError("--assume-packages goes with --device; this machine's are known")
        yield current_platform()
    for name in args.device or ():
        yield platform_for(name, assume=args.assume_packages)


class Asked(NamedTuple):
    """What is to be explained: layers, what their model says of the run, and remarks."""

    layers: tuple[LayerConfig, ...]
    facts: Mapping[str, Any] = {}
    notes: tuple[str, ...] = ()


def _run_context(platform: Platform, args: argparse.Namespace, asked: Asked) -> RunContext:
    facts = {"tp_size": args.tensor_parallel, **asked.facts}
    if args.batch_invariant:
        facts["batch_invariant"] = True
    return replace(platform.run, **facts)


def _asked(args: argparse.Namespace) -> Asked:
    single = _single_layer_options(args)
    if args.model is not None:
        given = set(single) - {"dtype", "kv_cache_dtype", "block_size"}
        if given or args.layer:
            raise ConflictError(
                f"--model and {_option(min(given)) if given else '--layer'} both describe layers; "
                "give one of the two"
            )
        return _model_layers(args, single)
    if args.layer is not None:
        if single:
            raise ConflictError(f"--layer and {_option(min(single))} both describe the layer")
        return Asked((layer_from_dict(_json_object(args.layer)),))
    if "head_size" not in single:
        raise ConfigError("say what to explain: --model, --layer, or at least --head-size")
    operation = parse_name(Operation, args.operation or Operation.MHA, "operation")
    _check_fields(operation, single)
    return Asked((config_class(operation)(**single),))


def _single_layer_options(args: argparse.Namespace) -> dict[str, Any]:
    values = {n: getattr(args, n) for n in _LAYER_OPTIONS if getattr(args, n) is not None}
    if args.sliding_window is not None:
        if args.sliding_window < 1:
            raise ConfigError(
                f"--sliding-window is {args.sliding_window}; it takes 1 or more tokens"
            )
        values["sliding_window"] = (args.sliding_window - 1, -1)
    values |= {name: True for name in ("sinks", "alibi") if getattr(args, name)}
    if args.need:
        values["also_needs"] = frozenset(parse_name(Feature, n, "feature") for n in args.need)
    return values


def _check_fields(operation: Operation, values: dict[str, Any]) -> None:
    known = config_class(operation).__dataclass_fields__
    for name in values:
        if name not in known:
            raise ConfigError(f"{_option(name)} says nothing of the operation {operation}")


def _model_layers(args: argparse.Namespace, given: dict[str, Any]) -> Asked:
    from attnplat.models import layer_groups, load_config, run_facts

    groups = layer_groups(load_config(args.model), tensor_parallel=args.tensor_parallel, **given)
    layers = tuple(g.config.replace(label=f"{g.label} x {g.count}") for g in groups)
    notes = dict.fromkeys(f"{g.label}: {note}" for g in groups for note in g.notes)
    return Asked(layers, run_facts(groups), tuple(notes))


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--layer takes a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--layer takes a JSON object, not {text!r}")
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _print_matrix(
    platforms: list[Platform], layers: list[LayerConfig], plans: list[ModelPlan]
) -> None:
    rows = []
    for index, layer in enumerate(layers):
        rows.append([describe(layer), *(_cell(plan.layers[index]) for plan in plans)])
    shared = [f"{p.layout}, block {p.block_size}" if p.layout else "" for p in plans]
    rows.append(["KV cache", *shared])
    print_table(rows, ["layer", *(f"{p.device.platform}:{p.device.arch}" for p in platforms)])
    for platform, plan in zip(platforms, plans, strict=True):
        told = plan_remarks(plan)
        if told:
            print("\n".join(["", f"{platform.device.platform}:{platform.device.arch}:", *told]))


def _cell(layer: PlannedLayer) -> str:
    if layer.backend is None:
        return "none"
    parts = [f"{name} {part.chosen}" for name, part in layer.selection.parts.items()]
    mark = layer.selection.proof(layer.backend).mark
    return f"{layer.backend} [{mark}]" + (f" ({', '.join(parts)})" if parts else "")


def _print_changes(path: str, report: list[dict[str, Any]], as_json: bool) -> None:
    old = {entry.get("device"): entry for entry in _read_report(path)}
    changes = {
        entry["device"]: changes_since(old.get(entry["device"], {}), entry) for entry in report
    }
    if as_json:
        print(json.dumps(changes, indent=2, sort_keys=True))
        return
    for device, lines in changes.items():
        print(f"{device}: {'no change' if not lines else ''}".rstrip())
        for line in lines:
            print(f"  {line}")


def _read_report(path: str) -> list[dict[str, Any]]:
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--diff {path!r}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--diff {path!r} is not JSON: {error}") from None
    if not isinstance(report, list) or not all(_is_plan(entry) for entry in report):
        raise ConfigError(f"--diff {path!r} is not what `attnplat explain --json` writes")
    return report


def _is_plan(entry: Any) -> bool:
    layers = entry.get("layers") if isinstance(entry, dict) else None
    return isinstance(layers, list) and all(
        isinstance(layer, dict)
        and {"layer", "planned", "chosen"} <= layer.keys()
        and isinstance(layer["layer"], dict)
        for layer in layers
    )
