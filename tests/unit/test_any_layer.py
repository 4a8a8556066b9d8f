"""Whatever layer is asked about, in whatever run and world, there is an answer or one clear error.

Layers, runs, wishes and devices are drawn at random, contradictions included.
"""

from __future__ import annotations

import json
import random
from dataclasses import fields

from attnplat import AttentionConfig, platform_for
from attnplat.config.backend_names import BackendName
from attnplat.config.layer import config_class
from attnplat.config.names import (
    INDEXER_KV_DTYPES,
    AttnType,
    Dtype,
    Feature,
    KVCacheDtype,
    Operation,
    Role,
    StateKind,
)
from attnplat.config.run import RunContext
from attnplat.errors import AttnplatError
from attnplat.platforms.nearest import CHANGEABLE, OF_THE_MODEL
from attnplat.platforms.profiles import PROFILES

DEVICES = {
    "cuda": ("sm75", "sm80", "sm90", "sm100", "sm110", "sm120", "sm130"),
    "rocm": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "gfx9999"),
    "cpu": ("amx", "avx2", "scalar", "arm", "zen"),
}
FLAG = (False, True)
VALUES = {
    "head_size": (1, 8, 16, 32, 64, 72, 80, 96, 128, 192, 256, 512, 576, 1024),
    "dtype": tuple(Dtype),
    "kv_cache_dtype": (None, *KVCacheDtype),
    "block_size": (None, 1, 16, 24, 64, 128, 256),
    "num_heads": (None, 1, 8, 16, 64, 128),
    "num_kv_heads": (None, 1, 2, 8),
    "scale": (None, 0.125),
    "v_head_size": (None, 64, 128, 256, 512),
    "attn_type": tuple(AttnType),
    "role": tuple(Role),
    "causal": (None, True, False),
    "sliding_window": ((-1, -1), (127, -1), (127, 127), (0, 0)),
    "chunk_size": (None, 8192),
    "logits_soft_cap": (None, 30.0),
    **dict.fromkeys(("sinks", "alibi", "position_bias", "rswa", "mm_prefix"), FLAG),
    "per_head_quant_scales": FLAG,
    "static_sink_tokens": (0, 4),
    "topk": (None, 16, 2048),
    "qk_nope_head_dim": (None, 64, 128, 192),
    "qk_rope_head_dim": (None, 0, 64),
    "kv_lora_rank": (None, 256, 512),
    "index_topk": (None, 64, 2048),
    "index_head_dim": (64, 128),
    "index_n_heads": (None, 64),
    "model_type": (None, "deepseek_v32", "deepseek_v4", "deepseek_v41", "minimax_m3", "x"),
    "model": (None, "minimax_m3", "step5"),
    "o_groups": (None, 8, 16),
    "topk_blocks": (None, 4, 16),
    "indexer_kv_dtype": INDEXER_KV_DTYPES,
    "sparse_logits": FLAG,
    "state_kind": tuple(StateKind),
}
RUN = {
    "model_head_size": (128, 256, 512),
    "run_kv_cache_dtype": ("fp8", "turboquant_k8v4", "ultraquant_4bit"),
    "model_attn_type": ("encoder_decoder",),
    "model_soft_cap": (30.0,),
    "rswa_window": (128,),
    **dict.fromkeys(("is_diffusion", "uses_mm_prefix", "kv_connector"), (True,)),
    **dict.fromkeys(("batch_invariant", "adaptive_verification"), (True,)),
    **dict.fromkeys(("tp_size", "dcp_size", "pcp_size"), (2,)),
    "user_block_size": (16, 24),
}
WISHES = {
    "backend": tuple(BackendName),
    "flash_attn_version": (2, 3, 4),
    "use_trtllm_attention": FLAG,
    "mla_prefill_backend": ("FLASH_ATTN", "FLASHINFER", "TRTLLM_RAGGED", "CPU", "ROCM_AITER_FA"),
    "indexer_kv_dtype": INDEXER_KV_DTYPES,
    "indexer_sparse_logits": FLAG,
    "use_non_causal": FLAG,
    "minimax_m3_indexer_cp": FLAG,
}


def some(draw, values, share):
    """Some of the fields, each with one of its values."""
    return {name: draw.choice(v) for name, v in values.items() if draw.random() < share}


def some_layer(draw):
    kind = config_class(draw.choice(list(Operation)))
    known = {f.name for f in fields(kind)}
    values = {"head_size": draw.choice(VALUES["head_size"])}
    values |= {name: value for name, value in some(draw, VALUES, 0.25).items() if name in known}
    if draw.random() < 0.2:
        values["also_needs"] = draw.sample(list(Feature), 2)
    return kind(**values)


def some_platform(draw):
    name = draw.choice(sorted(DEVICES))
    arch = draw.choice(DEVICES[name])
    return platform_for(f"{name}:{arch}", assume=draw.choice(sorted(PROFILES[name])))


def answers(count):
    draw = random.Random(20261129)
    while count:
        try:
            yield some_platform(draw).select(
                some_layer(draw),
                AttentionConfig(**some(draw, WISHES, 0.08)),
                run=RunContext(**some(draw, RUN, 0.1)),
                allow_reference=draw.random() < 0.2,
            )
        except AttnplatError as error:
            assert str(error)
            continue
        count -= 1


def test_every_field_of_every_layer_is_drawn():
    assert set(VALUES) | {"dims"} == set(CHANGEABLE) | OF_THE_MODEL


def test_every_question_has_a_whole_answer():
    seen = {"ok": 0, "refused": 0, "advice": 0, "fixes": 0}
    for selection in answers(400):
        accepted = {backend.name for backend in selection.accepted}
        assert accepted | set(selection.rejections) == set(selection.candidates)
        assert not accepted & set(selection.rejections)
        assert all(selection.rejections.values())
        assert json.loads(json.dumps(selection.to_dict())) == selection.to_dict()
        told = selection.explain() if selection.ok else selection.failure()
        assert all(name in told for name in selection.rejections)
        seen["ok" if selection.ok else "refused"] += 1
        seen["advice"] += bool(selection.advice)
        seen["fixes"] += bool(selection.fixes)
    assert min(seen.values()) >= 10, seen
