"""Recurrent layers out of fields.

A StateConfig has a head size and head counts; for these layers they mean: mamba2, linear
and gdn: elements of a state's key and the number of states (gdn: one per value head, shared
by groups as `num_kv_heads` key heads); mamba1: state elements per channel, no heads;
short_conv: taps of the convolution, no heads.
"""

from __future__ import annotations

from attnplat.config.layer import LayerConfig, StateConfig
from attnplat.config.names import StateKind
from attnplat.models.fields import HEAD_SIZE, HEADS, HIDDEN, Fields
from attnplat.models.request import Request

MAMBA2_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
MAMBA2_HEAD_SIZE = ("mamba_head_dim", "mamba_d_head", "mamba_headdim")


def mamba1(fields: Fields, request: Request) -> LayerConfig:
    """Mamba (arXiv 2312.00752)."""
    size = fields.need("mamba_d_state", "state_size")
    return _state(StateKind.MAMBA1, request, head_size=size)


def mamba2(fields: Fields, request: Request) -> LayerConfig:
    """Mamba-2 (arXiv 2405.21060). A head dim of "auto" is expand * hidden size / heads."""
    heads = fields.need(*MAMBA2_HEADS)
    if fields.get(*MAMBA2_HEAD_SIZE) not in (None, "auto"):
        size = fields.need(*MAMBA2_HEAD_SIZE)
    else:
        inner = fields.size("mamba_d_ssm") or _expanded(fields)
        if inner % heads:
            takes = f"a divisor of the inner size ({inner})"
            raise fields.refusal(MAMBA2_HEADS[0], takes, heads)
        size = inner // heads
    ours = request.share_heads(heads, MAMBA2_HEADS[0])
    return _state(StateKind.MAMBA2, request, head_size=size, num_heads=ours)


def mamba2_alone(fields: Fields, request: Request) -> LayerConfig:
    """A model of Mamba-2 layers only: `num_heads` and `head_dim` are the state's."""
    heads = request.share_heads(fields.need("num_heads"), "num_heads")
    size = fields.need("head_dim")
    return _state(StateKind.MAMBA2, request, head_size=size, num_heads=heads)


def gdn(fields: Fields, request: Request) -> LayerConfig:
    """Gated delta net (arXiv 2412.06464)."""
    keys = fields.need("linear_num_key_heads")
    heads = fields.need("linear_num_value_heads")
    if heads % keys:
        takes = f"a multiple of linear_num_key_heads ({keys})"
        raise fields.refusal("linear_num_value_heads", takes, heads)
    return _state(
        StateKind.GDN,
        request,
        head_size=fields.need("linear_key_head_dim"),
        num_heads=request.share_heads(heads, "linear_num_value_heads"),
        num_kv_heads=request.share_kv_heads(keys),
    )


def kda(fields: Fields, request: Request) -> LayerConfig:
    """Kimi delta attention (arXiv 2510.26692): a gated delta net with a gate per channel."""
    if fields.has("linear_attn_config"):
        fields = fields.sub("linear_attn_config")
        heads, size = fields.need("num_heads"), fields.need("head_dim")
    else:
        heads, size = (
            fields.need("linear_num_heads", *HEADS),
            fields.need("linear_head_dim", *HEAD_SIZE),
        )
    ours = request.share_heads(heads, "linear_num_heads")
    return _state(StateKind.GDN, request, head_size=size, num_heads=ours)


def lightning(fields: Fields, request: Request) -> LayerConfig:
    """Lightning attention (arXiv 2405.17381), linear with a decay per head (MiniMax-01)."""
    heads = fields.need(*HEADS)
    size = fields.size(*HEAD_SIZE) or fields.split(HIDDEN, HEADS)
    ours = request.share_heads(heads, HEADS[0])
    return _state(StateKind.LINEAR, request, head_size=size, num_heads=ours)


def short_conv(fields: Fields, request: Request) -> LayerConfig:
    """A gated short convolution (LFM2)."""
    return _state(StateKind.SHORT_CONV, request, head_size=fields.need("conv_L_cache"))


def told_by_fields(fields: Fields, request: Request) -> LayerConfig:
    """Of a model type that is not known: the kind whose fields the config has."""
    for name, state in _TELLTALES:
        if fields.has(name):
            return state(fields, request)
    raise fields.missing(*(name for name, _ in _TELLTALES))


_TELLTALES = (
    ("linear_num_value_heads", gdn),
    ("mamba_num_heads", mamba2),
    ("mamba_n_heads", mamba2),
    ("n_mamba_heads", mamba2),
    ("mamba_d_state", mamba1),
    ("conv_L_cache", short_conv),
)


def _expanded(fields: Fields) -> int:
    return fields.need("mamba_expand", "expand") * fields.need(*HIDDEN)


def _state(
    kind: StateKind,
    request: Request,
    *,
    head_size: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
) -> StateConfig:
    sizes = {"head_size": head_size, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    sources = [(name, "model") for name, size in sizes.items() if size is not None]
    return StateConfig(
        state_kind=kind,
        head_size=head_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        dtype=request.dtype,
        kv_cache_dtype=None,
        provenance=(*sources, ("state_kind", "model"), ("dtype", request.dtype_source)),
    )
