"""Conditions and orders of vLLM 0.33 that attnplat does not share; `differences` names them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attnplat.backends.limits import Cases, Limit
from attnplat.backends.portable.catalog import BLOCK_SPARSE, MHA, MLA, SPARSE_MLA
from attnplat.backends.portable.predicates import (
    has_narrower_values,
    is_quantised,
    is_vision,
    model_is_known,
)
from attnplat.config.names import Feature
from attnplat.platforms.cuda import flash_attention as fa
from attnplat.platforms.cuda import preferences as ours
from attnplat.platforms.cuda import rules
from attnplat.platforms.selection import Preference, Ranked
from attnplat.platforms.world import World

_SPARSE = SPARSE_MLA | BLOCK_SPARSE
_LAST = frozenset({"TORCH_SDPA", "REFERENCE"})


UNCHECKED = "a kernel that is not there fails at the first step of a model, not at the choice"


def _without_last(row: Preference) -> tuple[str | Ranked, ...]:
    """Their order: without what they lack, and TURBOQUANT for every cache."""
    names = (_for_every_cache(member) for member in row.order)
    return tuple(member for member in names if member not in _LAST)


def _for_every_cache(member: str | Ranked) -> str | Ranked:
    conditional = isinstance(member, Ranked) and member.when is rules.keeps_turboquant
    return member.name if isinstance(member, Ranked) and conditional else member


# Whom the selector is asked for -------------------------------------------------------------


def is_deepseek_v4_family(config: Any, world: World) -> bool:
    """A layer of DeepSeek-V4 or V4.1: its model's code chooses, not the selector."""
    if config.operation not in SPARSE_MLA:
        return False
    return rules.is_deepseek_v4(config, world) or rules.is_deepseek_v41(config, world)


def is_left_to_the_selector(config: Any, world: World) -> bool:
    """Every layer but those that a model's code decides."""
    return not is_deepseek_v4_family(config, world)


def is_chosen_by_model_code(config: Any, world: World) -> bool:
    """A layer whose model picks its backend without asking it anything."""
    return is_deepseek_v4_family(config, world) or rules.is_minimax_m3(config, world)


# Ordinary attention --------------------------------------------------------------------------


def _is_text(config: Any, world: World) -> bool:
    return not is_vision(config, world) and not has_narrower_values(config, world)


def _is_causal_text(config: Any, world: World) -> bool:
    return _is_text(config, world) and rules.is_causal(config, world)


ATTENTION_ROWS = (
    replace(
        ours.BLACKWELL_FORWARD, when=_is_causal_text, order=_without_last(ours.BLACKWELL_FORWARD)
    ),
    replace(ours.ORDINARY, when=_is_text, order=_without_last(ours.ORDINARY)),
)

# Latent layers: one list for dense and sparse -------------------------------------------------


def _one_list(dense: tuple[str, ...], rows: tuple[Preference, ...]) -> tuple[Preference, ...]:
    """The dense backends before each sparse row's own, for layers of both kinds."""
    return tuple(
        replace(
            row,
            serves=MLA | SPARSE_MLA,
            order=(*dense, *_without_last(row)),
            because="one list serves dense and sparse latent layers",
            never_first={},
        )
        for row in rows
    )


_LATENT_BLACKWELL = _one_list(
    (
        "FLASHINFER_MLA",
        "TOKENSPEED_MLA",
        "CUTLASS_MLA",
        "FLASH_ATTN_MLA",
        "FLASHMLA",
        "TRITON_MLA",
    ),
    (
        ours.BLACKWELL_SPARSE_QUANTISED,
        ours.BLACKWELL_SPARSE_FEW_HEADS,
        ours.BLACKWELL_SPARSE,
    ),
)
_LATENT_CONSUMER = _one_list(("TRITON_MLA",), (ours.CONSUMER_SPARSE,))
# Every other device, Hopper or not, has Hopper's list.
_LATENT_ORDINARY = tuple(
    replace(row, on={})
    for row in _one_list(
        ("FLASH_ATTN_MLA", "FLASHMLA", "FLASHINFER_MLA", "TRITON_MLA"),
        (ours.HOPPER_SPARSE_512, ours.HOPPER_SPARSE),
    )
)
LATENT_ROWS = (*_LATENT_CONSUMER, *_LATENT_BLACKWELL, *_LATENT_ORDINARY)

# Block-sparse layers of no known model get the lists of ordinary attention --------------------


def is_unnamed_scheme(config: Any, world: World) -> bool:
    """A block-sparse layer of which the model is not told."""
    return config.model is None


def _is_unnamed_and_causal(config: Any, world: World) -> bool:
    return is_unnamed_scheme(config, world) and rules.is_causal(config, world)


BLOCK_ROWS = (
    replace(
        ours.BLACKWELL_FORWARD,
        serves=BLOCK_SPARSE,
        when=_is_unnamed_and_causal,
        order=_without_last(ours.BLACKWELL_FORWARD),
    ),
    replace(
        ours.ORDINARY,
        serves=BLOCK_SPARSE,
        when=is_unnamed_scheme,
        order=_without_last(ours.ORDINARY),
    ),
)

# MiniMax-M3 ---------------------------------------------------------------------------------


def msa_takes(config: Any, world: World) -> bool:
    """MSA's kernels take the layer, as the model's code sees it."""
    fits = config.topk_blocks in (4, 8, 16, 32) and config.kv_cache_dtype != "fp8_e5m2"
    return world.device.major == 10 and fits and config.kv_cache_dtype != "nvfp4_4over6"


def triton_blocks_take(config: Any, world: World) -> bool:
    """Triton's kernels take the layer, as the model's code sees it."""
    return not str(config.kv_cache_dtype).startswith("nvfp4")


MINIMAX_ROWS = (
    Preference(
        serves=BLOCK_SPARSE,
        when=rules.is_minimax_m3,
        order=(
            Ranked("TRITON_MSA", msa_takes),
            Ranked("MINIMAX_M3_SPARSE", triton_blocks_take),
        ),
        because="the model's code knows when MSA's kernels take the layer",
    ),
)

# DeepSeek-V4 --------------------------------------------------------------------------------


def _asked(world: World) -> str:
    return str(world.wishes.backend)


def _v4_row(model: Any, order: tuple[str | Ranked, ...], names: frozenset[str]) -> Preference:
    def asked_so(config: Any, world: World) -> bool:
        return bool(model(config, world)) and _asked(world) in names

    return Preference(
        serves=SPARSE_MLA, when=asked_so, order=order, because="the model's code maps names so"
    )


def _is_context_parallel(config: Any, world: World) -> bool:
    return Feature.PCP in world.run_needs


def _is_v41_on_many_ranks(config: Any, world: World) -> bool:
    return rules.is_deepseek_v41(config, world) and _is_context_parallel(config, world)


def _is_flashmla_asked_or_nothing(config: Any, world: World) -> bool:
    names = ("None", "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41")
    return _asked(world) in names


def _is_consumer_blackwell(config: Any, world: World) -> bool:
    return world.device.major == 12


def _is_no_consumer_blackwell(config: Any, world: World) -> bool:
    return world.device.major != 12


def _has_mega(config: Any, world: World) -> bool:
    fused = world.device.major == 10 and world.inventory.usable("engine_kernels")
    return fused and not rules.has_no_mega_groups(config, world)


_REFUSED_V4 = frozenset({"FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"})
_FLASHINFER_V4 = frozenset({"FLASHINFER_MLA_SPARSE_DSV4"})
_FLASHMLA_V4 = frozenset({"FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4"})

V4_ROWS = (
    _v4_row(rules.is_deepseek_v4, (), _REFUSED_V4),
    _v4_row(rules.is_deepseek_v4, ("FLASHINFER_MLA_SPARSE_DSV4",), _FLASHINFER_V4),
    _v4_row(rules.is_deepseek_v4, ("FLASHMLA_SPARSE_DSV4",), _FLASHMLA_V4),
    Preference(
        serves=SPARSE_MLA,
        when=rules.is_deepseek_v4,
        order=(
            Ranked("FLASHINFER_MLA_SPARSE_DSV4", _is_consumer_blackwell),
            Ranked("FLASHMLA_SPARSE_DSV4", _is_no_consumer_blackwell),
        ),
        because="the model's code asks for the device alone",
    ),
    Preference(
        serves=SPARSE_MLA,
        when=_is_v41_on_many_ranks,
        order=(Ranked("FLASHMLA_SPARSE_DSV41", _is_flashmla_asked_or_nothing),),
        because="only FlashMLA's layer splits a prefill over ranks",
    ),
    _v4_row(rules.is_deepseek_v41, (), _REFUSED_V4),
    _v4_row(
        rules.is_deepseek_v41,
        ("FLASHINFER_MLA_SPARSE_DSV41",),
        _FLASHINFER_V4 | {"FLASHINFER_MLA_SPARSE_DSV41"},
    ),
    _v4_row(
        rules.is_deepseek_v41,
        ("FLASHMLA_SPARSE_DSV41",),
        _FLASHMLA_V4 | {"FLASHMLA_SPARSE_DSV41"},
    ),
    _v4_row(
        rules.is_deepseek_v41,
        ("FLASHMLA_MEGA_ATTN_DSV41",),
        frozenset({"FLASHMLA_MEGA_ATTN_DSV41"}),
    ),
    Preference(
        serves=SPARSE_MLA,
        when=rules.is_deepseek_v41,
        order=(
            Ranked("FLASHINFER_MLA_SPARSE_DSV41", _is_consumer_blackwell),
            Ranked("FLASHMLA_MEGA_ATTN_DSV41", _has_mega),
            "FLASHMLA_SPARSE_DSV41",
        ),
        because="the model's code asks for the device, the build and the heads",
    ),
)

# FlashAttention -----------------------------------------------------------------------------


def _blackwell_10_with_4(ask: fa.Ask, world: World, version: int) -> bool:
    return world.device.major == 10 and fa.is_usable(4, world)


# Their table of steps: compute capability 11 is not among those that version 4 leads on, and
# the selector leaves reset windows to the model's code.
FA_STEPS = tuple(
    replace(step, when=_blackwell_10_with_4) if step.when is fa.is_blackwell_with_4 else step
    for step in fa.STEPS
    if step.when is not fa.wants_reset_windows
)


def _fa_ask(config: Any, world: World) -> fa.Ask:
    """What they ask of a layer: whatever the model and the run say beats the layer."""
    run = world.run
    return fa.ask_of(config)._replace(
        quantised=is_quantised(run.run_kv_cache_dtype),
        spans=bool(run.uses_mm_prefix),
        rswa=run.rswa_window is not None,
    )


def fa_is_3_or_4(world: World) -> bool:
    """Their version without a layer is 3 or 4."""
    return fa.resolve_version(fa.NOTHING_KNOWN, world, FA_STEPS) in (3, 4)


def fa_sinks_before_hopper(config: Any, world: World) -> bool:
    """Sinks on a device older than compute capability 9.0."""
    capability = world.device.capability
    old = capability is not None and capability < (9, 0)
    return Feature.SINKS in config.needs and old


def fa_reads_no_such_cache(config: Any, world: World) -> bool:
    """A quantised cache, of any format, that the version of the layer does not read."""
    dtype = config.kv_cache_dtype
    if not is_quantised(dtype):
        return False
    return dtype == "fp8_e5m2" or not fa.takes_fp8(_fa_ask(config, world), world, FA_STEPS)


def fa_serves_narrow_values(config: Any, world: World) -> bool:
    """Their version 3 or 4 serves a layer whose values are narrower than its keys."""
    return fa.resolve_version(_fa_ask(config, world), world, FA_STEPS) in (3, 4)


def fa_causal_half_is_2(config: Any, world: World) -> bool:
    """Steps without image spans would run on their version 2."""
    return fa.resolve_version(_fa_ask(config, world), world, FA_STEPS) not in (3, 4)


def fa_spans_without_4(config: Any, world: World) -> bool:
    """Image spans, and another version than 4 serves the layer, whatever is installed."""
    spans = Feature.MM_PREFIX in config.needs
    return spans and fa.resolve_version(_fa_ask(config, world), world, FA_STEPS) != 4


def _of_model(world: World) -> fa.Ask:
    run = world.run
    return fa.Ask(
        head_size=run.model_head_size,
        quantised=is_quantised(run.run_kv_cache_dtype),
        spans=bool(run.uses_mm_prefix),
        rswa=run.rswa_window is not None,
        own_kernel=True,
    )


def fa_has_model_of_512(world: World) -> bool:
    """A Hopper runs a model of heads of 512, fp8 all over, on version 4."""
    run = world.run
    wide = run.model_head_size == 512 and run.run_kv_cache_dtype in ("fp8", "fp8_e4m3")
    hopper = wide and world.device.major == 9
    return hopper and fa.resolve_version(_of_model(world), world, FA_STEPS) == 4


def fa_has_model_of_256(world: World) -> bool:
    """A model of heads of 256 gets version 4's kernel of its own."""
    ask = _of_model(world)
    own = fa.is_own_kernel_head(ask, world)
    return own and fa.resolve_version(ask, world, FA_STEPS) == 4


# Limits ---------------------------------------------------------------------------------------


def everywhere(limit: Limit | Cases) -> Limit:
    """What a declaration that depends on the device takes on the most able one."""
    rest: Limit = limit.otherwise if isinstance(limit, Cases) else limit
    return rest


def trtllm_is_there(world: World) -> bool:
    """The TRT-LLM kernels are installed for both phases, whether or not the user wants them."""
    there = world.inventory.usable("flashinfer_cubin") and not world.run.batch_invariant
    return world.device.major == 10 and there


def lacks_nope(config: Any, world: World) -> bool:
    """The model is known and the layer has no un-rotated part; they count it as 1."""
    return model_is_known(world) and getattr(config, "qk_nope_head_dim", None) is None


def lacks_topk(config: Any, world: World) -> bool:
    """The model is known and does not tell how many keys its queries read."""
    return model_is_known(world) and getattr(config, "index_topk", None) is None


def is_sparse_off_hopper_and_blackwell(config: Any, world: World) -> bool:
    """A sparse layer on another device than compute capability 9 and 10."""
    return config.operation in _SPARSE and world.device.major not in (9, 10)


def is_dense_off_hopper(config: Any, world: World) -> bool:
    """A layer that is not sparse, on another device than compute capability 9."""
    return config.operation not in _SPARSE and world.device.major != 9


# Values of another width, vision --------------------------------------------------------------


def has_flash_attention(config: Any, world: World) -> bool:
    """Some version of FlashAttention is installed."""
    return world.inventory.usable("flash_attention")


NARROW_ROWS = (
    Preference(
        serves=MHA,
        when=has_narrower_values,
        order=(
            Ranked("FLASH_ATTN_DIFFKV", fa_serves_narrow_values),
            Ranked("TRITON_ATTN_DIFFKV", has_flash_attention),
        ),
        because="FlashAttention's version is asked first, which needs the package",
    ),
)


def _is_vision_before_ampere(config: Any, world: World) -> bool:
    capability = world.device.capability
    return is_vision(config, world) and capability is not None and capability < (8, 0)


VISION_ROWS = (
    Preference(
        serves=MHA,
        when=_is_vision_before_ampere,
        order=("FLASH_ATTN", "TORCH_SDPA", "TRITON_ATTN", "FLASHINFER"),
        because="torch comes before Triton on devices older than Ampere",
    ),
)
