"""Known models: the fields of their published config.json that attention depends on.

Dimensions only; a name here says nothing of weights. Names are lower case with hyphens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BF16 = {"torch_dtype": "bfloat16"}


def _plain(
    model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        **more,
    }


def _deepseek(model_type: str, layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return {
        **_plain(model_type, layers, heads, heads, hidden),
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        **BF16,
        **more,
    }


def _yarn(factor: float, mscale: float) -> dict[str, Any]:
    return {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale}


SIGLIP_SO400M = {
    "model_type": "siglip_vision_model",
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "hidden_size": 1152,
}

SHAPES: Mapping[str, dict[str, Any]] = {
    # Decoders that attend over heads.
    "llama-3-8b": _plain("llama", 32, 32, 8, 4096, **BF16),
    "llama-3-70b": _plain("llama", 80, 64, 8, 8192, **BF16),
    "smollm2-135m": _plain("llama", 30, 9, 3, 576, **BF16),
    "mistral-7b": _plain("mistral", 32, 32, 8, 4096, sliding_window=4096, **BF16),
    "mixtral-8x7b": _plain("mixtral", 32, 32, 8, 4096, sliding_window=None, **BF16),
    "phi-3-mini": _plain("phi3", 32, 32, 32, 3072, sliding_window=2047, **BF16),
    "qwen2.5-0.5b": _plain(
        "qwen2", 24, 14, 2, 896,
        sliding_window=32768, use_sliding_window=False, max_window_layers=21, **BF16,
    ),
    "qwen3-32b": _plain(
        "qwen3", 64, 64, 8, 5120,
        head_dim=128, sliding_window=None, use_sliding_window=False, max_window_layers=64, **BF16,
    ),
    "gemma-2-9b": _plain(
        "gemma2", 42, 16, 8, 3584,
        head_dim=256, sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
        **BF16,
    ),
    "gemma-3-27b": {
        "model_type": "gemma3",
        "text_config": _plain(
            "gemma3_text", 62, 32, 16, 5376,
            head_dim=128, sliding_window=1024, query_pre_attn_scalar=168,
        ),
        "vision_config": SIGLIP_SO400M,
        **BF16,
    },
    "gemma-4-31b": _plain(
        "gemma4_text", 60, 32, 16, 5376,
        head_dim=256, global_head_dim=512, num_global_key_value_heads=4, attention_k_eq_v=True,
        sliding_window=1024, num_kv_shared_layers=0, **BF16,
    ),
    "gpt-oss-120b": _plain(
        "gpt_oss", 36, 64, 8, 2880,
        head_dim=64, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 18, **BF16,
    ),
    "llama-4-scout": {
        "model_type": "llama4",
        "text_config": _plain(
            "llama4_text", 48, 40, 8, 5120,
            head_dim=128, attention_chunk_size=8192, no_rope_layers=[1, 1, 1, 0] * 12,
        ),
        "vision_config": {
            "model_type": "llama4_vision_model",
            "num_hidden_layers": 34,
            "num_attention_heads": 16,
            "hidden_size": 1408,
        },
        **BF16,
    },
    "qwen2.5-vl-7b": {
        **_plain(
            "qwen2_5_vl", 28, 28, 4, 3584,
            sliding_window=32768, use_sliding_window=False, max_window_layers=28, **BF16,
        ),
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "num_heads": 16,
            "hidden_size": 1280,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    },
    "gpt2": {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
    # ALiBi.
    "bloom": {"model_type": "bloom", "n_layer": 70, "n_head": 112, "hidden_size": 14336},
    "mpt": {
        "model_type": "mpt",
        "n_layers": 32,
        "n_heads": 32,
        "d_model": 4096,
        "attn_config": {"alibi": True, "attn_type": "multihead_attention", "softmax_scale": None},
        **BF16,
    },
    "falcon": {  # Falcon-RW-1B; the larger Falcons have rotary embeddings
        "model_type": "falcon",
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "hidden_size": 2048,
        "alibi": True,
        "multi_query": False,
        "new_decoder_architecture": False,
        **BF16,
    },
    # Latent and sparse attention.
    "deepseek-v2-lite": _deepseek("deepseek_v2", 27, 16, 2048, rope_scaling=_yarn(40, 0.707)),
    "deepseek-v3": _deepseek("deepseek_v3", 61, 128, 7168, rope_scaling=_yarn(40, 1.0)),
    "deepseek-v3.2": _deepseek(
        "deepseek_v32", 61, 128, 7168,
        rope_scaling=_yarn(40, 1.0), index_topk=2048, index_n_heads=64, index_head_dim=128,
    ),
    "deepseek-v4": {  # V4-Flash
        **_plain("deepseek_v4", 43, 64, 1, 4096),
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
        "num_nextn_predict_layers": 1,
        "index_topk": 512,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "o_groups": 8,
        **BF16,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl",
        "text_config": {
            **_plain("minimax_m3", 60, 64, 4, 6144, head_dim=128),
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": [0] * 3 + [1] * 57,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_num_index_heads": 4,
                "sparse_index_dim": 128,
            },
        },
        "vision_config": {
            "model_type": "minimax_m3_vl_vision",
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "hidden_size": 1280,
        },
        **BF16,
    },
    # Recurrent layers beside attention.
    "jamba": _plain(
        "jamba", 32, 32, 8, 4096,
        attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, **BF16,
    ),
    "zamba": _plain(  # Zamba-7B
        "zamba", 76, 16, 16, 3712,
        attention_head_dim=464, attn_layer_period=6, attn_layer_offset=4, mamba_d_state=16, **BF16,
    ),
    "nemotron-h": _plain(  # Nemotron-H-8B
        "nemotron_h", 52, 32, 8, 4096,
        attention_head_dim=128, mamba_num_heads=128, mamba_head_dim=64,
        hybrid_override_pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", **BF16,
    ),
    "qwen3-next": _plain(
        "qwen3_next", 48, 16, 2, 2048,
        head_dim=256, full_attention_interval=4, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, **BF16,
    ),
    "lfm2": _plain(  # LFM2-1.2B
        "lfm2", 16, 32, 8, 2048,
        conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14], **BF16,
    ),
    # Encoders, and encoders with a decoder.
    "bert-base": {
        "model_type": "bert",
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "hidden_size": 768,
    },
    "modernbert-base": {
        "model_type": "modernbert",
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_size": 768,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "torch_dtype": "float32",
    },
    "t5-base": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "d_kv": 64,
        "d_model": 768,
    },
    "bart-large": {
        "model_type": "bart",
        "is_encoder_decoder": True,
        "encoder_layers": 12,
        "decoder_layers": 12,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "d_model": 1024,
    },
    "whisper-large-v3": {
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "encoder_layers": 32,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "decoder_attention_heads": 20,
        "d_model": 1280,
        "torch_dtype": "float16",
    },
}  # fmt: skip
