"""A strict double of `intel_extension_for_pytorch.llm.modules.PagedAttention`, release 2.8.0.

Its functions have the signatures of that release. They compute what it computes, in float32, and
refuse what it refuses; what it takes and then gets wrong, or reads beyond its own memory for, they
refuse too, so that an adapter that passes here never relies on it. Where the facts are from: its
Python sources (signatures, dtypes), its open CPU kernels (partitions of 128 tokens, scratch for 16
heads a group, no check of requests without keys), and the release itself, run beside torch 2.8
(strides that it does not look at, scales below 0).
"""

from __future__ import annotations

import torch

PARTITION, MOST_GROUPED_HEADS = 128, 16
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Refused(AssertionError):
    """The extension would raise, or be wrong without raising."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Refused(what)


class PagedAttention:
    """The class methods that are called; `calls` counts them by name."""

    calls: dict[str, int]

    def __init__(self) -> None:
        self.calls = {"single_query_cached_kv_attention": 0, "flash_attn_varlen_func": 0}

    def single_query_cached_kv_attention(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        head_mapping: torch.Tensor,
        scale: float,
        block_tables: torch.Tensor,
        context_lens: torch.Tensor,
        block_size: int,
        max_context_len: int,
        alibi_slopes: torch.Tensor | None,
        window_size: int = -1,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """One query row of each request against its `context_lens` cached keys."""
        self.calls["single_query_cached_kv_attention"] += 1
        self._check_common(output, query, key_cache, value_cache, block_tables, scale, softcap)
        require(alibi_slopes is None, "slopes are not for an adapter that takes none")
        require(window_size == -1, "a window is not for an adapter that takes none")
        require(k_scale == v_scale == 1.0, "scales are for fp8 caches")
        require(block_size == key_cache.shape[2], "block_size is that of the cache")
        require(PARTITION % block_size == 0, "a block lies in one partition")
        heads, kv_heads = query.shape[1], key_cache.shape[1]
        check_integers("head_mapping", head_mapping, (heads,), torch.int32)
        mapping = torch.arange(kv_heads).repeat_interleave(heads // kv_heads)
        require(torch.equal(head_mapping.long(), mapping), "query heads are grouped in order")
        check_integers("context_lens", context_lens, (query.shape[0],), torch.int32)
        lens = context_lens.tolist()
        require(min(lens) >= 1, "a request without keys reads what nobody has written")
        require(type(max_context_len) is int and max_context_len >= max(lens), "max_context_len")
        for row, count in enumerate(lens):
            k, v = gather(key_cache, value_cache, block_tables[row], count)
            output[row] = attend(query[row : row + 1], k, v, scale, softcap)[0]

    def flash_attn_varlen_func(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_kv: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        scale: float,
        is_cusal: bool,
        block_tables: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        window_size_left: int = -1,
        window_size_right: int = -1,
        kv_cache_dtype: str = "auto",
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        softcap: float = -1.0,
    ) -> None:
        """The last query rows of each request against its cached keys, causal bottom-right."""
        self.calls["flash_attn_varlen_func"] += 1
        self._check_common(output, query, key_cache, value_cache, block_tables, scale, softcap)
        require(is_cusal is True, "is_cusal False is not supported yet")
        require(alibi_slopes is None, "alibi_slopes is not supported for flash_attn_varlen yet")
        require(window_size_left == window_size_right == -1, "a hidden tile makes its rows NaN")
        require(kv_cache_dtype == "auto", "an fp8 cache is refused in prefill")
        require(k_scale == v_scale == 1.0, "scales are for fp8 caches")
        requests = block_tables.shape[0]
        for name, sums in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
            check_integers(name, sums, (requests + 1,), torch.int32)
            require(int(sums[0]) == 0 and bool((sums.diff() > 0).all()), f"{name} are sums")
        queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_kv.diff().tolist()
        require(int(cu_seqlens_q[-1]) == query.shape[0], "cu_seqlens_q end with the queries")
        require(type(max_seqlen_q) is int and max_seqlen_q >= max(queries), "max_seqlen_q")
        require(type(max_seqlen_kv) is int and max_seqlen_kv >= max(keys), "max_seqlen_kv")
        for r in range(requests):
            require(keys[r] >= queries[r], "queries are the last of their keys")
            rows = slice(int(cu_seqlens_q[r]), int(cu_seqlens_q[r + 1]))
            k, v = gather(key_cache, value_cache, block_tables[r], keys[r])
            output[rows] = attend(query[rows], k, v, scale, softcap)

    def _check_common(
        self,
        output: torch.Tensor,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        softcap: float,
    ) -> None:
        for name, tensor in (("query", query), ("output", output)):
            require(tensor.dim() == 3 and tensor.device.type == "cpu", f"{name} is 3-D, on the CPU")
            require(tensor.dtype in FLOATS and tensor.is_contiguous(), f"{name}: dtype or strides")
        require(output.shape == query.shape and output.dtype == query.dtype, "output is as query")
        require(key_cache.shape == value_cache.shape, "keys and values are cached alike")
        for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
            require(cache.dim() == 4, f"{name} is [num_blocks, num_heads, block_size, head_size]")
            require(cache.dtype == query.dtype, f"{name} has the dtype of query")
            in_order = (cache.shape[3], 1)
            require(cache.stride()[2:] == in_order, f"{name}: other strides are not looked at")
            require(cache.shape[3] == query.shape[2], f"{name} has the head size of query")
        groups, rest = divmod(query.shape[1], key_cache.shape[1])
        require(rest == 0 and groups <= MOST_GROUPED_HEADS, "scratch is for 16 heads a group")
        require(type(scale) is float and type(softcap) is float, "scale and softcap are floats")
        require(scale > 0, "a scale below 0 gives infinities")
        require(softcap == -1.0 or softcap > 0, "softcap is positive, or -1 for none")
        require(block_tables.dim() == 2, "block_tables is [requests, most blocks]")
        check_integers("block_tables", block_tables, tuple(block_tables.shape), torch.int32)
        inside = (block_tables >= 0) & (block_tables < key_cache.shape[0])
        require(bool(inside.all()), "block_tables name blocks of the cache")


def check_integers(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    require(tuple(tensor.shape) == shape, f"{name} has shape {list(shape)}")
    require(tensor.dtype == dtype and tensor.is_contiguous(), f"{name}: dtype or strides")


def gather(
    key_cache: torch.Tensor, value_cache: torch.Tensor, table: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [heads, count, size] of keys and values."""
    size = key_cache.shape[2]
    require(table.shape[0] * size >= count, "block_tables reach to the last key")
    position = torch.arange(count)
    block = table.long()[position // size]
    planes = (cache[block, :, position % size].float() for cache in (key_cache, value_cache))
    k, v = (plane.transpose(0, 1) for plane in planes)
    return k, v


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Causal attention of the last rows: [rows, heads, size] of the queries' dtype."""
    rows, heads = q.shape[:2]
    groups = heads // k.shape[0]
    k, v = (plane.repeat_interleave(groups, 0).double() for plane in (k, v))
    scores = torch.einsum("thd,hkd->htk", q.double(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen = torch.ones(rows, k.shape[1], dtype=torch.bool).tril(k.shape[1] - rows)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)
    return torch.einsum("htk,hkd->thd", weights, v).to(q.dtype)
