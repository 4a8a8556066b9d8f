"""Decoders whose layers attend over heads: what sets a family apart from the plain rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnplat.config.names import AttnType
from attnplat.models.builders import grouped
from attnplat.models.fields import HEADS, HIDDEN, Fields
from attnplat.models.parts import Extras, Family, Part
from attnplat.models.patterns import (
    CHUNKED,
    FULL,
    SLIDING,
    WITHOUT_ATTENTION,
    Kinds,
    count,
    every,
    every_from_first,
    has_window,
    indices,
    listed,
    listed_or,
    marked,
    named,
    uniform,
    window_after,
    window_after_if_used,
    window_if_used,
)

Values = Mapping[str, Any]


def scale_from(name: str) -> Extras:
    """The softmax scale is the field itself."""

    def extras(fields: Fields, kind: str) -> Values:
        return {"scale": fields.number(name)}

    return extras


def fixed(**values: Any) -> Extras:
    """The same values in every layer."""

    def extras(fields: Fields, kind: str) -> Values:
        return values

    return extras


# Gemma ------------------------------------------------------------------------------------


def gemma(fields: Fields, kind: str) -> Values:
    """Gemma 2 and 3: scale query_pre_attn_scalar ** -0.5, soft cap on the attention logits.

    With `use_bidirectional_attention` (EmbeddingGemma) half the window lies on each side.
    """
    scalar = fields.number("query_pre_attn_scalar")
    values: dict[str, Any] = {"logits_soft_cap": fields.number("attn_logit_softcapping")}
    if scalar is not None:
        values["scale"] = scalar**-0.5
    return values | _bidirectional(fields, kind)


def _bidirectional(fields: Fields, kind: str) -> dict[str, Any]:
    both_ways = fields.get("use_bidirectional_attention")
    if both_ways not in (None, False, True, "all", "vision"):
        takes = 'true, false, "all" or "vision"'
        raise fields.refusal("use_bidirectional_attention", takes, both_ways)
    if both_ways not in (True, "all"):
        return {}
    values: dict[str, Any] = {"attn_type": AttnType.ENCODER_ONLY}
    if kind == SLIDING:
        half = fields.need("sliding_window") // 2
        values["sliding_window"] = (half, half)
    return values


def gemma4(fields: Fields, kind: str) -> Values:
    """Gemma 4: no scaling; layers that see all have wider heads and their own kv heads.

    `num_global_key_value_heads` counts only with `attention_k_eq_v`. A file that spells the
    differences out in `per_layer_config` has them applied already.
    """
    values: dict[str, Any] = {"scale": 1.0, **_bidirectional(fields, kind)}
    if kind == FULL and not fields.has("per_layer_config"):
        values["head_size"] = fields.size("global_head_dim") or 512
        if fields.flag("attention_k_eq_v"):
            values["num_kv_heads"] = fields.size("num_global_key_value_heads")
    return values


def gemma4_kinds(fields: Fields) -> Kinds:
    """Every sixth layer sees all, and always the last."""
    kinds = every(6)(fields)
    return (*kinds[:-1], FULL)


def shared_caches(fields: Fields) -> tuple[str, ...]:
    """Gemma 3n and 4: the last layers read the keys and values of earlier ones."""
    shared = fields.size("num_kv_shared_layers", least=0)
    if not shared:
        return ()
    return (f"the last {shared} layers reuse the keys and values of earlier layers",)


# Grouped by what is unusual ---------------------------------------------------------------


def gpt2(fields: Fields, kind: str) -> Values:
    """GPT-2: scaling can be off, or divided by the layer's number as well."""
    scaled = fields.get("scale_attn_weights") is None or fields.flag("scale_attn_weights")
    scale = fields.split(HIDDEN, HEADS) ** -0.5 if scaled else 1.0
    if fields.flag("scale_attn_by_inverse_layer_idx") and fields.layer is not None:
        scale /= fields.layer + 1
    return {"scale": scale}


def gpt_neo_kinds(fields: Fields) -> Kinds:
    """GPT-Neo: `attention_layers`, or runs `[[names], times]` in `attention_types`."""
    layers = count(fields)
    given = fields.listed("attention_layers")
    if given is None:
        given = []
        for run in fields.listed("attention_types") or ():
            if not _is_run(run):
                raise fields.refusal("attention_types", "a list of [[names], times]", run)
            given = [*given, *(list(run[0]) * min(run[1], layers))]
        return named(fields, "attention_types", given, layers)
    return named(fields, "attention_layers", given, layers)


def _is_run(run: Any) -> bool:
    """Whether a value is a pair of a list of names and a count."""
    return (
        isinstance(run, (list, tuple))
        and len(run) == 2
        and isinstance(run[0], (list, tuple))
        and isinstance(run[1], int)
    )


def falcon(fields: Fields, kind: str) -> Values:
    """Falcon: one kv head with `multi_query` in the old architecture; ALiBi by a flag."""
    heads = fields.need(*HEADS)
    given = fields.size("num_kv_heads", "n_head_kv") or heads
    single = fields.flag("multi_query") and not fields.flag("new_decoder_architecture")
    return {"num_kv_heads": 1 if single else given, "alibi": fields.flag("alibi")}


def mpt(fields: Fields, kind: str) -> Values:
    """MPT: ALiBi unless `attn_config` says otherwise; its own scale and kv heads there."""
    own = fields.sub("attn_config")
    if own.flag("prefix_lm"):
        raise own.refusal("prefix_lm", "false: its bidirectional prefix is not planned", True)
    return {
        "alibi": own.get("alibi") is None or own.flag("alibi"),
        "scale": own.number("softmax_scale"),
        "num_kv_heads": own.size("kv_n_heads"),
    }


def dbrx(fields: Fields, kind: str) -> Values:
    """DBRX: kv heads stand in `attn_config`."""
    return {"num_kv_heads": fields.sub("attn_config").size("kv_n_heads")}


def bigcode(fields: Fields, kind: str) -> Values:
    """GPT-BigCode: one kv head with `multi_query`."""
    return {"num_kv_heads": 1 if fields.flag("multi_query") else None}


def chatglm(fields: Fields, kind: str) -> Values:
    """ChatGLM: `multi_query_group_num` counts with `multi_query_attention`."""
    grouped_heads = fields.flag("multi_query_attention")
    return {"num_kv_heads": fields.size("multi_query_group_num") if grouped_heads else None}


def baichuan(fields: Fields, kind: str) -> Values:
    """Baichuan: the 13B sizes use ALiBi, the 7B ones (hidden size 4096) rotary embeddings."""
    return {"alibi": fields.need("hidden_size") != 4096}


def llama4_kinds(fields: Fields) -> Kinds:
    """Llama 4: layers with rotary embeddings see their chunk only, the others all keys."""
    layers = count(fields)
    if fields.size("attention_chunk_size") is None:
        return (FULL,) * layers
    step = fields.size("no_rope_layer_interval") or 4
    default = tuple(CHUNKED if (i + 1) % step else FULL for i in range(layers))
    return marked(fields, "no_rope_layers", layers, CHUNKED, FULL) or default


def smollm3_kinds(fields: Fields) -> Kinds:
    """SmolLM3: with `use_sliding_window`, the layers without rotary embeddings slide."""
    layers = count(fields)
    if not fields.flag("use_sliding_window") or not has_window(fields):
        return (FULL,) * layers
    step = fields.size("no_rope_layer_interval") or 4
    default = tuple(FULL if (i + 1) % step else SLIDING for i in range(layers))
    return marked(fields, "no_rope_layers", layers, FULL, SLIDING) or default


def exaone4_kinds(fields: Fields) -> Kinds:
    """EXAONE 4: `sliding_window_pattern` is a period or letters such as LLLG."""
    layers = count(fields)
    pattern = fields.get("sliding_window_pattern")
    if not has_window(fields) or pattern in (None, 0, ""):
        return (FULL,) * layers
    if isinstance(pattern, str):
        if set(pattern) - {"L", "G"}:
            takes = "letters L and G, or an integer"
            raise fields.refusal("sliding_window_pattern", takes, pattern)
        kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(layers)]
        return (*kinds[:-1], FULL)
    step = fields.need("sliding_window_pattern")
    return tuple(SLIDING if (i + 1) % step else FULL for i in range(layers))


def qwen2_moe_kinds(fields: Fields) -> Kinds:
    """Qwen2-MoE: every other layer below `max_window_layers`, if `use_sliding_window`."""
    layers, used = count(fields), fields.flag("use_sliding_window") and has_window(fields)
    below = (fields.size("max_window_layers", least=0) or 0) if used else 0
    return tuple(SLIDING if (i + 1) % 2 and i < below else FULL for i in range(layers))


def cohere2_moe_kinds(fields: Fields) -> Kinds:
    """Cohere2-MoE: the leading dense layers have a period of their own."""
    layers = count(fields)
    dense = min(fields.size("first_k_dense_replace", least=0) or 0, layers)
    head = fields.size("prefix_dense_sliding_window_pattern") or 1
    step = fields.size("sliding_window_pattern") or 4
    kinds = [SLIDING if (i + 1) % head else FULL for i in range(dense)]
    return (*kinds, *(SLIDING if (i + 1) % step else FULL for i in range(layers - dense)))


def mimo_kinds(fields: Fields) -> Kinds:
    """MiMo-V2: the first and every sixth layer see all; `hybrid_layer_pattern` marks sliding."""
    layers = count(fields)
    default = tuple(SLIDING if i and (i + 1) % 6 else FULL for i in range(layers))
    return marked(fields, "hybrid_layer_pattern", layers, SLIDING, FULL) or default


def mimo(fields: Fields, kind: str) -> Values:
    """MiMo-V2: values narrower than keys; sliding layers have sinks and twice the kv heads.

    Files may say otherwise of the sliding layers in fields that start with `swa_`.
    `sliding_window_size` counts the tokens before the query, `sliding_window` the query too.
    """
    if kind != SLIDING:
        sinks = fields.flag("add_full_attention_sink_bias")
        return {"v_head_size": fields.size("v_head_dim"), "sinks": sinks}
    doubled = 2 * fields.need("num_key_value_heads")
    before = fields.size("sliding_window_size")
    return {
        "num_heads": fields.size("swa_num_attention_heads"),
        "num_kv_heads": fields.size("swa_num_key_value_heads") or doubled,
        "head_size": fields.size("swa_head_dim"),
        "v_head_size": fields.size("swa_v_head_dim", "v_head_dim"),
        "sinks": fields.values.get("add_swa_attention_sink_bias") is not False,
        "sliding_window": None if before is None else (before, -1),
    }


def step3p5(fields: Fields, kind: str) -> Values:
    """Step-3.5: sliding layers may have more query heads; scale query_pre_attn_scalar ** -0.5."""
    scalar = fields.number("query_pre_attn_scalar")
    values: dict[str, Any] = {"scale": scalar**-0.5 if scalar is not None else None}
    if kind == SLIDING:
        other = fields.sub("attention_other_setting").size("num_attention_heads")
        values["num_heads"] = fields.size("num_sliding_attention_heads") or other
    return values


# Llama 3.2 Vision -------------------------------------------------------------------------


def mllama_self(fields: Fields) -> Kinds:
    """The layers that attend to text."""
    cross = indices(fields, "cross_attention_layers")
    return tuple(WITHOUT_ATTENTION[0] if i in cross else FULL for i in range(count(fields)))


def mllama_cross(fields: Fields) -> Kinds:
    """The layers that attend to the image."""
    cross = indices(fields, "cross_attention_layers")
    return tuple(FULL if i in cross else WITHOUT_ATTENTION[0] for i in range(count(fields)))


# The table --------------------------------------------------------------------------------

# No rule of their own: layer_types where given, else a window on all layers where given.
PLAIN = (
    *("llama", "mistral", "mixtral", "ministral", "ministral3", "phi", "phi3", "phimoe"),
    *("stablelm", "starcoder2", "olmo", "olmo2", "olmoe", "flex_olmo", "cohere", "glm", "glm4"),
    *("glm4_moe", "ernie4_5", "ernie4_5_moe", "internlm2", "internlm3", "seed_oss", "apertus"),
    *("arcee", "nemotron", "persimmon", "helium", "bitnet", "minimax_m2", "jais2"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "solar_open", "gpt_neox", "gptj"),
    *("codegen", "opt", "biogpt", "gemma", "aria_text", "minicpm", "hy_v3", "nanochat"),
)  # fmt: skip


def _decoder(*types: str, **rule: Any) -> Family:
    return Family(types, (Part(attend=grouped, **rule),))


FAMILIES = (
    _decoder(*PLAIN, kinds=listed),
    # transformers configuration_qwen2, _qwen3: layers below max_window_layers see all.
    _decoder(
        *("qwen2", "qwen3", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"),
        *("qwen2_5_omni_text", "qwen3_vl_text"),
        kinds=listed_or(window_after_if_used),
    ),
    _decoder("dots1", kinds=listed_or(window_after)),
    _decoder("mellum", kinds=listed_or(uniform)),
    _decoder("qwen2_moe", kinds=listed_or(qwen2_moe_kinds)),
    _decoder(
        *("qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), kinds=listed_or(window_if_used)
    ),
    # transformers modeling_gemma2, _gemma3: query_pre_attn_scalar ** -0.5; hub files carry
    # sliding_window_pattern.
    _decoder("gemma2", "vaultgemma", kinds=every(2, field="sliding_window_pattern"), extras=gemma),
    _decoder("gemma3", "gemma3_text", kinds=every(6, field="sliding_window_pattern"), extras=gemma),
    # transformers modeling_gemma3n, _gemma4: scaling 1.0, keys and values normalised.
    _decoder(
        *("gemma3n", "gemma3n_text"),
        kinds=every(5),
        extras=fixed(scale=1.0),
        notes=shared_caches,
    ),
    _decoder("gemma4", "gemma4_text", kinds=gemma4_kinds, extras=gemma4, notes=shared_caches),
    # transformers modeling_gpt_oss: sinks in all layers, the first slides.
    _decoder("gpt_oss", kinds=every(2), extras=fixed(sinks=True)),
    # transformers modeling_granite: attention_multiplier is the scale.
    _decoder(
        *("granite", "granitemoe", "granitemoeshared", "hyperclovax"),
        kinds=uniform,
        extras=scale_from("attention_multiplier"),
    ),
    _decoder("cohere2", kinds=every(4, field="sliding_window_pattern")),
    _decoder("cohere2_moe", kinds=listed_or(cohere2_moe_kinds)),
    _decoder("olmo3", kinds=every(4)),
    _decoder("afmoe", kinds=every(4, field="global_attn_every_n_layers")),
    _decoder("cwm", kinds=every_from_first(4)),
    _decoder("exaone4", "exaone_moe", kinds=listed_or(exaone4_kinds)),
    _decoder("smollm3", kinds=listed_or(smollm3_kinds)),
    _decoder("llama4", "llama4_text", kinds=listed_or(llama4_kinds)),
    _decoder("mimo_v2_flash", kinds=listed_or(mimo_kinds), extras=mimo),
    _decoder(
        *("step3p5", "step3p7"),
        extras=step3p5,
        kv_heads=("num_key_value_heads", "num_attention_groups"),
    ),
    # transformers modeling_gpt2, _gpt_neo, _gpt_bigcode.
    _decoder("gpt2", kinds=uniform, extras=gpt2),
    _decoder("gpt_neo", kinds=gpt_neo_kinds, extras=fixed(scale=1.0), window=("window_size",)),
    _decoder("gpt_bigcode", kinds=uniform, extras=bigcode),
    # ALiBi: transformers modeling_bloom, _mpt, _falcon; the 13B sizes of Baichuan.
    _decoder("bloom", kinds=uniform, extras=fixed(alibi=True)),
    _decoder("mpt", kinds=uniform, extras=mpt),
    _decoder("falcon", kinds=uniform, extras=falcon),
    _decoder("baichuan", kinds=uniform, extras=baichuan),
    _decoder("dbrx", kinds=uniform, extras=dbrx),
    _decoder("chatglm", kinds=uniform, extras=chatglm),
    # transformers modeling_mllama: the listed layers attend to the image instead of the text.
    Family(
        ("mllama", "mllama_text_model"),
        (
            Part(attend=grouped, kinds=mllama_self),
            Part(
                name="cross",
                attend=grouped,
                kinds=mllama_cross,
                attn_type=AttnType.ENCODER_DECODER,
            ),
        ),
    ),
)
