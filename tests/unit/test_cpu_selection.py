"""What processors choose, and why: instruction sets, adapters that are there, AMD's extension."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import (
    BlockSparseConfig,
    IndexerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
    StateConfig,
)
from attnplat.config.run import RunContext
from attnplat.platforms import platform_for
from attnplat.platforms.inventory import Inventory

DENSE = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
VISION = MhaConfig(head_size=72, attn_type="encoder_only", role="vision", kv_cache_dtype=None)
LATENT = MlaConfig(
    head_size=576, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512, v_head_size=128
)
PREFILL = MlaPrefillConfig(
    head_size=192, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_size=128
)
SPARSE = SparseMlaConfig(
    head_size=576,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    kv_lora_rank=512,
    v_head_size=128,
    index_topk=2048,
    model_type="deepseek_v32",
)


def select(arch, config, *, packages=None, run=None, **wishes):
    platform = platform_for(f"cpu:{arch}", assume=packages)
    return platform.select(config, AttentionConfig(**wishes), run=run)


def chosen(arch, config, **how):
    selection = select(arch, config, **how)
    return selection.chosen.name if selection.ok else None


CHOICES = [
    ("amx", DENSE, "CPU_ATTN"),
    ("avx512", DENSE, "CPU_ATTN"),
    ("avx2", DENSE, "CPU_ATTN"),
    ("neon", DENSE, "CPU_ATTN"),
    ("scalar", DENSE, "TORCH_SDPA"),
    ("amx", DENSE.replace(kv_cache_dtype="fp8"), "CPU_ATTN"),
    ("avx512", DENSE.replace(kv_cache_dtype="fp8_e5m2"), "CPU_ATTN"),
    ("avx2", DENSE.replace(kv_cache_dtype="int8_per_token_head"), "CPU_ATTN"),
    ("avx2", DENSE.replace(kv_cache_dtype="int4_per_token_head"), "TORCH_SDPA"),
    ("amx", DENSE.replace(sinks=True), "CPU_ATTN"),
    ("amx", DENSE.replace(head_size=72), "CPU_ATTN"),
    ("amx", DENSE.replace(block_size=16), "CPU_ATTN"),
    ("amx", DENSE.replace(v_head_size=64), "CPU_ATTN"),
    ("amx", DENSE.replace(dtype="float64"), "REFERENCE"),
    ("amx", DENSE.replace(attn_type="encoder_decoder"), "CPU_ATTN"),
    ("amx", VISION, "TORCH_SDPA"),
    ("amx", LATENT, "AMX_MLA"),
    ("amx", LATENT.replace(dtype="float32"), "CPU_MLA"),
    ("amx", LATENT.replace(block_size=16), "AMX_MLA"),
    ("avx512", LATENT, "CPU_MLA"),
    ("avx2", LATENT, "CPU_MLA"),
    ("scalar", LATENT, "TORCH_SDPA"),
    ("avx2", LATENT.replace(sinks=True), "CPU_MLA"),
    ("avx2", PREFILL, "CPU"),
    ("zen", PREFILL, "CPU"),
    ("avx2", SPARSE, "CPU_MLA_SPARSE"),
    ("amx", SPARSE, "CPU_MLA_SPARSE"),
    ("amx", SPARSE.replace(kv_cache_dtype="fp8_ds_mla"), "CPU_MLA_SPARSE"),
    ("avx2", SPARSE.replace(kv_cache_dtype="nvfp4_ds_mla"), "CPU_MLA_SPARSE"),
    ("avx2", SPARSE.replace(kv_cache_dtype="int4_per_token_head"), "TORCH_SDPA"),
    ("scalar", SPARSE, "TORCH_SDPA"),
    ("amx", SPARSE.indexer().replace(indexer_kv_dtype="mxfp4"), "CPU_INDEXER"),
    ("scalar", SPARSE.indexer().replace(indexer_kv_dtype="mxfp4"), "REFERENCE"),
]


@pytest.mark.parametrize(("arch", "config", "name"), CHOICES)
def test_the_first_choice(arch, config, name):
    assert chosen(arch, config) == name


@pytest.mark.parametrize(
    ("config", "name"), [(DENSE, "CPU_ATTN"), (LATENT, "CPU_MLA"), (PREFILL, "CPU")]
)
def test_without_the_compiled_kernels_torch_serves_and_the_reason_is_named(config, name):
    platform = platform_for("cpu:avx2")
    inventory = Inventory.assume(platform.inventory.packages)
    selection = replace(platform, inventory=inventory).select(config)
    assert str(selection.chosen) == "TORCH_SDPA"
    (reason,) = selection.rejections[name]
    assert (reason.subject, reason.kind) == ("cpu_kernels", "package")
    assert "libattnplat_cpu.so was not built" in str(reason)
    assert "C++ compiler" in str(reason)


def test_amds_extension_prefills_on_amds_processors_alone():
    assert chosen("zen", PREFILL, packages="zen") == "ZEN_CPU"
    assert chosen("zen", PREFILL.replace(dtype="float32"), packages="zen") == "CPU"
    assert chosen("avx512", PREFILL, packages="zen") == "CPU"


def test_amds_attention_is_chosen_by_name_only():
    assert chosen("zen", VISION, packages="zen") == "TORCH_SDPA"
    assert chosen("zen", VISION, packages="zen", backend="ZENTORCH") == "ZENTORCH"


@pytest.mark.parametrize(
    "packages",
    [
        {"torch": "2.13.0", "zentorch": "2.13.0.1"},
        {"torch": "2.14.0", "zentorch": "2.14.0.1"},
        {"torch": "2.14.0", "zentorch": "2.13.0.2"},
    ],
)
def test_amds_attention_is_known_in_one_version_only(packages):
    platform = replace(platform_for("cpu:zen"), inventory=Inventory.assume(packages))
    failure = platform.select(VISION, AttentionConfig(backend="ZENTORCH")).failure()
    assert "zentorch 2.13.0.2 beside torch 2.13" in failure


def test_sparse_latent_layers_are_served_with_all_their_parts():
    selection = select("avx2", SPARSE)
    assert {part: str(sel.chosen) for part, sel in selection.parts.items()} == {
        "prefill": "CPU",
        "indexer": "CPU_INDEXER",
    }


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "mxfp4"])
def test_every_format_of_an_indexer_is_scored(dtype):
    layer = IndexerConfig(head_size=128, model_type="deepseek_v4")
    selection = select("avx2", layer, indexer_kv_dtype=dtype)
    assert selection.ok and selection.config.indexer_kv_dtype == dtype


@pytest.mark.parametrize(
    "config", [BlockSparseConfig(head_size=128), StateConfig(head_size=64)], ids=str
)
def test_what_no_kernel_here_computes_is_refused_in_one_sentence(config):
    failure = select("amx", config).failure()
    assert failure.startswith("no backend on cpu:amx (simulated, packages assumed: full) serves")


def test_batch_invariance_is_kept_by_the_kernels():
    assert chosen("amx", DENSE, run=RunContext(batch_invariant=True)) == "CPU_ATTN"


# A real processor ----------------------------------------------------------------------------


def here(arch):
    """A processor that is not simulated: only what has an adapter may be chosen."""
    platform = platform_for(f"cpu:{arch}")
    return replace(platform, device=replace(platform.device, simulated=False))


@pytest.mark.parametrize("arch", ["amx", "avx512", "avx2", "neon", "scalar"])
@pytest.mark.parametrize("config", [DENSE, DENSE.replace(head_size=64), LATENT, PREFILL, VISION])
def test_what_is_chosen_on_a_real_processor_has_an_adapter(arch, config):
    selection = here(arch).select(config)
    assert selection.chosen.loads is not None
    for name, reasons in selection.rejections.items():
        backend = here(arch).tables.find(name, config.operation)
        refused_for_its_adapter = "adapter" in {reason.kind for reason in reasons}
        assert refused_for_its_adapter == (backend.loads is None)


def test_a_request_for_what_has_no_adapter_says_so():
    tables = here("avx2").tables
    backend = tables.find("ZEN_CPU", PREFILL.operation)
    assert backend.loads is None
    selection = here("zen").select(PREFILL, AttentionConfig(mla_prefill_backend="ZEN_CPU"))
    assert "attnplat has no adapter for it yet" in selection.failure()
