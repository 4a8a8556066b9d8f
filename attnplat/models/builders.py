"""Layer configs out of fields: one function for each way of attending."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from attnplat.config.layer import (
    BlockSparseConfig,
    LayerConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
)
from attnplat.config.names import AttnType, Role
from attnplat.models.fields import Fields
from attnplat.models.parts import Part
from attnplat.models.patterns import (
    CHUNKED,
    COMPRESSED,
    FULL,
    HEAVILY_COMPRESSED,
    HYBRID,
    INDEXED,
    MINIMAX,
    SLIDING,
    WINDOWS,
)
from attnplat.models.request import Request

C = TypeVar("C", bound=LayerConfig)
CACHED = (AttnType.DECODER, AttnType.ENCODER_DECODER)


def grouped(fields: Fields, kind: str, part: Part, request: Request) -> LayerConfig:
    """Multi-head, grouped-query or multi-query attention.

    Without a head size it is hidden size / heads; without key-value heads there are as many
    as query heads. Raises ConfigError where either does not divide.
    """
    accept(fields, kind, FULL, SLIDING, CHUNKED, HYBRID, *_vision_kinds(part))
    given = extras(fields, kind, part)
    values = shape(fields, part, given)
    if "sliding_window" not in given:
        values |= visible(fields, kind, part)
    values |= {"attn_type": part.attn_type, "role": part.role, **given}
    heads, kv_heads = values["num_heads"], values["num_kv_heads"]
    if heads % kv_heads:
        takes = f"a multiple of the key-value heads ({kv_heads})"
        raise fields.refusal(part.heads[0], takes, heads)
    values["num_heads"] = request.share_heads(heads, part.heads[0])
    values["num_kv_heads"] = request.share_kv_heads(kv_heads)
    return made(MhaConfig, values, request)


def accept(fields: Fields, kind: str, *kinds: str) -> None:
    """Raise ConfigError for a kind of layer that the family does not have."""
    if kind not in kinds:
        of = f"model type {fields.model_type!r}" if fields.model_type else "this model"
        takes = f"kinds that {of} is known to have: {', '.join(kinds)}"
        raise fields.refusal("layer_types", takes, f"a list with {kind}")


def _vision_kinds(part: Part) -> tuple[str, ...]:
    return (WINDOWS,) if part.role == Role.VISION else ()


def extras(fields: Fields, kind: str, part: Part) -> dict[str, Any]:
    """What the family's rule says of this layer; None says nothing."""
    return {k: v for k, v in part.extras(fields, kind).items() if v is not None}


def shape(fields: Fields, part: Part, given: Mapping[str, Any]) -> dict[str, Any]:
    """Head size and head counts of the whole model; what is `given` is not read."""
    heads = given.get("num_heads") or fields.need(*part.heads)
    told = fields.size(*part.kv_heads) if part.kv_heads else None
    kv_heads = given.get("num_kv_heads") or told or heads
    head_size = given.get("head_size") or fields.size(*part.head_size)
    if head_size is None:
        head_size = fields.split(part.hidden, part.heads)
    return {"head_size": head_size, "num_heads": heads, "num_kv_heads": kv_heads}


def visible(fields: Fields, kind: str, part: Part) -> dict[str, Any]:
    """The mask of a layer; of W tokens a causal one sees itself and W - 1 before it.

    A layer that is not causal sees W on either side, as transformers' bidirectional windows do.
    """
    if kind == SLIDING:
        width = fields.need(*part.window)
        causal = part.attn_type == AttnType.DECODER
        return {"sliding_window": (width - 1, -1) if causal else (width, width)}
    if kind == CHUNKED:
        return {"chunk_size": fields.need("attention_chunk_size")}
    return {}


def latent(fields: Fields, kind: str, part: Part, request: Request) -> LayerConfig:
    """Multi-head latent attention; of an `indexed_attention` layer, over the indexer's keys.

    The cache row is kv_lora_rank + qk_rope_head_dim wide and shared by all heads.
    """
    accept(fields, kind, FULL, SLIDING, INDEXED)
    rank = fields.need("kv_lora_rank")
    rope = fields.need("qk_rope_head_dim", least=0)
    nope = fields.need("qk_nope_head_dim")
    given = extras(fields, kind, part)
    values = {
        "head_size": rank + rope,
        "num_heads": request.share_heads(fields.need(*part.heads), part.heads[0]),
        "num_kv_heads": 1,
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_size": given.get("v_head_size") or fields.need("v_head_dim"),
    }
    mscale = yarn_mscale(fields)
    if mscale != 1.0:
        values["scale"] = (nope + rope) ** -0.5 * mscale**2
    values |= visible(fields, kind, part)
    values |= given
    if kind != INDEXED:
        return made(MlaConfig, values, request)
    return made(SparseMlaConfig, values | indexer(fields), request)


def indexer(fields: Fields) -> dict[str, Any]:
    """The sparse indexer's dimensions (DeepSeek-V3.2)."""
    return {
        "index_topk": fields.need("index_topk"),
        "index_head_dim": fields.need("index_head_dim"),
        "index_n_heads": fields.need("index_n_heads"),
        "model_type": fields.model_type or None,
    }


def yarn_mscale(fields: Fields) -> float:
    """YaRN's magnitude factor, 1.0 without YaRN: 0.1 m ln(factor) + 1 (arXiv 2309.00071).

    DeepSeek-V2 and later multiply the softmax scale by its square where `mscale_all_dim` is
    set; the file calls the section rope_scaling or rope_parameters.
    """
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.sub(name)
        if (rope.text("rope_type") or rope.text("type") or "default") == "default":
            continue
        if rope.get("mscale_all_dim") in (None, 0):
            continue
        strength, factor = rope.number("mscale_all_dim"), rope.number("factor")
        if strength is not None and factor is not None and factor > 1:
            return 0.1 * strength * math.log(factor) + 1.0
    return 1.0


def compressed(fields: Fields, kind: str, part: Part, request: Request) -> LayerConfig:
    """DeepSeek-V4: rows in which key and value are the same elements, sinks, own scale.

    Known and used here: a row has `head_dim` (512) elements, the last `qk_rope_head_dim` (64)
    rotated; the scale is head_dim ** -0.5; every layer has sinks. A layer of compress ratio
    0 sees the window only. The others put the window's keys and compressed entries under one
    softmax: the `index_topk` that the indexer chose (ratio 4), or all of them (ratio 128).
    That union reaches a kernel as lists of indices, so only the pure window is a mask here.
    """
    accept(fields, kind, SLIDING, COMPRESSED, HEAVILY_COMPRESSED)
    row = fields.need("head_dim")
    rope = fields.need("qk_rope_head_dim", least=0)
    if rope >= row:
        raise fields.refusal("qk_rope_head_dim", f"less than head_dim ({row})", rope)
    values = {
        "head_size": row,
        "num_heads": request.share_heads(fields.need(*part.heads), part.heads[0]),
        "num_kv_heads": 1,
        "kv_lora_rank": row - rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": row - rope,
        "v_head_size": row,
        "scale": row**-0.5,
        "sinks": True,
        "model_type": fields.model_type or None,
        "o_groups": fields.size("o_groups"),
    }
    if kind == COMPRESSED:
        values |= indexer(fields)
    return made(SparseMlaConfig, values | visible(fields, kind, part), request)


def block_chosen(fields: Fields, kind: str, part: Part, request: Request) -> LayerConfig:
    """MiniMax-M3: whole blocks of keys chosen per query; its dense layers attend as usual."""
    if kind != MINIMAX:
        return grouped(fields, kind, part, request)
    sizes = shape(fields, part, extras(fields, kind, part))
    sizes["num_heads"] = request.share_heads(sizes["num_heads"], part.heads[0])
    sizes["num_kv_heads"] = request.share_kv_heads(sizes["num_kv_heads"])
    blocks = fields.size("index_topk_blocks")
    if fields.has("sparse_attention_config"):
        blocks = fields.sub("sparse_attention_config").size("sparse_topk_blocks") or blocks
    if blocks is None:
        raise fields.missing("index_topk_blocks", "sparse_attention_config.sparse_topk_blocks")
    return made(BlockSparseConfig, sizes | {"model": "minimax_m3", "topk_blocks": blocks}, request)


def made(cls: type[C], values: Mapping[str, Any], request: Request) -> C:
    """The config, with the request's dtypes and the source of each value recorded."""
    values = dict(values)
    scale = values.get("scale")
    plain = values["head_size"] ** -0.5
    if cls is MhaConfig and scale is not None and math.isclose(scale, plain, rel_tol=1e-9):
        del values["scale"]
    sources = [(name, "model") for name in values]
    sources.append(("dtype", request.dtype_source))
    if values.get("attn_type", AttnType.DECODER) in CACHED:
        values |= {"kv_cache_dtype": request.kv_cache_dtype, "block_size": request.block_size}
    else:
        values["kv_cache_dtype"] = None
    return cls(**values, dtype=request.dtype, provenance=tuple(sources))
