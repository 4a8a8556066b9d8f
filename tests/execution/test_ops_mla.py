"""Latent attention in both forms is the attention that its definition says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from attnplat.backends.batch import Batch, PageTable
from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.backends.kv_cache import KVCache
from attnplat.config.layer import MlaConfig, SparseMlaConfig
from attnplat.config.names import Feature
from attnplat.errors import ConfigError, TensorError, UnsupportedCallError
from attnplat.ops.mla import MlaLayer, mla_attend
from tests.execution.cases import IMPLS

HEADS, NOPE, ROPE, LORA, VALUE = 3, 8, 4, 12, 6
every_impl = pytest.mark.parametrize("name", IMPLS)


def config(kind: type[MlaConfig] = MlaConfig, **changes: Any) -> MlaConfig:
    wants: dict[str, Any] = {
        "head_size": LORA + ROPE,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "kv_lora_rank": LORA,
        "v_head_size": VALUE,
        "num_heads": HEADS,
        "dtype": "float32",
    }
    return kind(**{**wants, **changes})


@dataclass
class World:
    """A step: all latent rows of every request, the new ones last, and the layer's weights."""

    batch: Batch
    q_nope: torch.Tensor
    q_rope: torch.Tensor
    rows: list[torch.Tensor]
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    cache: KVCache
    pages: PageTable

    def run(self, layer: MlaLayer, **given: Any) -> torch.Tensor:
        new = torch.cat(
            [rows[len(rows) - n :] for rows, n in zip(self.rows, self.lens, strict=True)]
        )
        return mla_attend(
            layer,
            layer.plan(self.batch, self.pages),
            self.cache,
            self.q_nope,
            self.q_rope,
            new[:, :LORA],
            new[:, LORA:],
            self.w_uk,
            self.w_uv,
            **given,
        )

    @property
    def lens(self) -> list[int]:
        start = self.batch.query_start_loc
        return (start[1:] - start[:-1]).tolist()

    def expected(
        self, scale: float, sinks: torch.Tensor | None = None, topk: torch.Tensor | None = None
    ) -> torch.Tensor:
        """By the definition, over whole sequences, in float64."""
        out, row = [], 0
        for rows, count in zip(self.rows, self.lens, strict=True):
            latent, rope = rows[:, :LORA].double(), rows[:, LORA:].double()
            keys = torch.einsum("jl,hnl->hjn", latent, self.w_uk.double())
            values = torch.einsum("jl,hlv->hjv", latent, self.w_uv.double())
            q_nope = self.q_nope[row : row + count].double()
            scores = torch.einsum("ihn,hjn->hij", q_nope, keys)
            scores += torch.einsum("ihr,jr->hij", self.q_rope[row : row + count].double(), rope)
            position = len(rows) - count + torch.arange(count)[:, None]
            seen = torch.arange(len(rows)) <= position
            if topk is not None:
                named = topk[row : row + count, :, None] == torch.arange(len(rows))
                seen = seen & named.any(1)
            scores = (scores * scale).masked_fill(~seen, float("-inf"))
            if sinks is not None:
                column = sinks.double()[:, None, None].expand(HEADS, count, 1)
                scores = torch.cat([scores, column], -1)
            weights = scores.softmax(-1)[..., : len(rows)].nan_to_num(0.0)
            out.append(torch.einsum("hij,hjv->ihv", weights, values))
            row += count
        return torch.cat(out)


def world(
    made: MlaConfig, query_lens: list[int], seq_lens: list[int], encoding: str | None = None
) -> World:
    gen = torch.Generator().manual_seed(4)
    batch = Batch.from_lengths(query_lens, seq_lens)
    owner = IMPLS["REFERENCE"].create(made, "cpu", encoding=encoding)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(owner.dtype)

    rows = [normal(n, LORA + ROPE) for n in seq_lens]
    if encoding is not None:
        format = format_of(encoding)
        rows = [
            decode_rows(format, encode_rows(format, r[:, None]), size=LORA + ROPE)[:, 0]
            for r in rows
        ]
    ids = list(range(sum(-(-n // 4) for n in seq_lens) + 2))
    blocks = [[ids.pop() for _ in range(-(-n // 4))] for n in seq_lens]
    cache = KVCache.allocate(owner.kv_cache_spec(4), len(ids) + sum(map(len, blocks)))
    cache.k.fill_(0xFF if cache.k.dtype == torch.uint8 else float("nan"))
    everything = PageTable.from_blocks(blocks, batch, 4, write="all")
    context = torch.cat(rows)[:, None].clone()
    owner.write_kv(cache, context, None, everything)
    return World(
        batch=batch,
        q_nope=normal(batch.num_tokens, HEADS, NOPE),
        q_rope=normal(batch.num_tokens, HEADS, ROPE),
        rows=rows,
        w_uk=normal(HEADS, NOPE, LORA) / 4,
        w_uv=normal(HEADS, LORA, VALUE) / 4,
        cache=cache,
        pages=PageTable.from_blocks(blocks, batch, 4),
    )


def layer(name: str, made: MlaConfig, **options: Any) -> MlaLayer:
    kind = IMPLS[name]
    return MlaLayer.create(kind, made, "cpu", prefill_kind=kind, **options)


def close(out: torch.Tensor, want: torch.Tensor, tolerance: float = 1e-5) -> None:
    error = (out.double() - want).norm() / want.norm()
    assert error < tolerance, f"off by {float(error):.2e}"


# Short and long queries in any order, with and without context, and one without a query.
LENS = [[1, 7, 0, 3, 1, 9], [30, 7, 5, 20, 1, 41]]


@every_impl
@pytest.mark.parametrize("decode_query_len", [0, 1, 3, 100])
@pytest.mark.parametrize("context_chunk", [1, 5, 16, 8192])
def test_both_forms_and_any_chunks_are_the_definition(
    name: str, decode_query_len: int, context_chunk: int
) -> None:
    made = config()
    found = world(made, *LENS)
    want = found.expected((NOPE + ROPE) ** -0.5)
    options = {"decode_query_len": decode_query_len, "context_chunk": context_chunk}
    close(found.run(layer(name, made, **options)), want)


@every_impl
def test_the_scale_of_the_config_is_the_scale_of_both_forms(name: str) -> None:
    made = config(scale=0.7)
    found = world(made, *LENS)
    close(found.run(layer(name, made)), found.expected(0.7))


@every_impl
@pytest.mark.parametrize("decode_query_len", [0, 1, 100])
def test_sinks_count_once(name: str, decode_query_len: int) -> None:
    made = config(sinks=True)
    found = world(made, *LENS)
    sinks = torch.tensor([0.5, 3.0, float("-inf")])
    whole = layer(name, made, decode_query_len=decode_query_len, context_chunk=5)
    close(found.run(whole, sinks=sinks), found.expected((NOPE + ROPE) ** -0.5, sinks))


@every_impl
@pytest.mark.parametrize("encoding", ["fp8_e4m3fn", "int8_th"])
@pytest.mark.parametrize("decode_query_len", [0, 100])
def test_context_is_decoded_in_both_forms(name: str, encoding: str, decode_query_len: int) -> None:
    made = config()
    found = world(made, *LENS, encoding)
    whole = layer(name, made, encoding=encoding, decode_query_len=decode_query_len)
    # Rows that a code holds exactly are stored as they are, so that new tokens agree, too.
    close(found.run(whole), found.expected((NOPE + ROPE) ** -0.5), 2e-5)


def test_half_precision_sums_its_chunks_in_float32() -> None:
    made = config(dtype="bfloat16")
    found = world(made, [2], [400])
    whole = layer("REFERENCE", made, decode_query_len=0, context_chunk=3)
    close(found.run(whole), found.expected((NOPE + ROPE) ** -0.5), 8e-3)


@every_impl
def test_sparse_layers_run_absorbed_over_the_chosen_keys(name: str) -> None:
    made = config(SparseMlaConfig, index_topk=4)
    found = world(made, *LENS)
    gen = torch.Generator().manual_seed(6)
    topk = torch.randint(-2, 20, (21, 4), generator=gen, dtype=torch.int32)
    whole = layer(name, made)
    assert whole.expanded is None
    want = found.expected((NOPE + ROPE) ** -0.5, topk=topk)
    close(found.run(whole, topk_indices=topk), want)


def test_padding_rows_are_neither_read_nor_stored() -> None:
    made = config()
    found = world(made, [1, 4], [9, 12])
    whole = layer("REFERENCE", made)
    want = found.run(whole)
    nan = torch.full((2, HEADS, NOPE), float("nan"))
    rows = torch.cat([r[len(r) - n :] for r, n in zip(found.rows, (1, 4), strict=True)])
    rows = torch.cat([rows, torch.full((2, LORA + ROPE), float("nan"))])
    pages = found.pages.padded(3, 7)
    assert pages.slot_mapping is not None
    pages.slot_mapping[5:] = 0  # a real slot, which padding must not reach
    before = found.cache.k.clone()
    out = mla_attend(
        whole,
        whole.plan(found.batch.padded(3, 7), pages),
        found.cache,
        torch.cat([found.q_nope, nan]),
        torch.cat([found.q_rope, nan[..., :ROPE]]),
        rows[:, :LORA],
        rows[:, LORA:],
        found.w_uk,
        found.w_uv,
    )
    assert torch.equal(out[:5], want) and not out[5:].any()
    assert torch.equal(found.cache.k.nan_to_num(), before.nan_to_num())


def test_plans_need_slots_and_limits_that_can_be() -> None:
    made = config()
    found = world(made, [1], [9])
    whole = layer("REFERENCE", made)
    pages = PageTable(block_table=found.pages.block_table, block_size=4)
    with pytest.raises(UnsupportedCallError, match="slot_mapping is None"):
        whole.plan(found.batch, pages)
    with pytest.raises(ConfigError, match="context_chunk 0"):
        layer("REFERENCE", made, context_chunk=0)


@every_impl
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 3.0])])
@pytest.mark.parametrize("decode_query_len", [0, 1, 9])
def test_the_log_sum_exp_is_that_of_the_whole_in_either_form(
    name: str, sinks: torch.Tensor | None, decode_query_len: int
) -> None:
    made = config(sinks=sinks is not None, also_needs=frozenset({Feature.LSE}))
    found = world(made, [1, 5, 0, 2], [9, 30, 7, 2])
    whole = layer(name, made, decode_query_len=decode_query_len, context_chunk=8)
    lse = torch.full((8, HEADS), 7.0)
    close(found.run(whole, sinks=sinks, lse=lse), found.expected((NOPE + ROPE) ** -0.5, sinks))
    want, row = [], 0
    for rows, count in zip(found.rows, found.lens, strict=True):
        keys = torch.einsum("jl,hnl->hjn", rows[:, :LORA].double(), found.w_uk.double())
        own = slice(row, row + count)
        scores = torch.einsum("ihn,hjn->ihj", found.q_nope[own].double(), keys)
        scores += torch.einsum("ihr,jr->ihj", found.q_rope[own].double(), rows[:, LORA:].double())
        seen = torch.arange(len(rows)) <= len(rows) - count + torch.arange(count)[:, None]
        scores = (scores * (NOPE + ROPE) ** -0.5).masked_fill(~seen[:, None], float("-inf"))
        total = scores.logsumexp(-1)
        want.append(total if sinks is None else torch.logaddexp(total, sinks.double()))
        row += count
    torch.testing.assert_close(lse.double(), torch.cat(want), atol=2e-5, rtol=1e-6)


WRONG = {
    "another dtype": lambda x: x.double(),
    "another device": lambda x: x.to("meta"),
    "a dimension more": lambda x: x[None],
    "a row or head less": lambda x: x[:-1],
    "a list": lambda x: [1.0],
}


@pytest.mark.parametrize("decode_query_len", [0, 9])
@pytest.mark.parametrize(
    "name", ["q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv", "sinks", "topk_indices"]
)
def test_a_wrong_tensor_is_refused_by_name_before_anything_is_written(
    name: str, decode_query_len: int
) -> None:
    sparse = name == "topk_indices"
    made = config(SparseMlaConfig, index_topk=2) if sparse else config(sinks=True)
    found = world(made, [1, 4], [9, 12])
    whole = layer("REFERENCE", made, decode_query_len=decode_query_len)
    rows = torch.cat([r[len(r) - n :] for r, n in zip(found.rows, (1, 4), strict=True)])
    given: dict[str, Any] = {
        **{n: getattr(found, n) for n in ("q_nope", "q_rope", "w_uk", "w_uv")},
        "latent": rows[:, :LORA],
        "k_rope": rows[:, LORA:],
        **({"topk_indices": torch.zeros(5, 2, dtype=torch.int32)} if sparse else {}),
        **({} if sparse else {"sinks": torch.zeros(HEADS)}),
    }
    plan, before = whole.plan(found.batch, found.pages), found.cache.k.clone()
    mla_attend(whole, plan, found.cache, **given)
    found.cache.k.copy_(before)
    for what, change in WRONG.items():
        if (name, what) == ("sinks", "another dtype"):
            continue  # sinks may be of any floating dtype
        with pytest.raises(TensorError) as caught:
            mla_attend(whole, plan, found.cache, **{**given, name: change(given[name])})
        assert caught.value.argument == name, what
    with pytest.raises(UnsupportedCallError, match="if and only if the layer's config declares"):
        mla_attend(whole, plan, found.cache, **{**given, "sinks": None, "topk_indices": None})
    assert torch.equal(found.cache.k.nan_to_num(), before.nan_to_num())


def test_a_log_sum_exp_is_declared_and_of_the_right_shape_before_anything_is_written() -> None:
    found = world(config(), [1, 4], [9, 12])
    whole = layer("REFERENCE", config())
    before = found.cache.k.clone()
    with pytest.raises(UnsupportedCallError, match=r"Feature\.LSE"):
        found.run(whole, lse=torch.zeros(5, HEADS))
    declared = layer("REFERENCE", config(also_needs=frozenset({Feature.LSE})))
    for wrong in (torch.zeros(4, HEADS), torch.zeros(5, HEADS, dtype=torch.float64)):
        with pytest.raises(TensorError, match="lse has"):
            found.run(declared, lse=wrong)
    assert torch.equal(found.cache.k.nan_to_num(), before.nan_to_num())
