"""Whole layers and ragged batches at random, for hypothesis to shrink."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from attnplat.config.names import Dtype, Feature
from attnplat.testing.inputs import edges, generator, normal
from attnplat.testing.scenes import Arrangement, Scene
from attnplat.testing.terrain import Terrain

LENGTHS = st.one_of(st.integers(0, 6), st.sampled_from([15, 16, 17, 31, 33, 48]))
DTYPES = st.sampled_from([Dtype.FLOAT32, Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
KINDS = ("decoder", "decoder", "decoder", "cross", "encoder", "latent", "sparse", "expanded")


MAKERS = (
    Terrain.layer,
    Terrain.cross,
    Terrain.encoder,
    Terrain.latent,
    Terrain.sparse,
    Terrain.expanded,
)


@st.composite
def scenes(draw: Any) -> Scene:
    """A layer of any kind, and requests for it with masks of their own."""
    terrain = Terrain(dtype=draw(DTYPES))
    kind = draw(st.sampled_from(KINDS))
    wants = draw(layer_options(kind))
    make = dict(zip(KINDS[2:], MAKERS, strict=True))
    config = make[kind](terrain, **wants)
    lens = draw(st.lists(requests(kind), min_size=1, max_size=5))
    query_lens, seq_lens = [q for q, _ in lens], [k for _, k in lens]
    masks = draw(batch_masks(config, query_lens, seq_lens))
    seed, gain = draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 1.0, 4.0]))
    scene = normal(config, query_lens, seq_lens, seed=seed, gain=gain, **masks)
    capped = getattr(config, "logits_soft_cap", None) is not None
    marked = draw(st.booleans()) and not capped
    return edges(scene, seed=seed) if marked else scene


@st.composite
def requests(draw: Any, kind: str) -> tuple[int, int]:
    """(query rows, keys) of one request."""
    rows, context = draw(LENGTHS), draw(LENGTHS)
    if kind == "cross":
        return rows, context
    return (rows, rows) if kind in ("encoder", "expanded") else (rows, rows + context)


@st.composite
def layer_options(draw: Any, kind: str) -> dict[str, Any]:
    """Fields of a config that a kind of layer has."""
    wants: dict[str, Any] = {}
    edge = st.sampled_from([-1, -1, 0, 1, 3, 15, 16, 40])
    if kind == "expanded":
        return wants
    if draw(st.booleans()):
        wants["sliding_window"] = (draw(edge), draw(edge))
    wants["sinks"] = draw(st.booleans())
    wants["scale"] = draw(st.sampled_from([None, 0.3, 1.0, -0.2, 0.0]))
    if kind in ("latent", "sparse"):
        wants["num_heads"] = draw(st.sampled_from([1, 4, 5]))
        wants["causal"] = draw(st.booleans())
        return wants
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 5]))
    wants |= {"num_kv_heads": kv_heads, "num_heads": kv_heads * group}
    wants["v_head_size"] = draw(st.sampled_from([None, 8, 24]))
    wants["alibi"] = draw(st.booleans())
    wants["causal"] = draw(st.sampled_from([None, True, False]))
    wants["logits_soft_cap"] = draw(st.sampled_from([None, None, 0.5, 20.0]))
    wants["position_bias"] = draw(st.integers(0, 4)) == 0
    if kind != "decoder":
        return wants
    wants["chunk_size"] = draw(st.sampled_from([None, None, 1, 7, 16, 24]))
    wants["static_sink_tokens"] = draw(st.sampled_from([0, 0, 1, 5, 17]))
    wants["topk"] = draw(st.sampled_from([None, None, None, 3, 8]))
    wants["rswa"] = draw(st.booleans())
    wants["mm_prefix"] = draw(st.booleans())
    also = st.sampled_from([Feature.PER_REQUEST_CAUSAL, Feature.TREE_MASK, Feature.PREFIX_LENGTHS])
    wants["also_needs"] = draw(st.frozensets(also))
    return wants


@st.composite
def batch_masks(
    draw: Any, config: Any, query_lens: list[int], seq_lens: list[int]
) -> dict[str, list[Any]]:
    """The masks of a batch that the layer takes."""
    needs, count, masks = config.needs, len(query_lens), {}
    if Feature.PER_REQUEST_CAUSAL in needs and draw(st.booleans()):
        masks["causal"] = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    if needs & {Feature.PREFIX_LENGTHS, Feature.RSWA}:
        some = st.sampled_from([0, 1, 5, 16, 60])
        masks["prefix_len"] = draw(st.lists(some, min_size=count, max_size=count))
    if Feature.MM_PREFIX in needs:
        masks["ranges"] = [draw(spans(n)) for n in seq_lens]
    if Feature.TREE_MASK in needs and draw(st.booleans()):
        masks["tree"] = [_tree(rows, draw(st.integers(0, 9))) for rows in query_lens]
    return masks


@st.composite
def spans(draw: Any, keys: int) -> tuple[tuple[int, int], ...]:
    """Up to two bidirectional ranges, which may reach past the sequence."""
    ends = st.integers(0, keys + 5)
    found = [sorted((draw(ends), draw(ends))) for _ in range(draw(st.integers(0, 2)))]
    return tuple((begin, end) for begin, end in found)


def _tree(rows: int, seed: int) -> torch.Tensor:
    """Any visibility among the query tokens, each seeing itself."""
    gen = generator("tree", rows, seed)
    seen = torch.rand(rows, rows, generator=gen) < 0.5
    return seen | torch.eye(rows, dtype=torch.bool)


def arrangements() -> st.SearchStrategy[Arrangement]:
    """Any way to lay a scene out."""
    return any_arrangements().map(_validatable)


def _validatable(how: Arrangement) -> Arrangement:
    """`validate=True` asks for blocks that are there even where no query sees them."""
    return how.replace(validate=how.validate and how.tail == "spare" and not how.rolling)


def any_arrangements() -> st.SearchStrategy[Arrangement]:
    """Any combination of what an arrangement has."""
    return st.builds(
        Arrangement,
        paged=st.sampled_from([True, True, True, False]),
        block_size=st.sampled_from([1, 8, 16, 16, 32, 48]),
        layout=st.sampled_from(["HND", "NHD", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]),
        order=st.integers(0, 9),
        spare=st.integers(1, 3),
        rolling=st.booleans(),
        columns=st.integers(0, 4),
        tail=st.sampled_from(["spare", -1, 1 << 30]),
        padding=st.integers(0, 5),
        padding_requests=st.integers(0, 3),
        spread=st.booleans(),
        fused=st.booleans(),
        offset=st.sampled_from([0, 1, 3]),
        layers=st.integers(1, 2),
        write=st.sampled_from(["done", "fused", "first"]),
        out=st.sampled_from(["given", "allocated"]),
        lse=st.sampled_from(["returned", "given", "transposed"]),
        validate=st.booleans(),
        slack=st.sampled_from([0, 0, 70]),
    )
