"""Bugs in merging and in codecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.pages import Pages
from attnplat.ops.context_parallel import Shard
from attnplat.testing.mutations.bug import BugList
from attnplat.testing.subject import Library

BUGS = BugList("BAEHIK")
Tensor = torch.Tensor
NEG_INF = float("-inf")
State = tuple[Tensor, Tensor]


def merging(
    weigh: Callable[[Tensor], Tensor] = torch.exp,
    log: Callable[[Tensor], Tensor] = torch.log,
    guarded: bool = True,
    divided: bool = True,
) -> Callable[..., State]:
    """A merge like the library's, with parts to get wrong."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        wide = torch.float64 if outs[0].dtype == torch.float64 else torch.float32
        high = torch.stack(tuple(lses)).amax(0)
        base = torch.where(high == NEG_INF, 0.0, high)
        total = torch.zeros_like(base)
        merged = torch.zeros(outs[0].shape, dtype=wide, device=outs[0].device)
        for part, lse in zip(outs, lses, strict=True):
            weight = weigh(lse - base)
            total = total + weight
            more = part.to(wide) * weight[..., None]
            merged = merged + (
                torch.where((lse != NEG_INF)[..., None], more, 0.0) if guarded else more
            )
        if divided:
            merged = merged / torch.where(total == 0, 1.0, total)[..., None]
        return merged.to(outs[0].dtype), base + log(total)

    return merge


@BUGS.library
def merge_in_base_2(library: Library) -> Library:
    """LSEs are taken for logarithms to base 2."""
    return replace(library, merge_states=merging(torch.exp2, torch.log2))


@BUGS.library
def merge_unguarded(library: Library) -> Library:
    """What an empty part's output holds is multiplied by 0."""
    return replace(library, merge_states=merging(guarded=False))


@BUGS.library
def merge_not_divided(library: Library) -> Library:
    """Merged outputs are not divided by the sum of weights."""
    return replace(library, merge_states=merging(divided=False))


@BUGS.library
def merge_averages(library: Library) -> Library:
    """Parts are averaged, whatever their weight."""
    return replace(library, merge_states=merging(lambda lse: torch.where(lse == NEG_INF, 0.0, 1.0)))


@BUGS.library
def merge_empty_nan(library: Library) -> Library:
    """Nothing merged with nothing is NaN."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        high = torch.stack(tuple(lses)).amax(0)
        merged, lse = library.merge_states(outs, lses)
        return merged + (high - high)[..., None].to(merged.dtype), lse + (high - high)

    return replace(library, merge_states=merge)


@BUGS.library
def merge_lse_is_maximum(library: Library) -> Library:
    """The merged LSE is the greatest part's."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        return library.merge_states(outs, lses)[0], torch.stack(tuple(lses)).amax(0)

    return replace(library, merge_states=merge)


@BUGS.library
def merge_counts_first_twice(library: Library) -> Library:
    """The first part counts twice."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        return library.merge_states([outs[0], *outs], [lses[0], *lses])

    return replace(library, merge_states=merge)


@BUGS.library
def merge_first_two_only(library: Library) -> Library:
    """Parts after the second are left out."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        return library.merge_states(outs[:2], lses[:2])

    return replace(library, merge_states=merge)


@BUGS.library
def merge_assumes_strides(library: Library) -> Library:
    """All parts are taken to have the first one's strides."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        first = outs[0].stride()
        moved = [o if o.stride() == first else o.roll(1, 0) for o in outs]
        return library.merge_states(moved, lses)

    return replace(library, merge_states=merge)


@BUGS.library
def merge_1024_elements(library: Library) -> Library:
    """Of a row, 1024 elements are merged; the rest is the first part's."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        merged, lse = library.merge_states(outs, lses)
        flat = merged.flatten(1).clone()
        flat[:, 1024:] = outs[0].flatten(1)[:, 1024:]
        return flat.view(merged.shape), lse

    return replace(library, merge_states=merge)


@BUGS.library
def merge_in_bfloat16(library: Library) -> Library:
    """Parts are merged in bfloat16."""

    def merge(outs: Any, lses: Any, *, out: Tensor | None = None) -> State:
        merged, lse = library.merge_states([o.bfloat16() for o in outs], lses)
        return merged.to(outs[0].dtype), lse

    return replace(library, merge_states=merge)


@BUGS.library
def sinks_applied_twice(library: Library) -> Library:
    """Sinks are applied twice to the merged whole."""

    def apply(out: Tensor, lse: Tensor, sinks: Tensor) -> State:
        return library.apply_sinks(*library.apply_sinks(out, lse, sinks), sinks)

    return replace(library, apply_sinks=apply)


@BUGS.library
def sinks_applied_to_output_only(library: Library) -> Library:
    """Applying sinks leaves the LSE as it is."""

    def apply(out: Tensor, lse: Tensor, sinks: Tensor) -> State:
        return library.apply_sinks(out, lse, sinks)[0], lse

    return replace(library, apply_sinks=apply)


# Codecs --------------------------------------------------------------------------------------


def recoded(
    library: Library,
    encode: Callable[..., Tensor] | None = None,
    decode: Callable[..., Tensor] | None = None,
) -> Library:
    """The library with other codecs."""
    return replace(
        library,
        encode_rows=encode or library.encode_rows,
        decode_rows=decode or library.decode_rows,
    )


@BUGS.library
def fnuz_read_as_fn(library: Library) -> Library:
    """e4m3fnuz is decoded as e4m3fn."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        if format.encoding == "fp8_e4m3fnuz":
            format = format_of("fp8_e4m3fn")
        return library.decode_rows(format, rows, **given)

    return recoded(library, decode=decode)


@BUGS.library
def fn_written_as_fnuz(library: Library) -> Library:
    """e4m3fn is encoded as e4m3fnuz."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        if format.encoding == "fp8_e4m3fn":
            format = format_of("fp8_e4m3fnuz")
        return library.encode_rows(format, x, **given)

    return recoded(library, encode=encode)


@BUGS.library
def scale_divides_on_reading(library: Library) -> Library:
    """Decoding divides by the scale."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        if given.get("scale") is not None:
            given["scale"] = 1.0 / given["scale"]
        return library.decode_rows(format, rows, **given)

    return recoded(library, decode=decode)


@BUGS.library
def scale_of_e5m2_ignored(library: Library) -> Library:
    """The scale of e5m2 is ignored, on both sides."""

    def drop(format: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "scale": None} if format.encoding == "fp8_e5m2" else given

    return recoded(
        library,
        lambda format, x, **given: library.encode_rows(format, x, **drop(format, given)),
        lambda format, x, **given: library.decode_rows(format, x, **drop(format, given)),
    )


@BUGS.library
def scale_of_first_head(library: Library) -> Library:
    """All heads have the first one's scale."""

    def first(given: dict[str, Any]) -> dict[str, Any]:
        scale = given.get("scale")
        return given if scale is None else {**given, "scale": scale[:1]}

    return recoded(
        library,
        lambda format, x, **given: library.encode_rows(format, x, **first(given)),
        lambda format, x, **given: library.decode_rows(format, x, **first(given)),
    )


@BUGS.library
def zeros_are_nan(library: Library) -> Library:
    """A row of zeros decodes to 0/0."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        x = library.decode_rows(format, rows, **given)
        return torch.where((x == 0).all(-1, keepdim=True), torch.nan, x)

    return recoded(library, decode=decode)


@BUGS.library
def overflow_is_nan(library: Library) -> Library:
    """Values beyond the range of e4m3fn become NaN."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        rows = library.encode_rows(format, x, **given)
        if format.encoding == "fp8_e4m3fn":
            return torch.where(x.abs() > 448.0, 0x7F, rows).to(torch.uint8)
        return rows

    return recoded(library, encode=encode)


@BUGS.library
def nan_spreads(library: Library) -> Library:
    """A NaN in one token spoils all tokens that are encoded with it."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        return library.encode_rows(
            format, torch.full_like(x, torch.nan) if x.isnan().any() else x, **given
        )

    return recoded(library, encode=encode)


@BUGS.library
def int8_rounds_away(library: Library) -> Library:
    """int8 rounds halves away from zero."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        if format.encoding == "int8_th":
            x = x + x.sign() * x.abs().amax(-1, keepdim=True) * 1e-5
        return library.encode_rows(format, x, **given)

    return recoded(library, encode=encode)


@BUGS.library
def int8_reaches_minus_128(library: Library) -> Library:
    """int8 stores the lowest element of a row as -128."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        rows = library.encode_rows(format, x, **given)
        if format.encoding == "int8_th":
            rows = torch.where(rows == 0x81, 0x80, rows).to(torch.uint8)
        return rows

    return recoded(library, encode=encode)


@BUGS.library
def inline_scale_unaligned(library: Library) -> Library:
    """Scales inside rows come right behind the codes."""

    def encode(format: Any, x: Tensor, **given: Any) -> Tensor:
        rows = library.encode_rows(format, x, **given)
        size = x.shape[-1]
        if format.encoding in ("int8_th", "fp8_th"):
            return torch.cat([rows[..., :size], rows[..., -4:]], -1)
        return rows

    return recoded(library, encode=encode)


class _ScalesElsewhere(Pages):
    """Pages whose scales do not move with their block."""

    def read(self, **given: Any) -> Any:
        k, v = super().read(**given)
        return torch.where(
            torch.arange(len(k), device=k.device)[:, None, None, None] == 2, 0 * k, k
        ), v


@BUGS.library
def moved_block_loses_scales(library: Library) -> Library:
    """A block that is copied elsewhere has no scales there."""
    return replace(library, pages=_ScalesElsewhere)


class _ScalesSwapped(Pages):
    """Pages that read keys with the values' scale."""

    def read(self, *, k_scale: Any = None, v_scale: Any = None, **given: Any) -> Any:
        return super().read(k_scale=v_scale, v_scale=k_scale, **given)


@BUGS.library
def scales_of_keys_and_values_swapped(library: Library) -> Library:
    """Keys are read with the values' scale and values with the keys'."""
    return replace(library, pages=_ScalesSwapped)


@BUGS.library
def nibbles_swapped(library: Library) -> Library:
    """The even one of two 4-bit codes is read from the high half."""

    def decode(format: Any, rows: Tensor, *, size: int, **given: Any) -> Tensor:
        x: Tensor = library.decode_rows(format, rows, size=size, **given)
        if format.encoding == "nvfp4":
            x = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x

    return recoded(library, decode=decode)


@BUGS.library
def global_scale_ignored(library: Library) -> Library:
    """The global scale of nvfp4 is ignored on reading."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        if format.encoding == "nvfp4":
            given["scale"] = None
        return library.decode_rows(format, rows, **given)

    return recoded(library, decode=decode)


@BUGS.library
def subnormals_flushed(library: Library) -> Library:
    """Subnormal codes decode to 0."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        x = library.decode_rows(format, rows, **given)
        least = {"fp8_e4m3fn": 2.0**-6, "fp8_e5m2": 2.0**-14}.get(str(format.encoding), 0.0)
        scale = given.get("scale")
        return torch.where(x.abs() < least * (1.0 if scale is None else float(scale[0])), 0.0, x)

    return recoded(library, decode=decode)


@BUGS.library
def latent_scale_of_first_tile(library: Library) -> Library:
    """All tiles of a latent row have the first one's scale."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        if format.encoding == "mla_fp8_656":
            rows = rows.clone()
            rows[..., 516:528] = rows[..., 512:516].repeat(*[1] * (rows.dim() - 1), 3)
        return library.decode_rows(format, rows, **given)

    return recoded(library, decode=decode)


@BUGS.library
def latent_scales_not_interleaved(library: Library) -> Library:
    """The scales of a 352-byte row are read in the order of tiles."""

    def decode(format: Any, rows: Tensor, **given: Any) -> Tensor:
        if format.encoding == "mla_nvfp4_352":
            rows = rows.clone()
            rows[..., 320:] = rows[..., 320:].unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2)
        return library.decode_rows(format, rows, **given)

    return recoded(library, decode=decode)


# Splitting and choosing ----------------------------------------------------------------------


class _LengthsRounded(Shard):
    """Shards that round their share of a begun turn down."""

    def local_lens(self, seq_lens: Tensor) -> Tensor:
        turn = self.size * self.interleave
        return torch.div(seq_lens, turn, rounding_mode="floor") * self.interleave


@BUGS.library
def local_lengths_rounded_down(library: Library) -> Library:
    """A rank's share of a begun turn is left out."""
    return replace(library, shard=_LengthsRounded)


@BUGS.library
def shards_averaged(library: Library) -> Library:
    """The ranks' parts are averaged."""

    def combine(outs: Any, lses: Any, **given: Any) -> State:
        return torch.stack(list(outs)).mean(0), library.combine_shards(outs, lses)[1]

    return replace(library, combine_shards=combine)


@BUGS.library
def empty_shard_counts(library: Library) -> Library:
    """A rank without keys counts with a weight of 1."""

    def combine(outs: Any, lses: Any, **given: Any) -> State:
        return library.combine_shards(outs, [torch.where(x == NEG_INF, 0.0, x) for x in lses])

    return replace(library, combine_shards=combine)


@BUGS.library
def chosen_slots_of_first_request(library: Library) -> Library:
    """Chosen keys of all requests are looked for in the first one's blocks."""

    def slots(topk: Tensor, pages: Any, batch: Any) -> Tensor:
        table = pages.block_table[:1].expand_as(pages.block_table)
        return library.physical_topk(topk, replace(pages, block_table=table), batch)

    return replace(library, physical_topk=slots)


@BUGS.library
def chosen_of_first_ranks(library: Library) -> Library:
    """The last rank's candidates are left out."""

    def merge(scores: Any, positions: Any, topk: int) -> Tensor:
        return library.merge_topk(scores[:-1], positions[:-1], topk)

    return replace(library, merge_topk=merge)


@BUGS.library
def latent_values_not_projected_back(library: Library) -> Library:
    """The value projection of a latent layer is another head's."""

    def attend(layer: Any, plan: Any, cache: Any, *tensors: Tensor, **given: Any) -> Tensor:
        *rest, w_uv = tensors
        return library.mla_attend(layer, plan, cache, *rest, w_uv.roll(1, 0), **given)

    return replace(library, mla_attend=attend)
