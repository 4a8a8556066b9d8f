"""The ground cases are built on: sizes and dtypes that the subject takes, and how thoroughly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, TypeVar

from attnplat.backends.formats.facts import format_of
from attnplat.config.layer import (
    LayerConfig,
    MhaConfig,
    MlaConfig,
    MlaPrefillConfig,
    SparseMlaConfig,
)
from attnplat.config.names import Dtype, Feature
from attnplat.errors import ConfigError
from attnplat.testing.scenes import Arrangement
from attnplat.testing.subject import Subject

Level = Literal["quick", "full"]
T = TypeVar("T")

DTYPES = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.FLOAT64)
HEAD_SIZES = (16, 32, 64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
LAYOUTS = ("HND", "NHD")


WORDS = {
    "fp8_e4m3fn": "fp8_e4m3",
    "fp8_e4m3fnuz": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8_th": "int8_per_token_head",
    "fp8_th": "fp8_per_token_head",
    "fp8_th_fnuz": "fp8_per_token_head",
    "int4_th": "int4_per_token_head",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "mxfp8": "mxfp8",
    "mla_fp8_656": "fp8_ds_mla",
    "mla_nvfp4_352": "nvfp4_ds_mla",
}
"""What users call each coded format; those that have no word are given by name."""


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """What a case builds its scenes with.

    Attributes:
        dtype: activations.
        head_size, block_size: the smallest the subject takes.
        layouts: the cache layouts it takes.
        lse: whether it gives log-sum-exps.
        device: the device's type.
        level: `quick` or `full`.
        seed: of all random numbers.
    """

    dtype: Dtype = Dtype.FLOAT32
    head_size: int = 16
    block_size: int = 16
    layouts: tuple[str, ...] = LAYOUTS
    lse: bool = True
    device: str = "cpu"
    level: Level = "quick"
    seed: int = 0

    @property
    def full(self) -> bool:
        """Whether there is time."""
        return self.level == "full"

    def some(self, values: tuple[T, ...], quick: int) -> tuple[T, ...]:
        """All values when there is time, else the first `quick`."""
        return values if self.full else values[:quick]

    def layer(self, **changes: Any) -> MhaConfig:
        """A small layer with two groups of two heads, changed as asked."""
        wants: dict[str, Any] = {
            "head_size": self.head_size,
            "num_heads": 4,
            "num_kv_heads": 2,
            "dtype": self.dtype,
        }
        return MhaConfig(**{**wants, **changes, "also_needs": self._needs(changes)})

    def cross(self, **changes: Any) -> MhaConfig:
        """Cross attention."""
        return self.layer(attn_type="encoder_decoder", **changes)

    def encoder(self, **changes: Any) -> MhaConfig:
        """An encoder's attention, without a cache."""
        return self.layer(attn_type="encoder_only", **changes)

    def latent(self, **changes: Any) -> MlaConfig:
        """Absorbed latent attention: one key head, whose front is the value."""
        return MlaConfig(**self._latent(changes))

    def sparse(self, topk: int = 6, **changes: Any) -> SparseMlaConfig:
        """Absorbed latent attention over keys that an indexer named."""
        return SparseMlaConfig(index_topk=topk, **self._latent(changes))

    def expanded(self, **changes: Any) -> MlaPrefillConfig:
        """Expanded latent attention: values narrower than keys, no cache."""
        wants: dict[str, Any] = {
            "head_size": 24,
            "num_heads": 4,
            "num_kv_heads": 4,
            "dtype": self.dtype,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_size": 16,
        }
        return MlaPrefillConfig(**{**wants, **changes})

    def _latent(self, changes: dict[str, Any]) -> dict[str, Any]:
        wants: dict[str, Any] = {
            "head_size": 40,
            "num_heads": 4,
            "dtype": self.dtype,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "kv_lora_rank": 32,
            "v_head_size": 16,
        }
        return {**wants, **changes, "also_needs": self._needs(changes)}

    def _needs(self, changes: dict[str, Any]) -> frozenset[Feature]:
        wanted = frozenset(changes.get("also_needs", ()))
        return wanted | {Feature.LSE} if self.lse else wanted

    def coded(self, encoding: str, **changes: Any) -> LayerConfig:
        """A layer whose cache is coded; of a size that the format stores."""
        format = format_of(encoding)
        word = WORDS.get(encoding, "auto")
        if not format.latent:
            size = max(self.head_size, format.size_multiple)
            return self.layer(**{"head_size": size, "kv_cache_dtype": word, **changes})
        assert format.size is not None
        rope = format.rest_size
        return self.latent(
            **{
                "head_size": format.size,
                "kv_lora_rank": format.size - rope,
                "qk_rope_head_dim": rope,
                "kv_cache_dtype": word,
                **changes,
            }
        )

    def pages(self, **changes: Any) -> Arrangement:
        """A plain paged arrangement, changed as asked."""
        wants: dict[str, Any] = {"block_size": self.block_size, "layout": self.layouts[0]}
        return Arrangement(**{**wants, **changes})

    def arrangements(self, quick: int = 2) -> tuple[Arrangement, ...]:
        """Several block sizes and layouts."""
        pairs = [(self.block_size, layout) for layout in self.layouts]
        pairs += [(2 * self.block_size, self.layouts[-1])]
        pairs += [(4 * self.block_size, self.layouts[0]), (8 * self.block_size, self.layouts[-1])]
        made = tuple(self.pages(block_size=size, layout=layout) for size, layout in pairs)
        return self.some(made, quick)

    def replace(self, **changes: Any) -> Terrain:
        """A copy with fields changed."""
        return replace(self, **changes)


def terrains(subject: Subject, level: Level, seed: int) -> tuple[Terrain, ...]:
    """The ground that suits the subject, one terrain a dtype, the base first.

    Raises ConfigError for a subject that takes no plain layer of any dtype or size.
    """
    if not subject.impl.operations:
        return (Terrain(device=subject.device.type, level=level, seed=seed, lse=False),)
    found = [t for dtype in DTYPES if (t := _terrain(subject, dtype, level, seed)) is not None]
    if not found:
        raise ConfigError(
            f"{subject.name} takes no plain layer of dtype {', '.join(DTYPES)}, decoding with a "
            f"head size of {', '.join(map(str, HEAD_SIZES))}, latent or sparse; there is nothing "
            "to check"
        )
    return tuple(found)


def _terrain(subject: Subject, dtype: Dtype, level: Level, seed: int) -> Terrain | None:
    for head_size, block_size in product(HEAD_SIZES, BLOCK_SIZES):
        ground = Terrain(
            dtype=dtype,
            head_size=head_size,
            block_size=block_size,
            layouts=_layouts(subject),
            lse=Feature.LSE in subject.impl.features,
            device=subject.device.type,
            level=level,
            seed=seed,
        )
        paged = (ground.layer(), ground.latent(), ground.sparse())
        layers = [*(config.replace(block_size=block_size) for config in paged), ground.expanded()]
        if any(subject.refusal(config) is None for config in layers):
            return ground
    return None


def _layouts(subject: Subject) -> tuple[str, ...]:
    named = {"HND": "LBHNC", "NHD": "LBNHC"}
    taken = [b.layouts for b in subject.declared if b.layouts is not None]
    return tuple(n for n in LAYOUTS if all(named[n] in layouts for layouts in taken)) or LAYOUTS
