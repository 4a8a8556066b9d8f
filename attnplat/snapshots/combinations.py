"""The recorded engine's names for combinations of values, backend by backend.

Beside its plain checks every recorded backend has one check of combinations, which names the
first that fails. Some of what attnplat declares as a plain limit, or as a package, that engine
names so; some it says twice. The entries stand in the order in which it asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from attnplat.backends.backend import Rejection

PREFIX = "combo:"


def _any_value(got: Any) -> bool:
    return True


@dataclass(frozen=True)
class Combination:
    """A recorded name, and the refusal that it stands for.

    Attributes:
        code: the recorded name, without its prefix; None where it says a plain one again.
        subject: the subject of the refusal: a field, a package, a rule of attnplat's.
        got: which refused values it is said of.
    """

    code: str | None
    subject: str
    got: Callable[[Any], bool] = _any_value

    def stands_for(self, reason: Rejection) -> bool:
        """Whether `reason` is what the recorded name says."""
        return reason.subject == self.subject and self.got(reason.got)


def _is_no_sparse_layer(got: Any) -> bool:
    return got not in ("sparse_mla", "block_sparse")


def _is_fp8_ds_mla(got: Any) -> bool:
    return bool(got == "fp8_ds_mla")


def _is_float16(got: Any) -> bool:
    return bool(got == "float16")


def _is_no_hopper_or_blackwell(got: Any) -> bool:
    return got is None or got[0] not in (9, 10)


def _rules(*codes: str) -> tuple[Combination, ...]:
    return tuple(Combination(code, code) for code in codes)


_FLASHINFER_SPARSE = (
    *_rules("fi_sparse_pcp_dcp"),
    Combination("fi_sparse_fp8_ds_mla", "kv_cache_dtype", _is_fp8_ds_mla),
    *_rules("fi_sparse_norope_dims", "fi_sparse_nope_dim", "no_index_topk"),
)

_FLASHINFER_V4 = (
    Combination("dsv4_fi_device", "capability"),
    Combination(None, "kv_cache_dtype"),
)

COMBINATIONS: dict[str, tuple[Combination, ...]] = {
    "FLASH_ATTN": _rules(
        "fa_sink_below_sm90",
        "fa_sm90_fp8_mm_prefix",
        "fa_fp8_kv_version",
        "fa_mm_prefix_needs_fa4",
    ),
    "B12X": (
        Combination("b12x_dtype", "dtype"),
        Combination("b12x_kv_float16", "kv_cache_dtype", _is_float16),
        Combination("b12x_kv_quant", "kv_cache_dtype"),
        Combination("b12x_missing", "b12x"),
    ),
    "FLASHINFER_MLA": (Combination("fi_mla_nope_dim", "qk_nope_head_dim"),),
    "TOKENSPEED_MLA": (
        Combination("tokenspeed_missing", "tokenspeed-mla"),
        Combination("tokenspeed_dims", "qk_nope_head_dim"),
        Combination("tokenspeed_dims", "qk_rope_head_dim"),
        Combination("tokenspeed_dims", "v_head_size"),
    ),
    "FLASH_ATTN_MLA": (Combination("fa_mla_device", "capability"),),
    "FLASHINFER_MLA_SPARSE": _FLASHINFER_SPARSE,
    "FLASHINFER_MLA_SPARSE_SM90": (
        Combination("fi_sm90_api", "flashinfer_sparse_sm90"),
        Combination("fi_sm90_sparse_only", "operation", _is_no_sparse_layer),
        Combination("fi_sm90_kv_lora", "kv_lora_rank"),
        Combination("fi_sm90_rope", "qk_rope_head_dim"),
    ),
    "FLASHINFER_MLA_SPARSE_SM120": (
        Combination("fi_sm120_api", "flashinfer_sparse_sm120"),
        Combination(None, "dtype"),
        Combination(None, "kv_cache_dtype"),
        *_rules("no_index_topk"),
        Combination("fi_sm120_topk2048", "index_topk"),
    ),
    "FLASH_ATTN_MLA_SPARSE": (
        Combination("fa_mla_sparse_kv_dtype", "kv_cache_dtype"),
        Combination("fa_mla_device", "capability"),
        Combination("fa_mla_sparse_dcp", "dcp"),
        *_rules("no_index_topk"),
    ),
    "FLASH_ATTN_MLA_SPARSE_FA4": (
        Combination("fa4_sparse_needs_flashinfer", "flashinfer"),
        Combination("fa4_sparse_topk_mod128", "index_topk"),
        *_rules("fa4_sparse_topk_mod128"),
        Combination("fa4_sparse_dims", "kv_lora_rank"),
        Combination("fa4_sparse_dims", "qk_rope_head_dim"),
        *_rules("fa4_sparse_head_count"),
        *_FLASHINFER_SPARSE,
    ),
    "FLASHMLA": _rules("flashmla_unavailable"),
    "FLASHMLA_MEGA_ATTN_DSV41": (
        *_rules("flashmla_unavailable"),
        Combination("flashmla_sparse_device", "capability", _is_no_hopper_or_blackwell),
        Combination("flashmla_mega_device", "capability"),
    ),
    "FLASHINFER_MLA_SPARSE_DSV4": _FLASHINFER_V4,
    "FLASHINFER_MLA_SPARSE_DSV41": _FLASHINFER_V4,
}


def is_recorded_as_combination(reason: Rejection) -> bool:
    """Whether the recorded engine counts `reason` among a backend's combinations."""
    return any(c.stands_for(reason) for c in COMBINATIONS.get(reason.backend, ()))


def first_combination(reasons: Iterable[Rejection], plain_rules: frozenset[str]) -> str | None:
    """The one combination that the recorded engine names of a backend's refusals, or None."""
    reasons = tuple(reasons)
    listed = COMBINATIONS.get(reasons[0].backend, ()) if reasons else ()
    for combination in listed:
        if any(combination.stands_for(reason) for reason in reasons):
            return combination.code and PREFIX + combination.code
    rules = (r.subject for r in reasons if r.kind == "rule" and r.subject not in plain_rules)
    code = next(rules, None)
    return None if code is None else PREFIX + code
