"""What another engine's backend classes answer of themselves, as questions to attnplat.

`tests/data/backend_classes.jsonl.gz` holds one object a line: a device, a package profile, a
backend, and what its class says that it takes there; classes that answer alike on several
devices stand once. Each answer becomes an explicit request under that engine's rules, of a
layer that is ordinary but for one thing, and the code that its refusal must hold or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from attnplat.config.names import AttnType, KVCacheDtype
from attnplat.platforms.platform import Platform
from attnplat.snapshots.check import read_cases
from attnplat.snapshots.selection import decide_selection

CLASSES = Path(__file__).parents[1] / "data" / "backend_classes.jsonl.gz"
# Answer -> the flag of a recorded layer, and the code of its refusal.
FLAGS = {
    "supports_sink": ("has_sink", "sink"),
    "supports_sliding_window": ("has_sliding_window", "sliding_window"),
    "supports_mm_prefix": ("use_mm_prefix", "mm_prefix"),
    "supports_non_causal": ("use_non_causal", "non_causal"),
    "supports_rswa": ("use_rswa", "rswa"),
    "supports_per_head_quant_scales": ("use_per_head_quant_scales", "per_head_quant_scales"),
    "supports_batch_invariance": ("use_batch_invariant", "batch_invariance"),
    "supports_kv_connector": ("use_kv_connector", "kv_connector"),
    "supports_pcp": ("use_pcp", "pcp"),
    "supports_dcp": ("use_dcp", "dcp"),
}
LAYER: dict[str, Any] = {
    "head_size": 128,
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "block_size": None,
    "use_mla": False,
    "use_sparse": False,
    **dict.fromkeys((flag for flag, _ in FLAGS.values()), False),
    "use_adaptive_verification": False,
    "attn_type": "decoder",
    "num_heads": None,
}
HEAD_SIZES = (16, 24, 32, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 264, 288, 320, 512, 576)
BLOCK_SIZES = (1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 544)
# attnplat's word for these formats is newer than the recording.
UNRECORDED = {KVCacheDtype.FLOAT32, KVCacheDtype.MXFP4, KVCacheDtype.MXFP8}
KV_CACHE_DTYPES = tuple(str(d) for d in KVCacheDtype if d not in UNRECORDED)
# These ask a combination of the cache's format which is recorded under the plain code.
CACHE_IN_COMBINATION = ("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41")


@dataclass(frozen=True, eq=False)
class Question:
    """A request, and whether its refusal must hold a code."""

    row: dict[str, Any]
    code: str
    refused: bool

    @property
    def device(self) -> tuple[str, str, str]:
        return self.row["platform"], self.row["arch"], self.row["profile"]

    def agrees(self, platform: Platform) -> bool:
        """Whether `platform` refuses for the code exactly where the class does."""
        outcome = decide_selection(self.row, platform)
        return (self.code in outcome["rejected"].get(self.row["requested"], ())) == self.refused


@cache
def questions() -> tuple[Question, ...]:
    """Every question, of all classes."""
    return tuple(question for answers in read_cases(CLASSES) for question in _of(dict(answers)))


def _of(answers: dict[str, Any]) -> Iterator[Question]:
    device = {name: answers[name] for name in ("platform", "arch", "profile")}

    def ask(code: str, taken: bool, **changes: Any) -> Question:
        config = {**LAYER, **changes}
        row = {**device, "config": config, "context": None, "requested": answers["backend"]}
        return Question(row, code, not taken)

    if answers.get("load_error"):
        yield ask("import_error", False)
        return
    sizes = _head_sizes(answers["head_sizes_accepted"])
    latent, sparse = answers["is_mla"], answers["is_sparse"]
    own: dict[str, Any] = {
        "head_size": 128 if 128 in sizes else sizes[-1],
        "dtype": "bfloat16" if "bfloat16" in answers["dtypes"] else answers["dtypes"][0],
        "use_mla": latent,
        "use_sparse": sparse,
    }
    for code in ("import_error", "mla", "non_mla", "sparse", "non_sparse"):
        yield ask(code, True, **own)
    yield ask("compute_capability", answers["compute_capability_ok"], **own)
    yield ask("non_mla" if latent else "mla", False, **{**own, "use_mla": not latent})
    yield ask("non_sparse" if sparse else "sparse", False, **{**own, "use_sparse": not sparse})
    for answer, (flag, code) in FLAGS.items():
        yield ask(code, answers[answer], **{**own, flag: True})
    if latent:
        both = {**own, "use_non_causal": True, "use_dcp": True}
        yield ask("non_causal_mla_dcp", answers["supports_non_causal_dcp"], **both)
    for field, code, values, taken in _fields(answers, sizes):
        yield from (ask(code, value in taken, **{**own, field: value}) for value in values)


def _fields(answers: dict[str, Any], sizes: list[int]) -> Iterator[tuple[str, str, Any, Any]]:
    """Field, code, the values to try, and those that the class takes."""
    yield "head_size", "head_size", HEAD_SIZES, sizes
    yield "dtype", "dtype", ("float16", "bfloat16", "float32"), answers["dtypes"]
    yield "block_size", "block_size", BLOCK_SIZES, answers["block_sizes_accepted"]
    if answers["is_mla"] or not answers["is_sparse"]:  # a block-sparse config has no such field
        yield "attn_type", "attn_type", [str(t) for t in AttnType], answers["attn_types"]
    if answers["backend"] not in CACHE_IN_COMBINATION:
        none = [None] if answers["kv_cache_dtype_none_ok"] else []
        taken = [*answers["kv_cache_dtypes"], *none]
        yield "kv_cache_dtype", "kv_cache_dtype", (None, *KV_CACHE_DTYPES), taken


def _head_sizes(recorded: list[int] | str) -> list[int]:
    """The sizes a class takes, of those tried; recorded as a list or as `32..1024 (...)`."""
    if isinstance(recorded, list):
        return recorded
    found = re.match(r"(\d+)\.\.(\d+) \((\d+) of (\d+) probed\)", recorded)
    assert found is not None, recorded
    least, most, took, _ = map(int, found.groups())
    step = 8 if took == (most - least) // 8 + 1 else 1
    return [size for size in range(least, most + 1) if size % step == 0]
