"""Scenes: what one call of one layer means, apart from how it lies in memory.

A scene is dense and on the CPU. `Arrangement` is the rest: pages, strides, padding, who
allocates what. No result may depend on an arrangement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from attnplat.backends.formats.encodings import PLAIN_ENCODINGS, Encoding, resolve_encoding
from attnplat.backends.formats.facts import format_of
from attnplat.backends.formats.rows import decode_rows, encode_rows
from attnplat.config.layer import LayerConfig, MhaConfig
from attnplat.config.names import AttnType
from attnplat.testing.truth import Answer, Request, Rules, Sight, attend, rules_of

NAN = float("nan")
INF = float("inf")


def stored_encoding(config: LayerConfig, encoding: Encoding | None = None) -> Encoding:
    """How a layer's cache stores keys and values; `encoding` where its word does not say."""
    if encoding is not None:
        return encoding
    word = config.kv_cache_dtype if config.has_kv_cache else None
    return resolve_encoding(word, config.operation, dtype=config.dtype)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scene:
    """One layer and the requests of one step.

    Attributes:
        config: the layer, head counts known.
        requests: the requests, in order.
        sinks, alibi_slopes: [num_heads], or None.
        note: what is special about it, for messages.
        encoding: the stored format where the config's word does not say it alone.
        k_scale, v_scale: the cache's scales, float32 [1] or [num_kv_heads], for formats that
            take the caller's.
    """

    config: LayerConfig
    requests: tuple[Request, ...]
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    note: str = ""
    encoding: Encoding | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __str__(self) -> str:
        lens = [(r.query_len, r.seq_len) for r in self.requests[:6]]
        more = " ..." if len(self.requests) > 6 else ""
        words = [self.note] if self.note else []
        words.append(f"(query, keys) {lens}{more}")
        words.append(", ".join(f"{k}={v}" for k, v in self.config.to_dict().items()))
        return "; ".join(words)

    def replace(self, **changes: Any) -> Scene:
        """A copy with fields changed."""
        return replace(self, **changes)

    def reordered(self, order: Sequence[int]) -> Scene:
        """The same requests (or some of them) in another order."""
        return replace(self, requests=tuple(self.requests[r] for r in order))

    @property
    def rules(self) -> Rules:
        """The layer's rules."""
        return rules_of(self.config)

    @property
    def dtype(self) -> torch.dtype:
        """The activations' dtype."""
        found = getattr(torch, str(self.config.dtype))
        assert isinstance(found, torch.dtype)
        return found

    @property
    def query_lens(self) -> list[int]:
        """Query rows of each request."""
        return [r.query_len for r in self.requests]

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each request."""
        return [r.seq_len for r in self.requests]

    @property
    def num_rows(self) -> int:
        """Query rows of all requests."""
        return sum(self.query_lens)

    @property
    def cross(self) -> bool:
        """Whether keys are an encoder's."""
        config = self.config
        return isinstance(config, MhaConfig) and config.attn_type == AttnType.ENCODER_DECODER

    @property
    def stored_encoding(self) -> Encoding:
        """How the cache stores keys and values."""
        return stored_encoding(self.config, self.encoding)

    def rows(self, name: str, request: Request) -> torch.Tensor:
        """The request's `k` or `v` as its cache holds them: [seq_len, num_kv_heads, row]."""
        tensor = request.k if name == "k" else request.v
        assert tensor is not None
        encoding = self.stored_encoding
        if encoding in PLAIN_ENCODINGS:
            return tensor.to(getattr(torch, encoding.value))
        scale = self.k_scale if name == "k" else self.v_scale
        return encode_rows(format_of(encoding), tensor, scale=scale)

    def meant(self, name: str, request: Request) -> torch.Tensor:
        """What those rows mean, float64 [seq_len, num_kv_heads, size]."""
        rows, encoding = self.rows(name, request), self.stored_encoding
        if encoding in PLAIN_ENCODINGS:
            return rows.double()
        rules = self.rules
        return decode_rows(
            format_of(encoding),
            rows,
            size=rules.head_size if name == "k" else rules.v_head_size,
            scale=self.k_scale if name == "k" else self.v_scale,
            dtype=torch.float64,
        )

    @cached_property
    def memory(self) -> dict[Any, Any]:
        """What laying the scene out has found, for the next time."""
        return {}

    @cached_property
    def sights(self) -> tuple[Sight, ...]:
        """Which keys each request's rows see."""
        rules = self.rules
        return tuple(Sight(rules, request) for request in self.requests)

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """What each request must give."""
        sinks = None if self.sinks is None else self.sinks.double()
        slopes = None if self.alibi_slopes is None else self.alibi_slopes.double()
        found = []
        for sight in self.sights:
            request = sight.request
            k = self.meant("k", request)
            v = k[..., : sight.rules.v_head_size]
            if request.v is not None:
                v = self.meant("v", request)
            found.append(attend(sight, k, v, sinks, slopes))
        return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """How a scene lies in memory and is called.

    Attributes:
        paged: keys come from a cache's pages, else dense with the call. Layers that keep no
            cache are always dense.
        block_size, layout: the cache's.
        order: seed of the physical order of blocks.
        spare: blocks that belong to nobody, full of poison.
        blocks: the physical blocks themselves, one tuple a request; may repeat.
        num_blocks: blocks of the cache where `blocks` are given.
        rolling: tables begin at the first block that a query sees (`first_block`).
        columns: table columns beyond those needed.
        tail: what entries that must not be read hold: an id, or `spare` for a poisoned block.
        poison: what fills all that must not be read; None fills it with 0.
        padding: padding rows of q, k, v, out and lse.
        padding_requests: empty requests at the end.
        spread: gaps of poison between heads and between rows of every tensor.
        fused: q, k and v are slices of one tensor.
        offset: elements by which tensors start off an aligned address.
        layers: the cache is one of so many in one pool, the last.
        write: new tokens are in the cache (`done`), come with the call (`fused`), or go
            through write_kv first (`first`).
        padding_slots: what slot_mapping says of padding rows.
        out: allocated by the call, or given.
        lse: returned, given, or given as a transposed slice.
        validate: look at values.
        slack: added to the host's bounds on lengths.
    """

    paged: bool = True
    block_size: int = 16
    layout: str = "HND"
    order: int = 0
    spare: int = 2
    blocks: tuple[tuple[int, ...], ...] | None = None
    num_blocks: int = 0
    rolling: bool = False
    columns: int = 2
    tail: int | Literal["spare"] = "spare"
    poison: float | None = NAN
    padding: int = 0
    padding_requests: int = 0
    spread: bool = False
    fused: bool = False
    offset: int = 0
    layers: int = 1
    write: Literal["done", "fused", "first"] = "done"
    padding_slots: int = -1
    out: Literal["allocated", "given"] = "given"
    lse: Literal["returned", "given", "transposed"] = "returned"
    validate: bool = False
    slack: int = 0

    def replace(self, **changes: Any) -> Arrangement:
        """A copy with fields changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        plain = Arrangement()
        told = [
            f"{name}={getattr(self, name)!r}"
            for name in self.__dataclass_fields__
            if repr(getattr(self, name)) != repr(getattr(plain, name))
        ]
        return ", ".join(told) or "plain arrangement"
