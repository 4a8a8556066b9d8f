"""Conditions and orders of vLLM 0.33 that attnplat does not share; `differences` names them."""

from __future__ import annotations

from typing import Any

from attnplat.backends.portable.catalog import BLOCK_SPARSE, HALF_DTYPES, MHA
from attnplat.backends.portable.predicates import has_narrower_values, is_vision
from attnplat.config.names import AttnType, Feature
from attnplat.platforms.rocm import rules
from attnplat.platforms.selection import Preference, Ranked
from attnplat.platforms.world import World

V41_NAMES = frozenset({"ROCM_FLASHMLA_SPARSE_DSV4", "ROCM_FLASHMLA_SPARSE_DSV41"})


def is_text_attention(config: Any, world: World) -> bool:
    """Attention of a text model whose values are as wide as its keys."""
    return not is_vision(config, world) and not has_narrower_values(config, world)


def is_v4_model(config: Any, world: World) -> bool:
    """A layer of DeepSeek-V4 or V4.1: its model's code chooses, not the selector."""
    return rules.is_deepseek_v4(config, world) or rules.is_deepseek_v41(config, world)


def is_left_to_the_selector(config: Any, world: World) -> bool:
    """Every layer but those that a model's code decides."""
    return not is_v4_model(config, world)


def is_unnamed_scheme(config: Any, world: World) -> bool:
    """A block-sparse layer of which the model is not told."""
    return config.model is None


def is_v41_asked_by_either_name(config: Any, world: World) -> bool:
    """A layer of DeepSeek-V4.1, with its own backend or V4's asked for."""
    return rules.is_deepseek_v41(config, world) and str(world.wishes.backend) in V41_NAMES


def is_checked_nowhere(config: Any, world: World) -> bool:
    """A layer whose backend is named by code that asks it nothing."""
    on_one_rank = Feature.PCP not in world.run_needs
    return is_vision(config, world) or (is_v4_model(config, world) and on_one_rank)


def is_explicit_beside_ultraquant(config: Any, world: World) -> bool:
    """A request by name in a run whose cache is UltraQuant's."""
    asked = world.wishes.backend_for(config.kind)[0] is not None
    return asked and rules.LAYOUT_VS_ULTRAQUANT.when(config, world)


def lists_rocm_attn(config: Any, world: World) -> bool:
    """ROCM_ATTN is listed: no connector, and no model with cross attention."""
    run = world.run
    return not run.kv_connector and run.model_attn_type != AttnType.ENCODER_DECODER


def lists_unified(config: Any, world: World) -> bool:
    """The unified kernels are listed: aiter is there, switched on or not."""
    return rules.has_aiter(world)


def forward_takes(config: Any, world: World) -> bool:
    """The dtype is one of half precision."""
    return HALF_DTYPES.accepts(config.dtype)


def aiter_forward(config: Any, world: World) -> bool:
    """aiter's forward kernel is named for a vision layer."""
    return forward_takes(config, world) and rules.aiter_mha_is_on(config, world)


def flash_attn_forward(config: Any, world: World) -> bool:
    """flash-attn's forward kernel is named for a vision layer."""
    there = "flash-attn" in world.inventory.packages
    enabled = rules.is_cdna(world) or world.inventory.on("flash_attn_triton")
    return forward_takes(config, world) and there and enabled


def splits_what_cannot_be_split(config: Any, world: World) -> bool:
    """An indexer is to be split over one rank, or is not of bf16."""
    alone = (world.run.tp_size or 1) < 2
    return world.wishes.minimax_m3_indexer_cp and (alone or config.indexer_kv_dtype != "bf16")


def lacks_flash_attention_3(config: Any, world: World) -> bool:
    """FlashAttention 3 is not there, as on every AMD device."""
    return not world.inventory.usable("fa3")


def lacks_flashmla(config: Any, world: World) -> bool:
    """FlashMLA is not there, as on every AMD device."""
    return not world.inventory.usable("flashmla")


def aiter_is_off(config: Any, world: World) -> bool:
    """aiter is switched off, or has no kernels here."""
    return not rules.aiter_is_on(world)


ATTENTION_LIST = Preference(
    serves=MHA,
    when=is_text_attention,
    order=(
        Ranked("ROCM_AITER_UNIFIED_ATTN", rules.rdna_aiter_is_on),
        Ranked("ROCM_ATTN", lists_rocm_attn),
        Ranked("ROCM_AITER_FA", rules.aiter_mha_is_on),
        Ranked("ROCM_AITER_UNIFIED_ATTN", lists_unified),
        "TRITON_ATTN",
        "TURBOQUANT",
        "ROCM_OCTAVE",
        "ULTRAQUANT",
    ),
    because="vLLM assembles its list so",
)
SPARSE_LIST = Preference(
    serves=BLOCK_SPARSE,
    when=is_unnamed_scheme,
    order=("ROCM_AITER_MLA_SPARSE",),
    because="vLLM has one list for whatever is sparse",
)
VISION_LIST = Preference(
    serves=MHA,
    when=is_vision,
    order=(
        Ranked("ROCM_AITER_FA", aiter_forward),
        Ranked("FLASH_ATTN", flash_attn_forward),
        "TORCH_SDPA",
        "TRITON_ATTN",
    ),
    because="vLLM asks for switches, packages and dtype, and for nothing else",
)
