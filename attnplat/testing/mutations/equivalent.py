"""Mutants that are no bugs, with the reason; and functions that are not mutated at all."""

# ruff: noqa: E501 - the names are expressions, which keep their length

from __future__ import annotations

_PORTABLE = "attnplat.backends.portable"

COSTS: dict[str, str] = {
    f"{_PORTABLE}.groups.Grouping._members": "which requests share a call",
    f"{_PORTABLE}.groups.Grouping._joins": "whether a request is worth padding into a call",
    f"{_PORTABLE}.groups.Grouping._masked": "which masks a plan keeps for later",
    f"{_PORTABLE}.waves.waves_of": "which pages are copied together",
    f"{_PORTABLE}.waves._head_runs": "how many heads are copied together",
    f"{_PORTABLE}.dense.cpu_flash_gives_lse": "which of two functions that say the same runs",
}
"""Functions that decide how much work is done at a time, not what comes out of it."""

_BY_REASON: dict[str, tuple[str, ...]] = {
    "dead: the result is not looked at where it differs": (
        "merge.apply_sinks: torch.where(lse == _NEG_INF, 0.0, torch.exp(lse - joined)) -> torch.exp(lse - joined)",
        "dense.online_attention: torch.where(high == _NEG_INF, 0.0, high) -> high",
        "masks._tree: (byte >> inside % 8 & 1).bool() & (offset <= last) -> (byte >> inside % 8 & 1).bool()",
        "pages.PageShape.areas: apart and value -> apart",
    ),
    "the other operand is all ones here": (
        "masks._window: seen & (p - j <= min(left, OPEN)) -> p - j <= min(left, OPEN)",
    ),
    "a table with room to spare holds the same": (
        "masks._named: 1 -> 2",
        "masks._named: named < longest -> named <= longest",
        "masks._named: keys.clamp(max=longest) -> keys",
        "element_codec.encode_elements: math.frexp(element.largest)[1] - 1 -> math.frexp(element.largest)[1] + 1",
        "element_codec.encode_elements: math.frexp(element.largest)[1] - 1 -> math.frexp(element.largest)[1]",
        "element_codec.encode_elements: 1 -> 2 (6)",
        "element_codec._values: 1 -> 2",
    ),
    "the same on a CPU, where mutants are run": (
        "dense.fused_attention: q.device.type == 'cpu' and cpu_flash_gives_lse(q.dtype) -> cpu_flash_gives_lse(q.dtype)",
        "dense.fused_attention: q.device.type == 'cpu' and cpu_flash_gives_lse(q.dtype) -> q.device.type == 'cpu'",
        "dense.fused_attention: scaled_dot_product_attention(heads, k, v, attn_mask=added, is_causal=square, scale=scale) -> scaled_dot_product_attention(k, heads, v, attn_mask=added, is_causal=square, scale=scale)",
        "gather.highest_block: b.device.type == 'cpu' and b.numel() -> b.numel()",
        "masks.HostMasks.of: any((t is not None and t.device.type != 'cpu' for t in given)) -> all((t is not None and t.device.type != 'cpu' for t in given))",
        "gather.look_up: device.type == 'cpu' and bool((blocks < 0).any()) -> bool((blocks < 0).any())",
        "dense.TileMask.of: visible.device.type == 'cpu' and bool(nonempty.all()) -> bool(nonempty.all())",
    ),
    "a span is a bound: wider, it reads keys that the mask then hides": (
        "masks._base_span: 1 -> 2",
        "masks.HostMasks.key_spans: begin <= last and first < end -> first < end",
        "masks.HostMasks.key_spans: first < end -> first <= end",
        "masks.HostMasks.key_spans: high > low -> high >= low",
        "masks.HostMasks.key_spans: 1 -> 2",
        "masks._base_span: right >= 0 -> right > 0",
        "masks._base_span: 0 -> 1",
        "masks._base_span: min(high, last + right + 1) -> max(high, last + right + 1)",
        "masks._base_span: 1 -> 2 (2)",
        "masks._base_span: min(high, (last // rules.chunk_size + 1) * rules.chunk_size) -> max(high, (last // rules.chunk_size + 1) * rules.chunk_size)",
        "masks._base_span: last // rules.chunk_size -> last",
        "masks._base_span: 1 -> 2 (3)",
        "groups.Grouping.spans: context + first -> context - first",
        "groups.Grouping.spans: context + first -> context",
        "groups.Grouping.spans: context + last - 1 -> context + last + 1",
        "groups.Grouping.spans: context + last - 1 -> context + last",
        "groups.Grouping._tile_keys: len(spans) > 1 -> len(spans) >= 1",
        "groups.Grouping._tile_keys: spans[0][1] - origin -> spans[0][1] + origin",
        "groups.Grouping._tile_keys: spans[0][1] - origin -> spans[0][1]",
        "groups.Grouping._group: stop - start -> stop + start",
        "groups.Grouping._group: stop - start -> stop",
        "groups.Grouping._group: stop - start -> stop + start (2)",
        "groups.Grouping._group: stop - start -> stop (2)",
    ),
    "a row always sees its own key by its window": ("masks.HostMasks.key_spans: last + 1 -> last",),
    "a span of no keys, or two spans that touch, are what one span is": (
        "masks.HostMasks.key_spans: head <= 0 -> head < 0",
        "masks.HostMasks.key_spans: high > low -> high >= low (2)",
        "masks.HostMasks.key_spans: high <= low -> high < low",
        "masks.HostMasks.key_spans: low <= head -> low < head",
        "groups.Reach.of: second <= head -> second < head",
    ),
    "where a request has two spans, each of its tiles has": (
        "groups.Grouping._tile_keys: reach.head or len(spans) > 1 -> len(spans) > 1",
    ),
    "another way to the same result: heads as rows or not, one tile or several, a mask that hides nothing or none": (
        "groups.Grouping._group: not lone or (query_len <= FOLDED_ROWS and (not self._square(r))) -> not lone",
        "groups.Grouping._group: tile.complete or tile.square -> tile.square",
        "groups.Grouping._plain: not masks.unknown -> masks.unknown",
        "groups.Grouping._tiles: self._open(r) or self._exact(r) -> self._open(r)",
        "dense.TileMask.of: visible.device.type == 'cpu' -> visible.device.type != 'cpu'",
        "groups.Grouping._group: query_len <= FOLDED_ROWS and (not self._square(r)) -> not self._square(r)",
        "groups.Grouping._group: query_len <= FOLDED_ROWS -> query_len < FOLDED_ROWS",
        "groups.Grouping._group: all((tile.complete or tile.square for tile in group.tiles)) -> any((tile.complete or tile.square for tile in group.tiles))",
        "groups.Grouping._group: tile.complete or tile.square -> tile.complete",
        "groups.Grouping._tiles: self._open(r) and self.fused -> self._open(r)",
        "groups.Grouping._tiles: self._open(r) or self._exact(r) -> self._exact(r)",
        "dense.TileMask.of: folded and visible.shape[1] > 1 -> folded",
        "dense.TileMask.of: visible.shape[1] > 1 -> visible.shape[1] >= 1",
    ),
    "padding that is hidden is zeroed, too": (
        "groups.Grouping._pages: (key >= end) & ((key < count * self.page) | (end < self.page)) -> key >= end",
        "groups.Grouping._pages: key < count * self.page -> key <= count * self.page",
        "groups.Grouping._pages: end < self.page -> end <= self.page",
    ),
    "rows hand over float32 only": (
        "element_codec.encode_elements: x.dtype == torch.float64 -> x.dtype != torch.float64",
    ),
    "uint8 keeps the low 8 bits, and integers of 4 bits have no sign": (
        "element_codec.encode_elements: whole.int() & (1 << element.bits) - 1 -> whole.int()",
        "element_codec.encode_elements: 1 << element.bits -> 1 >> element.bits",
        "element_codec.encode_elements: 1 -> 2",
    ),
    "-low / width is between 0 and 15, up to rounding": (
        "scales._range_words: (-low / words.view(torch.float32)).round().clamp(0, 15) -> (-low / words.view(torch.float32)).round()",
    ),
    "pages always say the size of values": (
        "rows.decode: v_head_size or head_size -> v_head_size",
    ),
    "no format has codes without scales": (
        "rows.encode_rows: format.scale is None or format.scale.place is ScalePlace.CALLER -> format.scale.place is ScalePlace.CALLER",
        "rows.decode_rows: format.scale is not None and format.scale.place is not ScalePlace.CALLER -> format.scale.place is not ScalePlace.CALLER",
        "rows._take_apart: format.scale is not None and format.scale.place is ScalePlace.CODES -> format.scale.place is ScalePlace.CODES",
        "rows.amax_scale: format.scale is not None and format.scale.factor -> format.scale.factor",
        "rows.amax_scale: not format.needs or isinstance(format.element, Dtype) -> not format.needs",
    ),
    "a row holds no more codes than its size": (
        "rows.decode_rows: size - format.rest_size -> size + format.rest_size",
        "rows.decode_rows: size - format.rest_size -> size",
    ),
    "of one dimension, the last is the second": ("rows._factor: -1 -> 1",),
    "the kernel of a CPU gives 0 there by itself; others do not": (
        "dense.fused_attention: torch.where(live[..., None], out, 0.0) -> out",
    ),
    "the same addresses in other units, or token by token in place of page by page": (
        "gather.copy_pages: gcd(*(s for s, n in zip(steps, counts, strict=True) if n > 1)) or 1 -> 1",
        "gather.copy_pages: n > 1 -> n >= 1",
        "gather.copy_pages: tokens == 1 or steps[2] == size -> steps[2] == size",
        "gather.copy_pages: tokens == 1 or steps[2] == size -> tokens == 1",
    ),
    "index_select gives what it writes into its own shape": (
        "gather.copy_pages: into.view(len(index), piece) -> into.view(piece, len(index))",
    ),
}

EQUIVALENT: dict[str, str] = {name: why for why, names in _BY_REASON.items() for name in names}
"""Mutant -> why nothing can tell it from the original."""
