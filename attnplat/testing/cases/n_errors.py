"""N: errors, not wrong answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import LayerConfig
from attnplat.config.names import Feature
from attnplat.errors import (
    AttnplatError,
    ConfigError,
    HostLengthsNeededError,
    PlanMismatchError,
    UnsupportedCallError,
)
from attnplat.testing.bench import Bench, layers, raises
from attnplat.testing.case import CaseList, Check, Checks, Failed, Refused
from attnplat.testing.inputs import edges, normal
from attnplat.testing.scenes import Scene
from attnplat.testing.stage import Stage
from attnplat.testing.terrain import Terrain

N = CaseList("N", "errors, not wrong answers")

LENS = ([1, 3], [20, 5])


@N.case(1, "What an implementation does not take it refuses when created, and names it")
def _(t: Terrain) -> Checks:
    kinds = (t.layer(), t.latent(), t.sparse(), t.expanded())

    def features(bench: Bench) -> None:
        impl = bench.subject.impl
        own = _taken(bench, kinds)
        for feature in sorted(set(Feature) - impl.features):
            config = own.replace(also_needs={feature})
            error = raises(
                f"a layer that wants {feature}",
                ConfigError,
                lambda config=config: impl.create(config, bench.device),
            )
            if feature.value not in str(error):
                raise Failed(f"the refusal of {feature} does not name it: {error}")

    yield Check((), features, "features")

    def operations(bench: Bench) -> None:
        impl = bench.subject.impl
        _taken(bench, kinds)
        for config in kinds:
            if config.operation in impl.operations:
                continue
            error = raises(
                f"a layer of {config.operation}",
                ConfigError,
                lambda config=config: impl.create(config, bench.device),
            )
            if config.operation.value not in str(error):
                raise Failed(f"the refusal of {config.operation} does not name it: {error}")

    yield Check((), operations, "operations")

    def encodings(bench: Bench) -> None:
        from attnplat.backends.formats.encodings import Encoding

        impl = bench.subject.impl
        own = _taken(bench, kinds)
        for encoding in sorted(set(Encoding) - impl.encodings):
            create = partial(impl.create, own, bench.device, encoding=encoding)
            error = raises(f"a cache of {encoding}", AttnplatError, create)
            if encoding.value not in str(error):
                raise Failed(f"the refusal of {encoding} does not name it: {error}")

    yield Check((), encodings, "encodings")
    yield Check((), _unknown_heads(t), "head counts unknown")


def _taken(bench: Bench, configs: Sequence[LayerConfig]) -> LayerConfig:
    """The first layer of an operation that the implementation runs."""
    operations = bench.subject.impl.operations
    for config in configs:
        if config.operation in operations:
            return config
    raise Refused("runs no attention")


def _unknown_heads(t: Terrain) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        config = t.layer(num_heads=None)
        _taken(bench, (t.layer(), t.latent(), t.sparse(), t.expanded()))
        raises(
            "a layer of unknown heads",
            ConfigError,
            lambda: bench.subject.impl.create(config, bench.device),
        )

    return run


Wrong = Callable[[Stage], dict[str, Any]]


def _refuses(scene: Scene, t: Terrain, wrong: dict[str, Wrong], errors: type[Exception]) -> Check:
    """`forward` refuses each call changed so, names the tensor, and has written nothing."""

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="fused"), impl)
        plan = impl.plan(stage.batch, stage.pages)
        for what, change in wrong.items():
            given: dict[str, Any] = {
                "q": stage.q,
                "cache": stage.cache,
                "kv": stage.kv,
                "out": stage.out,
                **stage.options,
                **change(stage),
            }
            q, cache = given.pop("q"), given.pop("cache")
            error = raises(
                what,
                errors,
                lambda q=q, cache=cache, given=given: impl.forward(plan, q, cache, **given),
            )
            if what.split()[0] not in str(error):
                raise Failed(f"the error about {what} does not name it: {error}")
        if touched := stage.touched():
            raise Failed(f"a refused call wrote: {touched}")

    return Check(layers(scene), run, ", ".join(wrong))


@N.case(2, "A tensor that the layer did not declare is refused, not ignored")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), *LENS)
    heads = scene.rules.num_heads

    def per_head(stage: Stage) -> torch.Tensor:
        return torch.zeros(heads, device=stage.q.device)

    wrong: dict[str, Wrong] = {
        "sinks not declared": lambda s: {"sinks": per_head(s)},
        "alibi_slopes not declared": lambda s: {"alibi_slopes": per_head(s)},
        "position_bias not declared": lambda s: {
            "position_bias": torch.zeros(heads, 8, 32, device=s.q.device)
        },
        "topk_indices not declared": lambda s: {
            "topk_indices": torch.zeros(8, 2, dtype=torch.int32, device=s.q.device)
        },
    }
    yield _refuses(scene, t, wrong, UnsupportedCallError)
    yield _undeclared_masks(scene, t)
    silent = scene.replace(config=scene.config.replace(also_needs=frozenset()))

    def lse(bench: Bench) -> None:
        impl = bench.impl(silent)
        stage = bench.lay_out(silent, t.pages(), impl)
        plan = impl.plan(stage.batch, stage.pages)
        raises(
            "an LSE not declared",
            UnsupportedCallError,
            lambda: impl.forward(plan, stage.q, stage.cache, return_lse=True),
        )

    yield Check(layers(silent), lse, "an LSE not declared")


def _undeclared_masks(scene: Scene, t: Terrain) -> Check:
    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        n, rows, device = stage.batch.num_reqs, stage.batch.num_tokens, bench.device
        masks = {
            "causal": torch.ones(n, dtype=torch.bool, device=device),
            "ranges": torch.zeros((1, 3), dtype=torch.int32, device=device),
            "prefix_lens": torch.zeros(n, dtype=torch.int32, device=device),
            "tree_mask": torch.zeros((rows, 1), dtype=torch.uint8, device=device),
        }
        for name, tensor in masks.items():
            batch = stage.batch.replace(**{name: tensor})
            error = raises(
                f"batch.{name} not declared",
                UnsupportedCallError,
                lambda batch=batch: impl.plan(batch, stage.pages),
            )
            if name not in str(error):
                raise Failed(f"the error about batch.{name} does not name it: {error}")

    return Check(layers(scene), run, "masks not declared")


@N.case(3, "A tensor that the layer declared and the call lacks is asked for")
def _(t: Terrain) -> Checks:
    for name, config in (
        ("sinks", t.layer(sinks=True)),
        ("alibi_slopes", t.layer(alibi=True)),
        ("position_bias", t.layer(position_bias=True)),
        ("topk_indices", t.layer(topk=4)),
    ):
        missing = {f"{name} missing": _without(name)}
        yield _refuses(normal(config, *LENS), t, missing, UnsupportedCallError)
    rswa = normal(t.layer(rswa=True, sliding_window=(3, -1)), *LENS)

    def run(bench: Bench) -> None:
        impl = bench.impl(rswa)
        stage = bench.lay_out(rswa, t.pages(), impl)
        batch = stage.batch.replace(prefix_lens=None)
        raises(
            "a batch without the prefix_lens its layer needs",
            UnsupportedCallError,
            lambda: impl.plan(batch, stage.pages),
        )

    yield Check(layers(rswa), run, "prefix_lens missing")


def _without(name: str) -> Wrong:
    return lambda stage: {name: None}


def _of(name: str, change: Callable[[torch.Tensor], Any]) -> Wrong:
    def wrong(stage: Stage) -> dict[str, Any]:
        if name in ("k", "v"):
            assert stage.kv is not None
            k, v = stage.kv
            assert v is not None
            return {"kv": (change(k), v) if name == "k" else (k, change(v))}
        found = stage.options.get(name, getattr(stage, name, None))
        assert isinstance(found, torch.Tensor)
        return {name: change(found)}

    return wrong


def _wrong_headers(names: list[str], device: str) -> dict[str, Wrong]:
    """Each tensor with a wrong rank, size, dtype and device, and not a tensor at all."""
    other = "meta" if device == "cpu" else "cpu"
    changes: dict[str, Callable[[torch.Tensor], Any]] = {
        "of one dimension too many": lambda x: x[None],
        "short of an element": lambda x: x[..., :-1],
        "of another dtype": lambda x: x.to(torch.int64),
        "on another device": lambda x: x.to(other),
        "as a list": lambda x: [1.0],
    }
    return {
        f"{name} {what}": _of(name, change) for name in names for what, change in changes.items()
    }


@N.case(4, "Every tensor of a wrong shape, dtype or device is refused before anything is written")
def _(t: Terrain) -> Checks:
    plain = normal(t.layer(), *LENS)
    yield _refuses(plain, t, _wrong_headers(["q", "k", "v", "out"], t.device), PlanMismatchError)
    short: dict[str, Wrong] = {
        "q short of a row": _of("q", lambda x: x[:-1]),
        "k short of a row": _of("k", lambda x: x[:-1]),
        "v short of a row": _of("v", lambda x: x[:-1]),
        "out short of a row": _of("out", lambda x: x[:-1]),
        "q short of a head": _of("q", lambda x: x[:, :-1]),
        "k short of a head": _of("k", lambda x: x[:, :-1]),
    }
    yield _refuses(plain, t, short, PlanMismatchError)
    for name, config in (
        ("sinks", t.layer(sinks=True)),
        ("alibi_slopes", t.layer(alibi=True)),
        ("position_bias", t.layer(position_bias=True)),
    ):
        wrong = _wrong_headers([name], t.device)
        yield _refuses(normal(config, *LENS), t, wrong, PlanMismatchError)
    topk = normal(t.layer(topk=4), *LENS)
    wrong = _wrong_headers(["topk_indices"], t.device)
    del wrong["topk_indices short of an element"]
    wrong["topk_indices short of a row"] = _of("topk_indices", lambda x: x[:-1])
    yield _refuses(topk, t, wrong, PlanMismatchError)
    yield _wrong_tables(plain, t)
    yield _sources(plain, t)
    yield _gradients(plain, t)


def _wrong_tables(scene: Scene, t: Terrain) -> Check:
    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(write="fused"), impl)
        batch, pages = stage.batch, stage.pages
        assert pages is not None and pages.slot_mapping is not None
        table, slots = pages.block_table, pages.slot_mapping
        wrong: dict[str, Callable[[], Any]] = {
            "pages.block_table of one row less": lambda: impl.plan(
                batch, replace(pages, block_table=table[:-1])
            ),
            "pages.block_table of one dimension": lambda: replace(pages, block_table=table[0]),
            "pages.block_table of int64": lambda: replace(pages, block_table=table.long()),
            "pages.slot_mapping of one token less": lambda: impl.plan(
                batch, replace(pages, slot_mapping=slots[:-1])
            ),
            "pages.slot_mapping of int32": lambda: replace(pages, slot_mapping=slots.int()),
            "batch.seq_lens of int64": lambda: batch.replace(seq_lens=batch.seq_lens.long()),
            "batch.seq_lens of one request less": lambda: batch.replace(
                seq_lens=batch.seq_lens[:-1]
            ),
            "batch.query_start_loc of one entry less": lambda: batch.replace(
                query_start_loc=batch.query_start_loc[:-1]
            ),
        }
        for what, action in wrong.items():
            error = raises(what, PlanMismatchError, action)
            if what.split()[0] not in str(error):
                raise Failed(f"the error about {what} does not name it: {error}")

    return Check(layers(scene), run, "tables and lengths")


def _sources(scene: Scene, t: Terrain) -> Check:
    """A plan with pages needs a cache, one without needs keys and values."""

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        paged, dense = impl.plan(stage.batch, stage.pages), impl.plan(stage.batch)
        for what, action in {
            "pages without a cache": lambda: impl.forward(paged, stage.q),
            "a cache without pages": lambda: impl.forward(dense, stage.q, stage.cache),
            "neither cache nor keys": lambda: impl.forward(dense, stage.q),
            "new keys without slots": lambda: impl.forward(
                paged, stage.q, stage.cache, kv=(stage.q[:, :2], stage.q[:, :2])
            ),
        }.items():
            raises(what, UnsupportedCallError, action)
        if touched := stage.touched():
            raise Failed(f"a refused call wrote: {touched}")

    return Check(layers(scene), run, "where keys come from")


def _gradients(scene: Scene, t: Terrain) -> Check:
    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        plan = impl.plan(stage.batch, stage.pages)
        q = stage.q.clone().requires_grad_()
        with torch.enable_grad():
            try:
                result = impl.forward(plan, q, stage.cache)
            except UnsupportedCallError:
                return
        out = result[0] if isinstance(result, tuple) else result
        if not out.requires_grad:
            raise Failed("an input requires gradients, and the result silently has none")

    return Check(layers(scene), run, "gradients")


@N.case(5, "A cache of another format is refused")
def _(t: Terrain) -> Checks:
    scene = normal(t.layer(), *LENS)

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        plan = impl.plan(stage.batch, stage.pages)
        spec = impl.kv_cache_spec(t.block_size, t.layouts[0])
        wrong: dict[str, Any] = {
            "num_kv_heads": spec.num_kv_heads + 1,
            "head_size": 2 * spec.head_size,
            "v_head_size": 2 * spec.v_head_size,
            "block_size": 2 * spec.block_size,
            "encoding": "float32" if t.dtype == "float64" else "float64",
        }
        for name, value in wrong.items():
            cache = KVCache.allocate(replace(spec, **{name: value}), 4, bench.device)
            error = raises(
                f"a cache of another {name}",
                PlanMismatchError,
                lambda cache=cache: impl.forward(plan, stage.q, cache),
            )
            if name not in str(error):
                raise Failed(f"the error about another {name} does not name it: {error}")
        assert stage.pages is not None
        named = stage.pages.block_table[:, 0]
        for count in (1, int(named.max())) if t.device == "cpu" else ():
            small = KVCache.allocate(spec, count, bench.device)
            raises(
                "a cache of fewer blocks than the table names",
                PlanMismatchError,
                lambda small=small: impl.forward(plan, stage.q, small),
            )

    yield Check(layers(scene), run, "foreign caches")


@N.case(6, "A plan of other heads, sizes, masks or dtypes is refused")
def _(t: Terrain) -> Checks:
    mine = normal(t.layer(), *LENS)
    for config in (
        t.layer(num_heads=8),
        t.layer(head_size=2 * t.head_size),
        t.layer(sliding_window=(3, -1)),
        t.layer(sinks=True),
        t.layer(logits_soft_cap=3.0),
        t.layer(alibi=True),
        t.layer(causal=False),
    ):
        theirs = normal(config, *LENS)

        def run(bench: Bench, theirs: Scene = theirs) -> None:
            impl, other = bench.impl(mine), bench.impl(theirs)
            stage = bench.lay_out(theirs, t.pages(), other)
            plan = other.plan(stage.batch, stage.pages)
            own = bench.lay_out(mine, t.pages(), impl)
            for what, action in {
                "forward": lambda: impl.forward(plan, own.q, own.cache),
                "update": lambda: impl.update(plan, own.batch, own.pages),
            }.items():
                raises(f"{what} with a plan of {theirs.config}", PlanMismatchError, action)
            if touched := own.touched():
                raise Failed(f"a refused call wrote: {touched}")

        yield Check(layers(mine, theirs), run, str(theirs))


@N.case(7, "Host lengths that are needed and absent are asked for, never copied unasked")
def _(t: Terrain) -> Checks:
    if t.device == "cpu":
        return
    scene = edges(normal(t.layer(), *LENS))

    def run(bench: Bench) -> None:
        impl = bench.impl(scene)
        stage = bench.lay_out(scene, t.pages(), impl)
        stage.batch = stage.batch.replace(query_start_loc_host=None, seq_lens_host=None)
        if impl.needs_host_lengths:
            raises(
                "a batch without host lengths",
                HostLengthsNeededError,
                lambda: impl.plan(stage.batch, stage.pages),
            )
        else:
            bench.judge(scene, bench.call(scene, t.pages(), impl=impl, stage=stage))

    yield Check(layers(scene), run, "no host lengths")


@N.case(8, "Values that no layer can have are refused when the config is made")
def _(t: Terrain) -> Checks:
    def run(bench: Bench) -> None:
        wrong: dict[str, Any] = {
            "logits_soft_cap": (-1.0, 0.0, float("inf")),
            "sliding_window": ((-2, -1), (3,), 7),
            "head_size": (0, -16),
            "num_kv_heads": (0, 3),
            "chunk_size": (0, -4),
            "scale": (float("nan"), float("inf")),
            "static_sink_tokens": (-1,),
            "topk": (0,),
        }
        for name, values in wrong.items():
            for value in values:
                raises(
                    f"{name}={value!r}",
                    ConfigError,
                    lambda name=name, value=value: t.layer(**{name: value}),
                )

    yield Check((), run, "impossible configs")
