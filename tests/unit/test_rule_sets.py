"""Another engine's rules as data: what a difference changes, and what acceptance rules admit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import IndexerConfig, MhaConfig, MlaConfig, SparseMlaConfig
from attnplat.config.run import RunContext
from attnplat.errors import UnknownNameError
from attnplat.platforms import platform_for, tables_for
from attnplat.platforms.acceptance import ACCEPTANCE_RULES, with_shared_numbers
from attnplat.platforms.differences import Difference
from attnplat.platforms.rules import differences_of, under

DENSE = MhaConfig(head_size=128, num_heads=32, num_kv_heads=8)
LATENT = MlaConfig(head_size=576)
VISION = MhaConfig(head_size=72, attn_type="encoder_only", role="vision", kv_cache_dtype=None)
V4 = SparseMlaConfig(head_size=512, kv_cache_dtype="fp8", model_type="deepseek_v4", sinks=True)


def theirs(device, *, without=None, packages=None):
    return under("vllm-0.33", platform_for(device, assume=packages), without=without)


def difference(platform, subject, backend=None):
    """The one difference of that subject and backend."""
    (found,) = [
        d for d in differences_of(platform) if d.subject == subject and d.backend == backend
    ]
    return found


def chosen(platform, config, run=None, **wishes):
    selection = platform.select(config, AttentionConfig(**wishes), run=run)
    return selection.accepted[0].name if selection.accepted else None


def test_attnplats_own_rules_have_no_acceptance_rule():
    for name in ("cuda", "rocm", "cpu"):
        assert not tables_for(name).accepts
    with pytest.raises(UnknownNameError, match="vllm"):
        under("vllm", platform_for("cpu:avx2"))


def test_an_unknown_acceptance_rule_is_an_error():
    made_up = Difference(
        backend=None, subject="accepts.all", theirs=True, ours="", because="", source=""
    )
    from attnplat.platforms.differences import tables_under

    with pytest.raises(UnknownNameError, match="acceptance rule"):
        tables_under(tables_for("rocm"), [made_up], platform_for("rocm:gfx942").device)


def test_every_acceptance_rule_is_in_force_somewhere():
    used = set()
    for device in ("cuda:sm90", "rocm:gfx942", "cpu:amx"):
        used |= set(theirs(device).tables.accepts)
    assert used == set(ACCEPTANCE_RULES)


SHARED = [("gfx90a", (9, 0)), ("gfx942", (9, 4)), ("gfx1151", (11, 5)), ("gfx1250", (12, 5))]


@pytest.mark.parametrize(("arch", "numbers"), SHARED)
def test_shared_numbers_are_the_gfx_digits(arch, numbers):
    world = platform_for(f"rocm:{arch}").world()
    assert with_shared_numbers(world).device.capability == numbers
    assert world.device.capability is None


def test_shared_numbers_leave_other_vendors_alone():
    for device in ("cuda:sm90", "cpu:amx"):
        world = platform_for(device).world()
        assert with_shared_numbers(world) is world


def test_a_foreign_backend_is_judged_by_its_own_declaration():
    on = theirs("rocm:gfx90a")
    assert chosen(on, DENSE, backend="CPU_ATTN") == "CPU_ATTN"
    assert chosen(on, DENSE.replace(head_size=72), backend="CPU_ATTN") is None
    assert chosen(on, DENSE, backend="HPC_ATTN") == "HPC_ATTN"
    assert chosen(theirs("rocm:gfx942"), DENSE, backend="HPC_ATTN") is None
    without = theirs("rocm:gfx90a", without=difference("rocm", "accepts.foreign_platform"))
    assert chosen(without, DENSE, backend="CPU_ATTN") is None


def test_a_request_about_the_cache_alone_is_replaced_in_a_packed_run():
    packed = RunContext(run_kv_cache_dtype="turboquant_4bit_nc")
    on = theirs("rocm:gfx942")
    assert chosen(on, DENSE, run=packed, backend="ROCM_ATTN") == "TRITON_ATTN"
    sinks = DENSE.replace(sinks=True)
    assert chosen(on, sinks, run=packed, backend="ROCM_ATTN") is None
    assert chosen(on, DENSE.replace(block_size=8), backend="ROCM_ATTN") is None
    ours = platform_for("rocm:gfx942")
    assert chosen(ours, DENSE, run=packed, backend="ROCM_ATTN") is None


def test_processors_drop_requests_and_check_nothing():
    on = theirs("cpu:amx")
    assert chosen(on, DENSE.replace(sinks=True, head_size=72), backend="FLASHINFER") == "CPU_ATTN"
    assert chosen(on, LATENT, backend="TRITON_MLA") == "AMX_MLA"
    assert chosen(on, LATENT, backend="CPU_MLA") == "CPU_MLA"
    assert chosen(on, SparseMlaConfig(head_size=576)) is None
    assert chosen(on, VISION, backend="FLASH_ATTN") is None


def test_vision_requests_are_taken_unchecked_where_a_row_names_them():
    on = theirs("rocm:gfx1100", packages="minimal")
    assert chosen(on, VISION, backend="ROCM_AITER_FA") == "ROCM_AITER_FA"
    assert chosen(on, VISION, backend="FLASHINFER") is None


def test_a_models_code_maps_one_name_to_another():
    layer = V4.replace(model_type="deepseek_v41")
    on = theirs("rocm:gfx1100")
    assert chosen(on, layer, backend="ROCM_FLASHMLA_SPARSE_DSV4") == "ROCM_FLASHMLA_SPARSE_DSV41"
    assert chosen(on, layer, backend="TRITON_MLA") is None
    assert chosen(on, layer, run=RunContext(pcp_size=2)) is None


def test_what_does_not_exist_there_is_no_candidate_and_no_request():
    on = theirs("rocm:gfx942")
    assert "TORCH_SDPA" not in on.select(DENSE).candidates
    refused = on.select(DENSE, AttentionConfig(backend="TORCH_SDPA"))
    assert {reason.kind for reason in refused.rejections["TORCH_SDPA"]} == {"absent"}
    assert "TORCH_SDPA" in on.select(VISION).candidates


def test_parts_are_chosen_apart():
    layer = LATENT.replace(qk_nope_head_dim=448, kv_lora_rank=512, qk_rope_head_dim=64)
    assert not theirs("rocm:gfx942").select(layer).parts
    assert platform_for("rocm:gfx942").select(layer).parts


def test_a_wish_that_nothing_reads_is_dropped():
    assert chosen(theirs("rocm:gfx942"), DENSE, flash_attn_version=4) == "ROCM_ATTN"


def test_leaving_a_difference_out_gives_attnplats_answer_back():
    order = next(d for d in differences_of("rocm") if d.subject == "order")
    assert chosen(theirs("rocm:gfx942"), DENSE) == "ROCM_ATTN"
    assert chosen(theirs("rocm:gfx942", without=order), DENSE) == "ROCM_AITER_FA"


def test_a_difference_is_for_the_devices_it_names():
    (some,) = differences_of("rocm")[:1]
    device = platform_for("rocm:gfx942").device
    assert some.applies_to(device)
    from attnplat.backends.limits import OneOf

    elsewhere = replace(some, where={"arch": OneOf("gfx90a")})
    assert not elsewhere.applies_to(device)


def test_the_indexers_format_is_the_same_under_both():
    layer = IndexerConfig(head_size=128, model_type="deepseek_v4")
    for platform in (platform_for("rocm:gfx950"), theirs("rocm:gfx950")):
        assert platform.select(layer).config.indexer_kv_dtype == "mxfp4"
