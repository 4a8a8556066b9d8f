"""Decisions that today's engines get wrong on AMD's devices, on processors, or everywhere.

The numbers are those of the collection that these tests go back to; those about NVIDIA's
devices alone have a file of their own. Each test states what is right.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.backend_names import BackendName
from attnplat.config.layer import (
    BlockSparseConfig,
    MhaConfig,
    MlaConfig,
    SparseMlaConfig,
    config_class,
)
from attnplat.config.names import Feature, KVCacheDtype, Operation
from attnplat.config.run import RunContext
from attnplat.errors import AttnplatError, ConfigError, NoBackendError
from attnplat.platforms import PLATFORMS, platform_for, tables_for

DENSE = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
LATENT = MlaConfig(
    head_size=576,
    num_heads=16,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    kv_lora_rank=512,
    v_head_size=128,
)
SPARSE = SparseMlaConfig(
    head_size=576,
    num_heads=16,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    kv_lora_rank=512,
    v_head_size=128,
    index_topk=2048,
    model_type="deepseek_v32",
)
V41 = SparseMlaConfig(
    head_size=512, kv_cache_dtype="fp8", sinks=True, model_type="deepseek_v41", num_heads=16
)
ULTRA = DENSE.replace(kv_cache_dtype="ultraquant_4bit")
VISION = MhaConfig(head_size=80, attn_type="encoder_only", role="vision", kv_cache_dtype=None)


def select(device, config, *, backend=None, run=None, packages=None, **wishes):
    platform = platform_for(device, assume=packages)
    return platform.select(config, AttentionConfig(backend=backend, **wishes), run=run)


def chosen(device, config, **how):
    selection = select(device, config, **how)
    return selection.chosen.name if selection.ok else None


def subjects(selection, name):
    """(kind, subject) of every reason against one backend."""
    return {(r.kind, r.subject) for r in selection.rejections[name]}


FOREIGN = [
    ("rocm:gfx942", "FLASHMLA_SPARSE", SPARSE, "cuda"),
    ("rocm:gfx950", "FLASHMLA_SPARSE_DSV41", V41, "cuda"),
    ("rocm:gfx90a", "HPC_ATTN", DENSE, "cuda"),
    ("rocm:gfx90a", "STEP5_DSA", BlockSparseConfig(head_size=192), "cuda"),
    ("rocm:gfx942", "CPU_MLA", LATENT, "cpu"),
    ("cpu:amx", "ROCM_ATTN", DENSE, "rocm"),
    ("cpu:amx", "XPU_MLA_SPARSE", SPARSE, "xpu"),
]


@pytest.mark.parametrize(("device", "name", "config", "owner"), FOREIGN)
def test_oddity_01_a_backend_of_another_vendor_is_refused(device, name, config, owner):
    selection = select(device, config, backend=name)
    assert not selection.ok
    assert subjects(selection, name) == {("platform", "platform")}
    assert f"it belongs to the platform {owner}" in selection.failure()


def test_oddity_01_gfx_digits_are_no_compute_capability():
    assert platform_for("rocm:gfx90a").device.capability is None


@pytest.mark.parametrize(
    ("device", "packages", "reason"),
    [
        ("rocm:gfx942", "minimal", ("package", "aiter")),
        ("rocm:gfx1100", "full", ("device", "traits")),
        ("rocm:gfx1201", "full", ("device", "traits")),
        ("rocm:gfx90a", "full", ("device", "traits")),
    ],
)
def test_oddity_02_sparse_kernels_that_are_not_there_are_not_chosen(device, packages, reason):
    selection = select(device, SPARSE, packages=packages)
    assert reason in subjects(selection, "ROCM_AITER_MLA_SPARSE")
    assert selection.chosen.name == "TORCH_SDPA"


UNCHECKED = [
    ("AMX_MLA", LATENT.replace(dtype="float16"), ("field", "dtype")),
    ("AMX_MLA", LATENT.replace(kv_cache_dtype="float32"), ("field", "kv_cache_dtype")),
    ("CPU_MLA", LATENT.replace(kv_cache_dtype="fp8_ds_mla"), ("field", "kv_cache_dtype")),
    ("CPU_ATTN", DENSE.replace(dtype="float64"), ("field", "dtype")),
    (
        "CPU_ATTN",
        DENSE.replace(kv_cache_dtype="int4_per_token_head"),
        ("field", "kv_cache_dtype"),
    ),
]


@pytest.mark.parametrize(("name", "config", "reason"), UNCHECKED)
def test_oddity_06_processors_check_what_they_choose(name, config, reason):
    assert subjects(select("cpu:amx", config, backend=name), name) == {reason}
    assert reason in subjects(select("cpu:amx", config), name)
    assert chosen("cpu:amx", config) in ("TORCH_SDPA", "CPU_MLA", "REFERENCE")


def test_oddity_06_context_parallel_decode_is_refused_on_processors():
    selection = select("cpu:amx", DENSE, run=RunContext(dcp_size=2))
    assert ("feature", "dcp") in subjects(selection, "CPU_ATTN")
    assert not selection.ok


@pytest.mark.parametrize("name", ["CPU_MLA", "FLASHINFER", "TORCH_SDPA", "AMX_MLA"])
def test_oddity_06_a_request_is_honoured_or_refused_never_dropped(name):
    selection = select("cpu:avx512", LATENT, backend=name)
    assert selection.requested == name and selection.replaced is None
    if selection.ok:
        assert selection.chosen.name == name
    else:
        assert name in selection.rejections


@pytest.mark.parametrize("device", ["rocm:gfx1100", "rocm:gfx1201", "rocm:gfx90a"])
def test_oddity_07_a_models_own_backend_is_checked(device):
    selection = select(device, V41, backend="ROCM_FLASHMLA_SPARSE_DSV41")
    assert subjects(selection, "ROCM_FLASHMLA_SPARSE_DSV41") == {("device", "traits")}


def test_oddity_07_another_models_backend_is_refused():
    selection = select("rocm:gfx950", V41, backend="ROCM_FLASHMLA_SPARSE_DSV4")
    name = "ROCM_FLASHMLA_SPARSE_DSV4"
    assert subjects(selection, name) == {("field", "model_type")}
    assert chosen("rocm:gfx950", V41) == "ROCM_FLASHMLA_SPARSE_DSV41"


@pytest.mark.parametrize("device", ["rocm:gfx950", "rocm:gfx942", "rocm:gfx1100"])
@pytest.mark.parametrize("packed", ["turboquant_4bit_nc", "ultraquant_4bit"])
def test_oddity_09_layers_of_a_packed_run_share_its_layout(device, packed):
    """A plain layer beside packed ones takes a backend that reads the packed layers' layout."""
    rule = "layout_vs_" + packed.split("_")[0]
    selection = select(device, DENSE, run=RunContext(run_kv_cache_dtype=packed))
    assert ("rule", rule) in subjects(selection, "ROCM_ATTN")
    layouts = selection.chosen.layouts
    assert layouts is None or "LBNHC" in layouts


@pytest.mark.parametrize("device", ["rocm:gfx950", "rocm:gfx1100", "cpu:avx2"])
def test_oddity_10_a_latent_layer_has_a_decode_and_a_prefill(device):
    unusual = MlaConfig(
        head_size=544, qk_nope_head_dim=64, qk_rope_head_dim=32, kv_lora_rank=512, v_head_size=64
    )
    selection = select(device, unusual)
    assert selection.ok and selection.parts["prefill"].ok
    without = select(device, LATENT, mla_prefill_backend="TRTLLM_RAGGED")
    assert without.accepted and not without.ok
    assert "no backend for the prefill part" in without.failure()


@pytest.mark.parametrize("device", ["cuda:sm100", "rocm:gfx950", "cpu:amx"])
@pytest.mark.parametrize("name", list(BackendName))
def test_oddity_11_any_name_may_be_asked_for_any_layer(device, name):
    """The answer is a choice or reasons, and never an exception of another kind."""
    platform = platform_for(device)
    for operation in Operation:
        config = config_class(operation)(head_size=128)
        try:
            selection = platform.select(config, AttentionConfig(backend=name))
        except ConfigError as error:  # the names of decode kernels set a field nothing reads
            assert name in ("CUTLASS_MSA", "TRITON_MSA"), error
            continue
        assert selection.ok or selection.failure()


@pytest.mark.parametrize("device", ["rocm:gfx942", "cpu:avx2"])
def test_oddity_13_all_refusals_are_of_one_family(device):
    assert chosen(device, DENSE, backend="TORCH_SDPA") == "TORCH_SDPA"
    with pytest.raises(NoBackendError):
        platform_for(device).get_attn_backend(DENSE, AttentionConfig(backend="FLASHINFER"))
    with pytest.raises(AttnplatError, match="unknown backend 'CUSTOM'"):
        AttentionConfig(backend="CUSTOM")


def test_oddity_14_no_entry_points_to_a_missing_module():
    """That every `loads` resolves is tested with the declarations; here: that none is dead."""
    assert "NO_ATTENTION" not in BackendName.__members__
    for platform in PLATFORMS:
        for row in tables_for(platform).preferences:
            assert all(reason for reason in row.never_first.values())


def test_oddity_15_what_is_never_automatic_says_why():
    tables = tables_for("rocm")
    latent = next(row for row in tables.preferences if "ROCM_AITER_MLA" in row.members)
    assert "ROCM_AITER_MLA takes" in latent.never_first["ROCM_AITER_TRITON_MLA"]
    assert "ROCM_SEGMENTED_ATTN" in {entry.name for entry in tables.by_name}


def test_oddity_17_block_sparse_layers_have_a_backend_of_their_own():
    blocks = BlockSparseConfig(head_size=128, model="minimax_m3", topk_blocks=16)
    assert chosen("rocm:gfx950", blocks) == "MINIMAX_M3_SPARSE"
    assert "no backend on cpu:amx" in select("cpu:amx", blocks).failure()


@pytest.mark.parametrize("device", ["cuda:sm90", "rocm:gfx950", "cpu:amx"])
def test_oddity_18_a_format_that_nothing_reads_is_named_as_the_one_reason(device):
    failure = select(device, DENSE.replace(kv_cache_dtype="fp8_inc")).failure()
    assert "kv_cache_dtype rules out every candidate" in failure.splitlines()[0]


def test_oddity_19_every_format_has_a_name_of_its_own():
    assert len(set(KVCacheDtype)) == len(KVCacheDtype.__members__)
    octave = DENSE.replace(head_size=256, kv_cache_dtype="octave_k3v4")
    selection = select("rocm:gfx942", octave)
    assert selection.chosen.name == "ROCM_OCTAVE"
    assert selection.to_dict()["layer"]["kv_cache_dtype"] == "octave_k3v4"


@pytest.mark.parametrize("name", ["ROCM_AITER_FA", "ROCM_AITER_TRITON_MLA", "FLASH_ATTN"])
def test_oddity_20_a_backend_is_called_what_it_is_asked_for_by(name):
    config = LATENT if "MLA" in name else DENSE
    assert chosen("rocm:gfx942", config, backend=name) == name


def test_oddity_21_auto_and_the_activations_dtype_are_taken_alike():
    for dtype in ("auto", "bfloat16", "float16"):
        assert chosen("cpu:avx2", LATENT.replace(kv_cache_dtype=dtype)) == "CPU_MLA"
    blocks = BlockSparseConfig(head_size=128, model="minimax_m3")
    for dtype in ("auto", "bfloat16"):
        layer = blocks.replace(kv_cache_dtype=dtype)
        assert chosen("rocm:gfx950", layer) == "MINIMAX_M3_SPARSE"


@pytest.mark.parametrize(
    ("device", "name", "config", "taken", "refused"),
    [
        ("rocm:gfx942", "ROCM_AITER_FA", DENSE, (16, 48, 544), (8, 24)),
        (
            "rocm:gfx942",
            "ULTRAQUANT",
            DENSE.replace(kv_cache_dtype="ultraquant_4bit"),
            (48,),
            (24,),
        ),
        ("cpu:avx2", "CPU_MLA", LATENT, (1, 16, 48), ()),
        ("cpu:amx", "AMX_MLA", LATENT, (1, 16, 48), ()),
    ],
)
def test_oddity_22_a_block_size_is_taken_as_declared(device, name, config, taken, refused):
    for size in taken:
        assert chosen(device, config.replace(block_size=size), backend=name) == name
    for size in refused:
        selection = select(device, config.replace(block_size=size), backend=name)
        assert subjects(selection, name) == {("field", "block_size")}


@pytest.mark.parametrize(
    ("device", "name", "packages"),
    [
        ("cuda:sm90", "FLASH_ATTN", "minimal"),
        ("rocm:gfx942", "ROCM_AITER_FA", "minimal"),
        ("cpu:zen", "ZENTORCH", "minimal"),
    ],
)
def test_oddity_23_a_missing_package_is_the_same_refusal_everywhere(device, name, packages):
    """Packages are judged by metadata: none is imported, so none can fail in its own way."""
    selection = select(device, DENSE, backend=name, packages=packages)
    assert "package" in {kind for kind, _ in subjects(selection, name)}


def test_oddity_23_selecting_imports_no_kernel_package():
    script = (
        "import sys; from attnplat.platforms import platform_for; "
        "from attnplat.config.layer import MhaConfig; "
        "[platform_for(d).select(MhaConfig(head_size=128)) for d in ('rocm:gfx950', 'cpu:amx')]; "
        "print([m for m in ('torch', 'triton', 'aiter', 'flash_attn', 'zentorch') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("device", ["rocm:gfx942", "rocm:gfx950", "rocm:gfx1201"])
def test_oddity_26_aiter_is_no_candidate_where_it_is_switched_off(device):
    off, on = (select(device, DENSE, packages=p).candidates for p in ("default", "full"))
    assert not [name for name in off if "AITER" in name]
    assert "ROCM_AITER_UNIFIED_ATTN" in on
    asked = chosen("rocm:gfx942", DENSE, backend="ROCM_AITER_FA", packages="default")
    assert asked == "ROCM_AITER_FA"


def test_oddity_26_what_is_switched_on_is_used():
    assert chosen("rocm:gfx942", DENSE) == "ROCM_AITER_FA"
    assert chosen("rocm:gfx1201", DENSE) == "ROCM_AITER_UNIFIED_ATTN"
    assert chosen("rocm:gfx942", DENSE, packages="default") == "ROCM_ATTN"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("rocm:gfx950", "ROCM_AITER_MLA"),
        ("rocm:gfx950", "ROCM_AITER_TRITON_MLA"),
        ("rocm:gfx950", "TRITON_MLA"),
        ("cpu:avx2", "CPU_MLA"),
        ("cpu:amx", "AMX_MLA"),
    ],
)
def test_oddity_27_dense_latent_backends_split_no_prefill_over_ranks(device, name):
    selection = select(device, LATENT, backend=name, run=RunContext(pcp_size=2))
    assert subjects(selection, name) == {("feature", Feature.PCP.value)}


VISION_REQUESTS = [
    ("rocm:gfx950", "FLASH_ATTN", VISION.replace(dtype="float32"), ("field", "dtype")),
    ("rocm:gfx950", "ROCM_AITER_FA", VISION.replace(head_size=320), ("field", "head_size")),
    ("rocm:gfx1100", "ROCM_AITER_FA", VISION, ("device", "traits")),
    ("rocm:gfx950", "TRITON_ATTN", VISION.replace(head_size=16), ("field", "head_size")),
]


@pytest.mark.parametrize(("device", "name", "config", "reason"), VISION_REQUESTS)
def test_oddity_28_vision_requests_are_checked(device, name, config, reason):
    assert subjects(select(device, config, backend=name), name) == {reason}


def test_oddity_28_a_missing_package_refuses_a_vision_request():
    selection = select("rocm:gfx950", VISION, backend="FLASH_ATTN", packages="minimal")
    assert subjects(selection, "FLASH_ATTN") == {("package", "flash-attn")}


def test_oddity_28_automatic_vision_asks_for_the_head_size():
    assert chosen("rocm:gfx950", VISION) == "ROCM_AITER_FA"
    assert chosen("rocm:gfx950", VISION.replace(head_size=320)) == "TRITON_ATTN"
