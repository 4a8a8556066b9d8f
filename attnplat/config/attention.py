"""The user's wishes: which backends, versions and options a run should use.

Field names, meaning and defaults are those of vLLM's attention config, so that a user of
that engine can paste theirs. `"auto"` and None both mean automatic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

from attnplat.config.backend_names import BackendName, parse_backend
from attnplat.config.entry_points import BACKENDS, declared
from attnplat.config.frozen import FrozenMap
from attnplat.config.names import INDEXER_KV_DTYPES, LayerKind, parse_name
from attnplat.config.numbers import is_whole
from attnplat.errors import ConfigError, ConflictError, UnknownNameError

FLASH_ATTN_VERSIONS = (2, 3, 4)
MSA_DECODE_BACKENDS = ("triton", "cutlass")
MLA_PREFILL_BACKENDS = (
    "FLASH_ATTN",
    "FLASHINFER",
    "TRTLLM_RAGGED",
    "TOKENSPEED_MLA",
    "ROCM_AITER_FA",
    "CPU",
    "ZEN_CPU",
    "CUSTOM",
    "REFERENCE",
    "TORCH_SDPA",
)
# Given as `backend`, these name the decode kernel of MiniMax-M3's block-sparse attention.
_MSA_ALIASES = {BackendName.CUTLASS_MSA: "cutlass", BackendName.TRITON_MSA: "triton"}


@dataclass(frozen=True, kw_only=True)
class HiSparseConfig:
    """Sparse-MLA caches that live in host memory with a hot buffer on the device.

    Attributes:
        device_buffer_size: hot rows per request; None means twice the model's top-k.
        host_pool_gib: host memory for the pool in GiB; None means as much as needed.
        eager_host_mirror: rows written while decoding also go to the host at once, so
            that an eviction moves nothing.
    """

    device_buffer_size: int | None = None
    host_pool_gib: float | None = None
    eager_host_mirror: bool = True

    def __post_init__(self) -> None:
        _check_int("hisparse_config.device_buffer_size", self.device_buffer_size, 1, 32768)
        pool = self.host_pool_gib
        number = isinstance(pool, int | float) and not isinstance(pool, bool)
        if pool is not None and not (number and 0 < pool < math.inf):
            raise ConfigError(
                f"hisparse_config.host_pool_gib is {pool!r}; it takes a finite number above 0"
            )
        _check_bool("hisparse_config.eager_host_mirror", self.eager_host_mirror)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What the user asks of the choice of kernels. Every default means automatic.

    Attributes:
        backend: the backend of every layer; a name in any case.
        backend_per_kind: backend by KV-cache kind; beats `backend` for layers of that kind.
        minimax_m3_msa_decode_backend: decode kernel of MiniMax-M3: triton or cutlass.
        minimax_m3_indexer_cp: split MiniMax-M3's indexer over context-parallel ranks.
        flash_attn_version: force FlashAttention 2, 3 or 4.
        flash_attn_max_num_splits_for_cuda_graph: FlashAttention's most KV splits in a graph.
        tq_max_kv_splits_for_cuda_graph: TurboQuant's most KV splits in a graph.
        use_trtllm_attention: FlashInfer's TRT-LLM kernels: None automatic, True, False.
        disable_flashinfer_q_quantization: keep queries unquantised with an fp8 cache.
        mla_prefill_backend: the backend that prefills MLA layers.
        use_prefill_query_quantization: quantise queries in MLA prefill.
        indexer_kv_dtype: format of the sparse indexer's cache: auto, bf16, fp8, mxfp4, nvfp4.
        indexer_sparse_logits: compute indexer logits only where a key can be chosen.
        hisparse_config: host-resident sparse caches; None is off.
        use_non_causal: decoder layers attend non-causally (diffusion models).
        sparse_mla_force_mqa: decode-style attention for sparse MLA prefill too.
        flex_attn_block_m, flex_attn_block_n: FlexAttention's kernel tile, powers of two.
        flex_attn_q_block_size, flex_attn_kv_block_size: FlexAttention's mask blocks, powers
            of two and multiples of the tile.
        sources: (field, who set it) pairs; no part of equality or of the hash.

    Raises:
        UnknownNameError: an unknown backend, kind or format, with the closest known.
        ConfigError: a value out of range, naming field, value and what it takes.
    """

    backend: BackendName | str | None = None
    backend_per_kind: Mapping[LayerKind, BackendName] | Any = ()
    minimax_m3_msa_decode_backend: str = "triton"
    minimax_m3_indexer_cp: bool = False
    flash_attn_version: int | None = None
    flash_attn_max_num_splits_for_cuda_graph: int = 32
    tq_max_kv_splits_for_cuda_graph: int = 32
    use_trtllm_attention: bool | None = None
    disable_flashinfer_q_quantization: bool = False
    mla_prefill_backend: str | None = None
    use_prefill_query_quantization: bool = False
    indexer_kv_dtype: str = "auto"
    indexer_sparse_logits: bool = False
    hisparse_config: HiSparseConfig | None = None
    use_non_causal: bool = False
    sparse_mla_force_mqa: bool = False
    flex_attn_block_m: int | None = None
    flex_attn_block_n: int | None = None
    flex_attn_q_block_size: int | None = None
    flex_attn_kv_block_size: int | None = None
    sources: tuple[tuple[str, str], ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        self._normalise_backends()
        self._normalise_hisparse()
        self._check_choices()
        for name in _BOOLS:
            _check_bool(name, getattr(self, name))
        _check_bool("use_trtllm_attention", self.use_trtllm_attention, optional=True)
        _check_int(
            "flash_attn_max_num_splits_for_cuda_graph",
            self.flash_attn_max_num_splits_for_cuda_graph,
            0,
            256,
            optional=False,
        )
        _check_int(
            "tq_max_kv_splits_for_cuda_graph",
            self.tq_max_kv_splits_for_cuda_graph,
            1,
            256,
            optional=False,
        )
        self._check_flex_tiles()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _normalise_backends(self) -> None:
        self._set("backend", parse_backend(self.backend))
        if self.backend in _MSA_ALIASES:
            self._take_msa_alias(_MSA_ALIASES[BackendName(self.backend)])
        given: Any = self.backend_per_kind or {}
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"backend_per_kind is {given!r}; it takes a mapping of layer kinds to backends"
            )
        parsed = {}
        for kind, name in given.items():
            backend = parse_backend(name)
            if backend is None:
                raise ConfigError(
                    f"backend_per_kind[{str(kind)!r}] is {name!r}; it takes the name of a backend; "
                    "leave the kind out for automatic"
                )
            parsed[parse_name(LayerKind, kind, "layer kind")] = backend
        self._set("backend_per_kind", FrozenMap(parsed))

    def _take_msa_alias(self, kernel: str) -> None:
        given = self.minimax_m3_msa_decode_backend
        if given not in (MSA_DECODE_BACKENDS[0], kernel):
            raise ConflictError(
                f"backend {str(self.backend)!r} sets minimax_m3_msa_decode_backend to {kernel!r}, "
                f"which is also given as {given!r}; give one of the two"
            )
        self._set("minimax_m3_msa_decode_backend", kernel)
        self._set("backend", None)

    def _normalise_hisparse(self) -> None:
        value = self.hisparse_config
        if isinstance(value, Mapping):
            known = [f.name for f in fields(HiSparseConfig)]
            for name in value:
                if name not in known:
                    raise UnknownNameError("hisparse_config field", name, known)
            self._set("hisparse_config", HiSparseConfig(**value))
        elif value is not None and not isinstance(value, HiSparseConfig):
            raise ConfigError(
                f"hisparse_config is {value!r}; it takes a HiSparseConfig, a mapping of its fields "
                "or None"
            )

    def _check_choices(self) -> None:
        _check_choice(
            "minimax_m3_msa_decode_backend", self.minimax_m3_msa_decode_backend, MSA_DECODE_BACKENDS
        )
        dtype = str(self.indexer_kv_dtype).lower()
        _check_choice("indexer_kv_dtype", dtype, INDEXER_KV_DTYPES)
        self._set("indexer_kv_dtype", dtype)
        version = self.flash_attn_version
        if version is not None and not (is_whole(version) and version in FLASH_ATTN_VERSIONS):
            raise ConfigError(f"flash_attn_version is {version!r}; it takes 2, 3, 4 or None")
        prefill = self.mla_prefill_backend
        if prefill is not None:
            folded = str(prefill).upper()
            if folded == "AUTO":
                self._set("mla_prefill_backend", None)
                return
            plugins = declared().names(BACKENDS) if folded not in MLA_PREFILL_BACKENDS else ()
            _check_choice("mla_prefill_backend", folded, (*MLA_PREFILL_BACKENDS, *plugins))
            self._set("mla_prefill_backend", folded)

    def _check_flex_tiles(self) -> None:
        for name in _FLEX:
            value = getattr(self, name)
            _check_int(name, value, 16, 1024)
            if value is not None and value & (value - 1):
                raise ConfigError(f"{name} is {value}; it takes a power of two from 16 to 1024")
        for block, tile in (("q_block_size", "block_m"), ("kv_block_size", "block_n")):
            outer = getattr(self, f"flex_attn_{block}")
            inner = getattr(self, f"flex_attn_{tile}")
            if outer is not None and inner is not None and outer % inner:
                raise ConfigError(
                    f"flex_attn_{block} is {outer}; it takes a multiple of flex_attn_{tile} "
                    f"({inner})"
                )

    # What selection asks --------------------------------------------------------------

    def backend_for(self, kind: LayerKind) -> tuple[BackendName | None, str]:
        """The backend asked for a layer of `kind` (None: automatic), and who asked."""
        if kind in self.backend_per_kind:
            return self.backend_per_kind[kind], self.source_of("backend_per_kind")
        if self.backend is None:
            return None, "default"
        return BackendName(self.backend), self.source_of("backend")

    def resolve_indexer_kv_dtype(self, default: str) -> str:
        """`indexer_kv_dtype`, or the model's `default` where it is `auto`."""
        _check_choice("default", default, INDEXER_KV_DTYPES[1:])
        return default if self.indexer_kv_dtype == "auto" else self.indexer_kv_dtype

    def source_of(self, name: str) -> str:
        """Who set the field: as recorded, else `caller`, or `default` for an untouched default."""
        recorded = dict(self.sources)
        if name in recorded:
            return recorded[name]
        default = next(f.default for f in fields(self) if f.name == name)
        return "default" if getattr(self, name) == default or not getattr(self, name) else "caller"

    @cached_property
    def _set_fields(self) -> frozenset[str]:
        return frozenset(name for name, default in _BLANK.items() if getattr(self, name) != default)

    def set_fields(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults."""
        return self._set_fields

    # Conversions ----------------------------------------------------------------------

    def compute_hash(self) -> str:
        """64 hex digits over every field; the same in every process and on every machine."""
        import hashlib  # loads OpenSSL, which no start-up should pay for

        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain JSON values."""
        out: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "sources":
                continue
            if isinstance(value, HiSparseConfig):
                value = {g.name: getattr(value, g.name) for g in fields(value)}
            elif isinstance(value, Mapping):
                value = {str(k): str(v) for k, v in sorted(value.items())}
            elif isinstance(value, str):
                value = str(value)
            out[f.name] = value
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, source: str = "caller") -> Self:
        """A config of the given fields. Raises UnknownNameError for an unknown field."""
        known = [f.name for f in fields(cls) if f.name != "sources"]
        for name in values:
            if name not in known:
                raise UnknownNameError("attention config field", name, known)
        return cls(**values, sources=tuple((name, source) for name in values))

    def merged_over(self, lower: AttentionConfig) -> AttentionConfig:
        """This config where it says something, else `lower`; the sources go along."""
        given = lower.set_fields()
        if not given:
            return self
        mine = self.set_fields()
        taken = {name: getattr(lower, name) for name in given - mine}
        sources = [(n, self.source_of(n)) for n in sorted(mine)]
        sources += [(n, lower.source_of(n)) for n in sorted(taken)]
        return replace(self, **taken, sources=tuple(sources))


_BOOLS = (
    "minimax_m3_indexer_cp",
    "disable_flashinfer_q_quantization",
    "use_prefill_query_quantization",
    "indexer_sparse_logits",
    "use_non_causal",
    "sparse_mla_force_mqa",
)
_FLEX = (
    "flex_attn_block_m",
    "flex_attn_block_n",
    "flex_attn_q_block_size",
    "flex_attn_kv_block_size",
)


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UnknownNameError(name, value, choices)


def _check_bool(name: str, value: Any, *, optional: bool = False) -> None:
    if isinstance(value, bool) or (optional and value is None):
        return
    raise ConfigError(f"{name} is {value!r}; it takes true or false" + (" or null" * optional))


def _check_int(name: str, value: Any, least: int, most: int, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if not is_whole(value) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; it takes an integer from {least} to {most}")


_FIELDS = tuple(f.name for f in fields(AttentionConfig) if f.name != "sources")
_BLANK = {name: getattr(AttentionConfig(), name) for name in _FIELDS}
