"""Caches are named layouts on memory of the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplat.backends.kv_cache import KVCache, KVCacheLayout, KVCacheSpec
from attnplat.errors import ConfigError, PlanMismatchError, UnknownNameError


def spec(**changes: Any) -> KVCacheSpec:
    wants: dict[str, Any] = {
        "encoding": "bfloat16",
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 8,
        "v_head_size": 4,
    }
    return KVCacheSpec(**{**wants, **changes})


@pytest.mark.parametrize(
    ("name", "layout"), [("NHD", "LBNHC"), ("hnd", "LBHNC"), ("blhnc", "BLHNC")]
)
def test_layouts_go_by_old_and_new_names(name: str, layout: str) -> None:
    assert KVCacheLayout.parse(name) == layout


def test_an_unknown_layout_names_the_known() -> None:
    with pytest.raises(UnknownNameError, match=r"known: .*LBHNC"):
        KVCacheLayout.parse("HDN")


def test_a_token_takes_what_its_heads_take() -> None:
    assert spec().bytes_per_token == 2 * (8 + 4) * 2
    assert spec().bytes_per_block == 16 * 48
    assert spec(values_in_keys=True).bytes_per_token == 2 * 8 * 2


@pytest.mark.parametrize(
    ("layout", "k_shape"),
    [
        ("LBHNC", (5, 2, 16, 8)),
        ("LBNHC", (5, 16, 2, 8)),
        ("LHBNC", (2, 5, 16, 8)),
        ("BHLNC", (5, 2, 16, 8)),
    ],
)
def test_a_layer_s_view_has_its_layout_s_axes(layout: str, k_shape: tuple[int, ...]) -> None:
    caches = KVCache.allocate_layers(spec(layout=layout), 3, 5)
    for cache in caches:
        assert cache.k.shape == k_shape == spec(layout=layout).k_shape(5)
        assert cache.num_blocks == 5
        assert cache.pages()[0].shape == (5, 2, 16, 8)
        assert cache.pages()[1].shape == (5, 2, 16, 4)
    assert len({cache.k.untyped_storage().data_ptr() for cache in caches}) == 1


def test_blocks_outermost_keep_all_layers_of_a_block_together() -> None:
    first, second = KVCache.allocate_layers(spec(layout="BLHNC"), 2, 5)
    block = first.k.stride(0)
    assert second.k.storage_offset() - first.k.storage_offset() < block == 2 * 2 * 16 * 8


def test_views_of_a_caller_s_pool_do() -> None:
    pool = torch.zeros(5, 3, 2, 16, 12, dtype=torch.bfloat16)
    cache = KVCache(k=pool[:, 1, :, :, :8], v=pool[:, 1, :, :, 8:], spec=spec())
    cache.pages()[0].fill_(1)
    assert pool.sum() == 5 * 2 * 16 * 8


def test_values_inside_keys_are_a_view() -> None:
    cache = KVCache.allocate(spec(num_kv_heads=1, values_in_keys=True), 5)
    assert cache.v is not None and cache.v.data_ptr() == cache.k.data_ptr()
    assert cache.v.shape[-1] == 4


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"block_size": 0}, ConfigError, "block_size is 0"),
        ({"encoding": "fp9"}, UnknownNameError, "unknown encoding 'fp9'"),
        ({"values_in_keys": True, "v_head_size": 9}, ConfigError, r"at most head_size \(8\)"),
    ],
)
def test_specs_that_cannot_be_are_refused(
    changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        spec(**changes)


@pytest.mark.parametrize(
    ("k", "says"),
    [
        (torch.zeros(5, 16, 2, 8, dtype=torch.bfloat16), r"cache.k has shape \[5, 16, 2, 8\]"),
        (torch.zeros(5, 2, 16, 8), "cache.k has dtype torch.float32; expected torch.bfloat16"),
        (torch.zeros(5, 2, 16, 16, dtype=torch.bfloat16)[..., ::2], "stride 2"),
        (None, "cache.k is a NoneType"),
    ],
)
def test_views_that_do_not_fit_their_spec_are_named(k: Any, says: str) -> None:
    v = torch.zeros(5, 2, 16, 4, dtype=torch.bfloat16)
    with pytest.raises(PlanMismatchError, match=says):
        KVCache(k=k, v=v, spec=spec())
