"""Paged decoding: a model runs a ragged batch through block tables, without padding.

The tokens of all requests are packed into one row, [1, num_tokens], each with its position.
The step (lengths and page tables) travels as a keyword of the model's forward and reaches
every attention layer; nothing is looked up in a global. Keys and values are written where
they are attended to, since only there a layer's config is known: what a model hands to its
cache may be something else (a compressed latent), what it hands to attention never is.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from attnplat.backends.batch import Batch, BatchBounds, PageTable
from attnplat.backends.form import MaskRules
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.kv_cache import KVCache, KVCacheSpec
from attnplat.backends.plan import Plan, PlanKey
from attnplat.backends.workspace import Workspace
from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import MhaConfig
from attnplat.errors import ConfigError, UnsupportedCallError
from attnplat.integrations.transformers.dense import DenseCall, flat
from attnplat.integrations.transformers.kernels import Kernels
from attnplat.integrations.transformers.keywords import STEP
from attnplat.integrations.transformers.layers import layer_config, own_rules
from attnplat.integrations.transformers.masks import StructuredMask
from attnplat.integrations.transformers.verification import verify, watched, zeros
from attnplat.platforms.selection import Selection


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`."""

    is_sliding = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The paged memory has been allocated by then."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values alone; the attention function writes them to their pages."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No keys: the step has the lengths, and a mask over packed tokens would be in the way."""
        return 0, 0

    def get_seq_length(self) -> int:
        """0: positions are passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """-1: no bound of its own."""
        return -1

    get_max_cache_shape = get_max_length  # its older name


class PagedCache(Cache):
    """What a model takes for its cache during a paged step.

    It makes the model hand on new keys and values only. States that are no keys and values
    (convolutions, recurrences, an indexer's keys) are refused.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[PagedLayer() for _ in range(num_layers)])

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedCallError(
            "the model keeps more than keys and values between steps (an indexer's keys, or a "
            "convolution's or recurrence's state); run it densely, with transformers' own cache"
        )

    update_indexer = _refuse
    get_conv_state = update_conv_state = _refuse
    get_recurrent_state = update_recurrent_state = _refuse
    has_previous_state = _refuse


@dataclass(frozen=True)
class Asked:
    """What a layer asks for at each call; the same at every step, or the step is refused."""

    rules: MaskRules
    scaling: float | None
    softcap: float | None
    sinks: bool
    deterministic: bool
    heads: tuple[int, int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, call: DenseCall) -> Asked:
        """What `call` asks for.

        Raises UnsupportedCallError for what a paged call cannot bring.
        """
        keywords = call.keywords
        if call.query.shape[0] != 1:
            raise UnsupportedCallError(
                f"a paged step is packed into one row; the model was given {call.query.shape[0]}"
            )
        for name in ("position_bias", "indices", "cu_seq_lens_q"):
            if getattr(keywords, name) is not None:
                raise UnsupportedCallError(
                    f"{name} refers to the keys of a dense call and this one is paged; run the "
                    "model densely, with transformers' own cache"
                )
        return cls(
            rules=_rules(call),
            scaling=call.scaling,
            softcap=keywords.softcap,
            sinks=keywords.s_aux is not None,
            deterministic=keywords.deterministic,
            heads=(
                call.query.shape[1],
                call.key.shape[1],
                call.query.shape[-1],
                call.value.shape[-1],
            ),
            dtype=call.query.dtype,
        )


def _rules(call: DenseCall) -> MaskRules:
    """The mask of a layer in a paged step, whose mask tensor has no columns."""
    mask = call.mask
    if mask is None:
        return own_rules(call.module, call.keywords)
    if not isinstance(mask, StructuredMask) or mask.shape[-1] != 0:
        raise UnsupportedCallError(
            "the model gave its attention a mask of its own in a paged step, which has lengths in "
            "its place; leave attention_mask out, or run the model densely"
        )
    if mask.rules is None:
        raise UnsupportedCallError(
            "the model's mask is more than causality, a window or chunks (image spans, packed "
            "sequences); run it densely"
        )
    return mask.rules


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerState:
    """One attention layer, ready to run paged.

    Attributes:
        index: its number among the model's layers.
        asked: what each of its calls asks for.
        config: the same as a layer config.
        impl: what runs it.
    """

    index: int
    asked: Asked
    config: MhaConfig
    impl: AttentionImpl


@dataclass(frozen=True)
class LayerKindReport:
    """Layers of equal config: which they are, and what was decided."""

    config: MhaConfig
    layers: tuple[int, ...]
    selection: Selection


@dataclass
class Clock:
    """Seconds spent in attention: planning, writing keys and values, attending."""

    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedStep:
    """One step of a ragged batch, as every layer receives it.

    Attributes:
        batch: the lengths.
        pages: where each request's tokens are, and where the new ones go.
        layers: the model's layers by index.
        caches: their keys and values.
        plans: made by the first layer of each plan key, shared by the others.
        clock: counts the time in attention.
    """

    batch: Batch
    pages: PageTable
    layers: Mapping[int, LayerState]
    caches: Mapping[int, KVCache]
    workspaces: dict[PlanKey, Workspace]
    clock: Clock
    plans: dict[PlanKey, Plan] = field(default_factory=dict)

    def attend(self, call: DenseCall) -> torch.Tensor:
        """Write the new keys and values, then attend; [1, num_tokens, num_heads, v_head_size]."""
        state = self.layers[_index(call.module)]
        if (asked := Asked.of(call)) != state.asked:
            raise UnsupportedCallError(
                f"layer {state.index} asks for {asked} and was set up for {state.asked}"
            )
        started = time.perf_counter()
        out = state.impl.forward(
            self._plan(state.impl),
            flat(call.query),
            self.caches[state.index],
            kv=(flat(call.key), flat(call.value)),
            sinks=call.keywords.s_aux,
        )
        self.clock.seconds += time.perf_counter() - started
        return out[None]

    def _plan(self, impl: AttentionImpl) -> Plan:
        key = impl.plan_key
        plan = self.plans.get(key)
        if plan is None:
            plan = impl.plan(self.batch, self.pages, workspace=self._workspace(impl))
            self.plans[key] = plan
        return plan

    def _workspace(self, impl: AttentionImpl) -> Workspace | None:
        batch = self.batch
        needed = impl.workspace_bytes(
            BatchBounds(
                max_reqs=batch.num_reqs,
                max_tokens=batch.num_tokens,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
            )
        )
        if not needed:
            return None
        workspace = self.workspaces.setdefault(impl.plan_key, Workspace(impl.device))
        workspace.reserve(needed)
        workspace.reset()
        return workspace


class PagedModel:
    """A causal language model of transformers that runs ragged batches through paged caches.

    `allocate` gives it memory; then `step` runs.

    Args:
        model: loaded with an `attn_implementation` that `register()` made.
        block_size: tokens per block; None for what the backends prefer.
        attention: the user's wishes; None for what the environment says.

    Raises:
        UnsupportedCallError: a model whose attention does not reach attnplat, or that keeps
            more than keys and values.
        NoBackendError: no backend fits some layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        block_size: int | None = None,
        attention: AttentionConfig | None = None,
    ) -> None:
        self.model = model
        self.kernels = Kernels(attention)
        _check_reaches(model)
        self._parameters = _forward_parameters(model)
        self.layers = self._set_up(_ask_layers(model, self._cache_argument()), block_size)
        impls = [state.impl for state in self.layers.values()]
        self.block_size = block_size or max(impl.block_size for impl in impls)
        self._specs = {i: s.impl.kv_cache_spec(self.block_size) for i, s in self.layers.items()}
        self._caches: dict[int, KVCache] = {}
        self._workspaces: dict[PlanKey, Workspace] = {}
        self._clock = Clock()
        self.num_blocks = 0

    def allocate(self, num_blocks: int) -> None:
        """Give every layer a cache of `num_blocks` blocks; what an earlier one held is gone.

        Raises ConfigError below 1, or for more than memory holds.
        """
        if num_blocks < 1:
            raise ConfigError(f"num_blocks is {num_blocks}; it takes at least 1")
        self._caches, self.num_blocks = {}, 0
        try:
            self._caches = _allocate(self._specs, num_blocks, self.device)
        except (RuntimeError, TypeError) as error:  # out of memory; or past what a size can be
            needed = num_blocks * self.bytes_per_block / 2**30
            raise ConfigError(
                f"num_blocks is {num_blocks}: a cache of {needed:.1f} GiB cannot be allocated on "
                f"{self.device}; give fewer"
            ) from error
        self.num_blocks = num_blocks

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.model.device
        return device

    @property
    def attention_seconds(self) -> float | None:
        """Time spent in attention by all steps so far; None where calls do not wait for the
        device, so that the time of a call says nothing."""
        return self._clock.seconds if self.device.type == "cpu" else None

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers together."""
        return sum(spec.bytes_per_block for spec in self._specs.values())

    @property
    def layer_kinds(self) -> tuple[LayerKindReport, ...]:
        """What each kind of layer asks for and what was decided for it."""
        indices: dict[MhaConfig, list[int]] = {}
        for i, state in self.layers.items():
            indices.setdefault(state.config, []).append(i)
        decided = self.kernels.selections
        return tuple(
            LayerKindReport(config, tuple(layers), decided[config, self.device])
            for config, layers in indices.items()
        )

    def check_length(self, prompt_tokens: int, max_new_tokens: int) -> None:
        """Raise ConfigError where a request has more tokens than the model has positions for."""
        most = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and prompt_tokens + max_new_tokens - 1 > most:
            raise ConfigError(
                f"a prompt of {prompt_tokens} tokens and {max_new_tokens} new ones do not fit: the "
                f"model takes {most} (max_position_embeddings); generate at most "
                f"{max(most - prompt_tokens + 1, 0)}"
            )

    @torch.inference_mode()
    def step(
        self,
        tokens: Sequence[Sequence[int]],
        contexts: Sequence[int],
        blocks: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Run new tokens of several requests, and give the logits after the last of each.

        Args:
            tokens: new token ids per request, at least one each.
            contexts: tokens of each request that are in the cache already.
            blocks: its blocks in order, enough for both.

        Returns:
            logits [num_reqs, vocabulary].
        """
        query_lens = [len(ids) for ids in tokens]
        seq_lens = [c + n for c, n in zip(contexts, query_lens, strict=True)]
        batch = Batch.from_lengths(query_lens, seq_lens, device=self.device)
        step = PagedStep(
            batch=batch,
            pages=PageTable.from_blocks(blocks, batch, self.block_size),
            layers=self.layers,
            caches=self._caches,
            workspaces=self._workspaces,
            clock=self._clock,
        )
        positions = [p for c, n in zip(contexts, seq_lens, strict=True) for p in range(c, n)]
        last = batch.query_start_loc[1:].long() - 1
        keywords: dict[str, Any] = {STEP: step, **self._cache_argument()}
        if "logits_to_keep" in self._parameters:
            keywords["logits_to_keep"] = last
        logits: torch.Tensor = self.model(
            input_ids=self._row([token for ids in tokens for token in ids]),
            position_ids=self._row(positions),
            use_cache=True,
            **keywords,
        ).logits[0]
        return logits if "logits_to_keep" in self._parameters else logits[last]

    def _row(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(values)], device=self.device)

    def _cache_argument(self) -> dict[str, PagedCache]:
        """A fresh cache under the name that this version of transformers gives it."""
        name = "cache" if "cache" in self._parameters else "past_key_values"
        return {name: PagedCache(self.model.config.get_text_config().num_hidden_layers)}

    def _set_up(self, asked: dict[int, _Seen], block_size: int | None) -> dict[int, LayerState]:
        layers = {}
        for i, seen in asked.items():
            config = seen.config.replace(block_size=block_size)
            impl = self.kernels.impl(config, self.device)
            layers[i] = LayerState(index=i, asked=seen.asked, config=config, impl=impl)
        return layers


def _allocate(
    specs: dict[int, KVCacheSpec], num_blocks: int, device: torch.device
) -> dict[int, KVCache]:
    """A cache per layer; layers of one spec lie together in memory."""
    caches: dict[int, KVCache] = {}
    for spec in dict.fromkeys(specs.values()):
        indices = [i for i, own in specs.items() if own == spec]
        pool = KVCache.allocate_layers(spec, len(indices), num_blocks, device)
        caches |= dict(zip(indices, pool, strict=True))
    return caches


# Looking at the model -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Seen:
    asked: Asked
    config: MhaConfig


def _ask_layers(model: PreTrainedModel, cache: dict[str, PagedCache]) -> dict[int, _Seen]:
    """What each layer asks for, from a forward of two tokens in which nothing is attended to."""
    token, seen = object(), dict[int, _Seen]()

    def watch(call: DenseCall) -> torch.Tensor:
        if call.keywords.step is not token:
            raise UnsupportedCallError(
                f"{type(call.module).__name__} does not hand the keyword {STEP} on to its "
                "attention function; run the model densely"
            )
        if (index := _index(call.module)) in seen:
            raise UnsupportedCallError(
                f"layer {index} attends twice in one forward, and a paged cache has one place for "
                "it; run the model densely"
            )
        asked = Asked.of(call)
        if not asked.rules.causal:
            raise UnsupportedCallError(
                f"layer {index} of {type(model).__name__} is not causal, so it cannot decode"
            )
        config = layer_config(
            call.module,
            call.query,
            call.key,
            call.value,
            rules=asked.rules,
            scaling=call.scaling,
            keywords=call.keywords,
        )
        seen[index] = _Seen(asked, config)
        return zeros(call)

    row = torch.arange(1, 3, device=model.device)[None]
    keywords = {STEP: token, **cache}
    with watched(model, watch), torch.inference_mode():
        model(input_ids=row, position_ids=row, use_cache=True, **keywords)
    return seen


def _check_reaches(model: PreTrainedModel) -> None:
    """Raise UnsupportedCallError unless all attention that token ids reach is attnplat's."""
    report = verify(model)
    if report.problem or report.bypassed or not report.dispatched:
        raise UnsupportedCallError(f"{type(model).__name__} cannot run paged: {report}")


def _forward_parameters(model: PreTrainedModel) -> frozenset[str]:
    """The names that the model's forward takes.

    Raises UnsupportedCallError for a model that cannot take a paged step.
    """
    parameters = inspect.signature(model.forward).parameters
    further = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = frozenset(parameters)
    missing = {"input_ids", "position_ids"} - names
    if not further or missing or not names & {"cache", "past_key_values"}:
        raise UnsupportedCallError(
            f"{type(model).__name__} cannot run paged: its forward must take input_ids, "
            "position_ids, a cache, and further keywords; run it densely"
        )
    return names


def _index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedCallError(
            f"{type(module).__name__} has no layer_idx, so its cache cannot be told; run the model "
            "densely"
        )
    return index
