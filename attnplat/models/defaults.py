"""What a model type implies where its config file is silent.

Files leave out what equals the defaults of their type; nested configs most of all. These are
the defaults of transformers' config classes, of the fields that are read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# fmt: off
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {
        "global_attn_every_n_layers": 4, "head_dim": 128, "num_attention_heads": 16,
        "num_hidden_layers": 32, "sliding_window": 1024,
    },
    "aimv2_vision_model": {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 24},
    "albert": {"hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 12},
    "apertus": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "arcee": {"hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32},
    "aria_text": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "audioflamingo3_encoder": {
        "hidden_size": 1280, "num_attention_heads": 20, "num_hidden_layers": 32,
    },
    "axk1": {
        "kv_lora_rank": 512, "num_attention_heads": 64, "num_hidden_layers": 61,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "axk2": {
        "index_head_dim": 128, "index_n_heads": 16, "index_topk": 2048, "kv_lora_rank": 128,
        "num_attention_heads": 32, "num_hidden_layers": 48, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
    "bailing_hybrid": {
        "head_dim": 128, "kv_lora_rank": 512, "layer_group_size": 6, "num_attention_heads": 32,
        "num_hidden_layers": 42, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "bamba": {
        "hidden_size": 4096, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_heads": 128,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    },
    "bart": {
        "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12,
        "encoder_attention_heads": 16, "encoder_layers": 12,
    },
    "bert": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "biogpt": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    "bitnet": {
        "hidden_size": 2560, "num_attention_heads": 20, "num_hidden_layers": 30,
        "num_key_value_heads": 5,
    },
    "blenderbot": {
        "d_model": 2560, "decoder_attention_heads": 32, "decoder_layers": 24,
        "encoder_attention_heads": 32, "encoder_layers": 2,
    },
    "blenderbot-small": {
        "d_model": 512, "decoder_attention_heads": 16, "decoder_layers": 8,
        "encoder_attention_heads": 16, "encoder_layers": 8,
    },
    "bloom": {"hidden_size": 64, "n_head": 8, "n_layer": 2},
    "camembert": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "clip_text_model": {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 12},
    "clip_vision_model": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "codegen": {"n_embd": 4096, "n_head": 16, "n_layer": 28},
    "cohere": {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 40},
    "cohere2": {
        "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 40,
        "sliding_window": 4096,
    },
    "cohere2_moe": {
        "head_dim": 128, "num_attention_heads": 64, "num_hidden_layers": 40,
        "prefix_dense_sliding_window_pattern": 1, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "cwm": {
        "head_dim": 128, "num_attention_heads": 48, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "sliding_window": 8192,
    },
    "data2vec-text": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "dbrx": {"d_model": 2048, "n_heads": 16, "n_layers": 24},
    "deberta": {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
        "relative_attention": False,
    },
    "deberta-v2": {
        "hidden_size": 1536, "num_attention_heads": 24, "num_hidden_layers": 24,
        "relative_attention": False,
    },
    "deepseek_v2": {
        "kv_lora_rank": 512, "num_attention_heads": 32, "num_hidden_layers": 32,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "deepseek_v3": {
        "kv_lora_rank": 512, "num_attention_heads": 128, "num_hidden_layers": 61,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "deepseek_v32": {
        "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "kv_lora_rank": 512,
        "num_attention_heads": 128, "num_hidden_layers": 61, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "deepseek_v4": {
        "head_dim": 512, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512,
        "num_attention_heads": 64, "num_hidden_layers": 43, "o_groups": 8,
        "sliding_window": 128, "qk_rope_head_dim": 64,
    },
    "dinov2": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "distilbert": {"dim": 768, "n_heads": 12, "n_layers": 6},
    "dots1": {
        "hidden_size": 4608, "max_window_layers": 62, "num_attention_heads": 32,
        "num_hidden_layers": 62, "num_key_value_heads": 32, "sliding_window": 4096,
    },
    "electra": {
        "hidden_size": 256, "is_decoder": False, "num_attention_heads": 4,
        "num_hidden_layers": 12,
    },
    "ernie": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "ernie4_5": {
        "head_dim": 128, "num_attention_heads": 16, "num_hidden_layers": 18,
        "num_key_value_heads": 2,
    },
    "ernie4_5_moe": {
        "hidden_size": 2560, "num_attention_heads": 20, "num_hidden_layers": 28,
        "num_key_value_heads": 4,
    },
    "esm": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "exaone4": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "exaone4_5_vision": {
        "depth": 32, "fullatt_block_indexes": (7, 15, 23, 31), "hidden_size": 3584,
        "num_heads": 16, "num_key_value_heads": 8,
    },
    "exaone_moe": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4,
    },
    "falcon": {
        "alibi": False, "hidden_size": 4544, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    },
    "falcon_h1": {
        "hidden_size": 4096, "mamba_d_head": "auto", "mamba_d_ssm": 1024, "mamba_n_heads": 128,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    },
    "falcon_mamba": {"hidden_size": 768, "num_hidden_layers": 32, "state_size": 16},
    "flex_olmo": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "gemma": {
        "head_dim": 256, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        "attn_logit_softcapping": 50.0, "head_dim": 256, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma3_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "use_bidirectional_attention": False,
    },
    "gemma3n_text": {
        "head_dim": 256, "num_attention_heads": 8, "num_hidden_layers": 35,
        "num_key_value_heads": 2, "num_kv_shared_layers": 15, "sliding_window": 512,
    },
    "gemma4_text": {
        "attention_k_eq_v": False, "head_dim": 256, "num_attention_heads": 8,
        "num_hidden_layers": 30, "num_key_value_heads": 4, "num_kv_shared_layers": 0,
        "sliding_window": 512,
    },
    "gemma4_vision": {
        "head_dim": 64, "num_attention_heads": 12, "num_hidden_layers": 16,
        "num_key_value_heads": 12,
    },
    "glm": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
    "glm4": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
    "glm4_moe": {
        "hidden_size": 4096, "num_attention_heads": 96, "num_hidden_layers": 46,
        "num_key_value_heads": 8,
    },
    "glm4_moe_lite": {
        "kv_lora_rank": 512, "num_attention_heads": 20, "num_hidden_layers": 47,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
    },
    "glm4v_moe_vision": {"depth": 24, "hidden_size": 1536, "num_heads": 12},
    "glm4v_vision": {"depth": 24, "hidden_size": 1536, "num_heads": 12},
    "glm5_next_text": {
        "index_head_dim": 128, "index_kpool": 16, "index_n_heads": 32, "index_topk": 2048,
        "kv_lora_rank": 512, "linear_head_dim": 128, "linear_num_heads": 64,
        "num_attention_heads": 64, "num_hidden_layers": 45, "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0, "v_head_dim": 256,
    },
    "glm_moe_dsa": {
        "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "kv_lora_rank": 512,
        "num_attention_heads": 64, "num_hidden_layers": 78, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256,
    },
    "glmasr_encoder": {"hidden_size": 1280, "num_attention_heads": 20, "num_hidden_layers": 32},
    "gpt2": {
        "n_embd": 768, "n_head": 12, "n_layer": 12, "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
    },
    "gpt_bigcode": {"multi_query": True, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "gpt_neo": {
        "hidden_size": 2048, "num_heads": 16, "num_layers": 24, "window_size": 256,
        "attention_types": [[["global", "local"], 12]],
    },
    "gpt_neox": {"hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44},
    "gpt_oss": {
        "head_dim": 64, "num_attention_heads": 64, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "sliding_window": 128,
    },
    "gptj": {"n_embd": 4096, "n_head": 16, "n_layer": 28},
    "granite": {
        "attention_multiplier": 1.0, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "granitemoe": {
        "attention_multiplier": 1.0, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "granitemoehybrid": {
        "attention_multiplier": 1.0, "hidden_size": 4096, "mamba_d_head": "auto",
        "mamba_expand": 2, "mamba_n_heads": 128, "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "granitemoeshared": {
        "attention_multiplier": 1.0, "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    "helium": {
        "head_dim": 128, "num_attention_heads": 20, "num_hidden_layers": 24,
        "num_key_value_heads": 20,
    },
    "hunyuan_v1_dense": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "hunyuan_v1_moe": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "hy_v3": {
        "head_dim": 128, "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": 8,
    },
    "hyperclovax": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "idefics2_vision": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "idefics3_vision": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 12},
    "internlm3": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 2,
    },
    "internvl_vision": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    "jais2": {"hidden_size": 3328, "num_attention_heads": 26, "num_hidden_layers": 32},
    "jamba": {
        "attn_layer_offset": 4, "attn_layer_period": 8, "hidden_size": 4096,
        "mamba_d_state": 16, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "kimi_k25_vision": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
    "kimi_linear": {
        "kv_lora_rank": 512, "linear_head_dim": 128, "linear_num_heads": 32,
        "num_attention_heads": 32, "num_hidden_layers": 27, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "layoutlm": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "lfm2": {
        "conv_L_cache": 3, "hidden_size": 2560, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8,
    },
    "lfm2_moe": {
        "conv_L_cache": 3, "hidden_size": 2048, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8,
    },
    "lfm3": {
        "conv_L_cache": 7, "head_dim": 128, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "sliding_window": 256,
    },
    "llama": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "llama4_text": {
        "attention_chunk_size": 8192, "head_dim": 128, "no_rope_layer_interval": 4,
        "num_attention_heads": 40, "num_hidden_layers": 48, "num_key_value_heads": 8,
    },
    "llama4_vision_model": {"hidden_size": 768, "num_attention_heads": 16, "num_hidden_layers": 34},
    "longcat_flash": {
        "kv_lora_rank": 512, "num_attention_heads": 64, "num_layers": 28,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "m2m_100": {
        "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12,
        "encoder_attention_heads": 16, "encoder_layers": 12,
    },
    "mamba": {"hidden_size": 768, "num_hidden_layers": 32, "state_size": 16},
    "mamba2": {"head_dim": 64, "num_heads": 128, "num_hidden_layers": 64},
    "marian": {
        "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12,
        "encoder_attention_heads": 16, "encoder_layers": 12,
    },
    "mbart": {
        "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12,
        "encoder_attention_heads": 16, "encoder_layers": 12,
    },
    "megatron-bert": {
        "hidden_size": 1024, "is_decoder": False, "num_attention_heads": 16,
        "num_hidden_layers": 24,
    },
    "mellum": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 1024,
    },
    "mimo_v2_flash": {
        "head_dim": 192, "num_attention_heads": 64, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "sliding_window": 129, "v_head_dim": 128,
    },
    "minicpm3": {
        "hidden_size": 2560, "kv_lora_rank": 256, "num_attention_heads": 40,
        "num_hidden_layers": 62, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    },
    "minimax": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "minimax_m2": {
        "head_dim": 128, "num_attention_heads": 48, "num_hidden_layers": 62,
        "num_key_value_heads": 8,
    },
    "minimax_m3_vl_text": {
        "head_dim": 128, "index_topk_blocks": 16, "num_attention_heads": 64,
        "num_hidden_layers": 60, "num_key_value_heads": 4,
    },
    "minimax_m3_vl_vision": {
        "hidden_size": 1280, "num_attention_heads": 16, "num_hidden_layers": 32,
    },
    "ministral": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "ministral3": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 34,
        "num_key_value_heads": 8,
    },
    "mistral": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "sliding_window": 4096,
    },
    "mistral4": {
        "kv_lora_rank": 256, "num_attention_heads": 32, "num_hidden_layers": 36,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "mixtral": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "mllama_text_model": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    "mllama_vision_model": {
        "attention_heads": 16, "hidden_size": 1280, "num_global_layers": 8,
        "num_hidden_layers": 32,
    },
    "modernbert": {
        "hidden_size": 768, "local_attention": 128, "num_attention_heads": 12,
        "num_hidden_layers": 22,
    },
    "modernbert-decoder": {
        "hidden_size": 768, "local_attention": 128, "num_attention_heads": 12,
        "num_hidden_layers": 22,
    },
    "molmo2_vision": {
        "head_dim": 72, "num_attention_heads": 16, "num_hidden_layers": 25,
        "num_key_value_heads": 16,
    },
    "mpnet": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "mpt": {"d_model": 2048, "n_heads": 16, "n_layers": 24},
    "mt5": {"d_kv": 64, "num_heads": 6, "num_layers": 8},
    "nanochat": {"hidden_size": 768, "num_attention_heads": 6, "num_hidden_layers": 12},
    "nemotron": {"hidden_size": 6144, "num_attention_heads": 48, "num_hidden_layers": 32},
    "nemotron_h": {
        "head_dim": 128, "mamba_head_dim": 64, "mamba_num_heads": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "nomic_bert": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "olmo": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "olmo2": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
    "olmo3": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "sliding_window": 4096,
    },
    "olmo_hybrid": {"hidden_size": 3840, "num_attention_heads": 30, "num_hidden_layers": 32},
    "olmoe": {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16},
    "opt": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "pegasus": {
        "d_model": 1024, "decoder_attention_heads": 16, "decoder_layers": 12,
        "encoder_attention_heads": 16, "encoder_layers": 12,
    },
    "persimmon": {"hidden_size": 4096, "num_attention_heads": 64, "num_hidden_layers": 36},
    "phi": {"hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24},
    "phi3": {"hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32},
    "phimoe": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    },
    "pixtral": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    "plbart": {
        "d_model": 768, "decoder_attention_heads": 12, "decoder_layers": 6,
        "encoder_attention_heads": 12, "encoder_layers": 6,
    },
    "qwen2": {
        "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen2_5_omni_audio_encoder": {
        "d_model": 1280, "encoder_attention_heads": 20, "encoder_layers": 32,
    },
    "qwen2_5_omni_text": {
        "hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "sliding_window": 32768, "use_sliding_window": False,
    },
    "qwen2_5_omni_vision_encoder": {
        "depth": 32, "fullatt_block_indexes": (7, 15, 23, 31), "hidden_size": 3584,
        "num_heads": 16,
    },
    "qwen2_5_vl_text": {
        "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen2_5_vl_vision": {
        "depth": 32, "fullatt_block_indexes": (7, 15, 23, 31), "hidden_size": 3584,
        "num_heads": 16,
    },
    "qwen2_audio_encoder": {"d_model": 1280, "encoder_attention_heads": 20, "encoder_layers": 32},
    "qwen2_moe": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen2_vl_text": {
        "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80,
        "num_key_value_heads": 8, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "num_heads": 16},
    "qwen3": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen3_5_moe_text": {
        "head_dim": 256, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_attention_heads": 16, "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
    "qwen3_5_moe_vision": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "qwen3_5_text": {
        "head_dim": 256, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_attention_heads": 16, "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_vision": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "qwen3_moe": {
        "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False,
    },
    "qwen3_next": {
        "head_dim": 256, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 2,
    },
    "qwen3_omni_moe_audio_encoder": {
        "d_model": 1280, "encoder_attention_heads": 20, "encoder_layers": 32,
    },
    "qwen3_omni_moe_text": {
        "hidden_size": 2048, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4,
    },
    "qwen3_omni_moe_vision_encoder": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "qwen3_vl_moe_text": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24,
        "num_key_value_heads": 16,
    },
    "qwen3_vl_moe_vision": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "qwen3_vl_text": {
        "head_dim": 128, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    "qwen3_vl_vision": {"depth": 27, "hidden_size": 1152, "num_heads": 16},
    "roberta": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "roformer": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "seed_oss": {
        "head_dim": 128, "num_attention_heads": 80, "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "siglip2_text_model": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "siglip2_vision_model": {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
    },
    "siglip_text_model": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "siglip_vision_model": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "smollm3": {
        "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "use_sliding_window": False,
    },
    "smolvlm_vision": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 12},
    "solar_open": {
        "head_dim": 128, "num_attention_heads": 64, "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "speech_to_text": {
        "d_model": 256, "decoder_attention_heads": 4, "decoder_layers": 6,
        "encoder_attention_heads": 4, "encoder_layers": 12,
    },
    "stablelm": {
        "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32,
    },
    "starcoder2": {
        "hidden_size": 3072, "num_attention_heads": 24, "num_hidden_layers": 30,
        "num_key_value_heads": 2,
    },
    "step3p5": {
        "head_dim": 128, "num_attention_heads": 64, "num_hidden_layers": 45,
        "num_key_value_heads": 8,
    },
    "step3p5_vision": {"hidden_size": 1536, "num_attention_heads": 16, "num_hidden_layers": 47},
    "switch_transformers": {
        "d_kv": 64, "num_decoder_layers": 12, "num_heads": 12, "num_layers": 12,
    },
    "t5": {"d_kv": 64, "num_heads": 8, "num_layers": 6},
    "umt5": {"d_kv": 64, "num_heads": 6, "num_layers": 8},
    "vaultgemma": {
        "attn_logit_softcapping": 50.0, "head_dim": 256, "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "vit": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "voxtral_encoder": {"hidden_size": 1280, "num_attention_heads": 20, "num_hidden_layers": 32},
    "whisper": {
        "d_model": 384, "decoder_attention_heads": 6, "decoder_layers": 4,
        "encoder_attention_heads": 6, "encoder_layers": 4,
    },
    "xlm-roberta": {
        "hidden_size": 768, "is_decoder": False, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "xlm-roberta-xl": {
        "hidden_size": 2560, "is_decoder": False, "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
    "youtu": {
        "kv_lora_rank": 512, "num_attention_heads": 16, "num_hidden_layers": 32,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
    "zamba": {
        "attn_layer_offset": 4, "attn_layer_period": 6, "hidden_size": 3712,
        "mamba_d_state": 16, "num_attention_heads": 16, "num_hidden_layers": 76,
        "num_key_value_heads": 16,
    },
    "zamba2": {
        "hidden_size": 2560, "mamba_expand": 2, "n_mamba_heads": 8, "num_attention_heads": 32,
        "num_hidden_layers": 54,
    },
}
