"""How many attention layers of a model really reach attnplat.

Setting `attn_implementation` proves nothing: some models compute their attention themselves
and never ask a registry. So the model runs a few tokens here and each attention module is
watched. No attention is computed for that; the answer to each call is zeros.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from attnplat.errors import ConfigError
from attnplat.integrations.transformers.dense import DenseCall
from attnplat.integrations.transformers.registry import WATCH, AttentionFunction, Watch, register

_TOKENS = 3


@dataclass(frozen=True)
class LayerCheck:
    """One attention module: its name and class, whether it ran, whether it asked attnplat."""

    name: str
    kind: str
    reached: bool
    dispatched: bool


@dataclass(frozen=True)
class Verification:
    """The attention modules of a model, and what kept them from being checked ("" for nothing)."""

    layers: tuple[LayerCheck, ...]
    problem: str = ""

    @property
    def total(self) -> int:
        """Attention modules of the model."""
        return len(self.layers)

    @property
    def dispatched(self) -> int:
        """Those that attnplat computes."""
        return sum(layer.dispatched for layer in self.layers)

    @property
    def bypassed(self) -> tuple[LayerCheck, ...]:
        """Those that ran and asked something else."""
        return tuple(layer for layer in self.layers if layer.reached and not layer.dispatched)

    @property
    def ok(self) -> bool:
        """Whether attnplat computes every attention of the model."""
        return not self.problem and 0 < self.dispatched == self.total

    def __str__(self) -> str:
        text = f"{self.dispatched} of {self.total} attention layers use attnplat"
        if self.problem:
            return f"{text}: {self.problem}"
        own = Counter(layer.kind for layer in self.bypassed)
        missed = Counter(layer.kind for layer in self.layers if not layer.reached)
        reasons = [f"{kind} ({n}) computes its attention itself" for kind, n in own.items()]
        reasons += [f"{kind} ({n}) was not reached" for kind, n in missed.items()]
        return f"{text}: {'; '.join(reasons)}" if reasons else text


def verify(
    model: PreTrainedModel | PreTrainedConfig,
    inputs: Mapping[str, Any] | None = None,
    *,
    name: str = "attnplat",
) -> Verification:
    """Which attention layers of a model reach attnplat.

    Args:
        model: a model, loaded with an `attn_implementation` that `register()` made; or a
            config, of which a model without weights is made under `name`.
        inputs: keywords of the model's forward; a few token ids when left out.
        name: the implementation, where a config is given.

    Raises ConfigError for a model that takes something else than token ids, without `inputs`.
    """
    if isinstance(model, PreTrainedConfig):
        register(name)
        try:
            model = _without_weights(model, name)
        except KeyError as error:
            return Verification((), _own_table(model, error))
    modules = dict(attention_modules(model))
    given = _tokens(model) if inputs is None else inputs
    reached: set[nn.Module] = set()
    dispatched: set[nn.Module] = set()

    def watch(call: DenseCall) -> torch.Tensor:
        dispatched.add(call.module)
        return zeros(call)

    with _noting(modules.values(), reached), watched(model, watch), torch.no_grad():
        problem = _run(model, given)
    return Verification(
        tuple(
            LayerCheck(name, type(m).__name__, m in reached, m in dispatched)
            for name, m in modules.items()
        ),
        problem,
    )


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that compute attention: innermost of those that call themselves so."""

    def named_so(module: nn.Module) -> bool:
        return "Attention" in type(module).__name__

    for name, module in model.named_modules():
        inner = (m for m in module.modules() if m is not module)
        if named_so(module) and not any(map(named_so, inner)):
            yield name, module


@contextmanager
def watched(model: nn.Module, watch: Watch) -> Iterator[None]:
    """While this lasts, `watch` answers the attention calls of the model's modules."""
    modules = list(model.modules())
    for module in modules:
        vars(module)[WATCH] = watch
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop(WATCH, None)


def zeros(call: DenseCall) -> torch.Tensor:
    """An answer of the right shape, [batch, queries, num_heads, v_head_size]."""
    query, value = call.query, call.value
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@contextmanager
def _noting(modules: Iterable[nn.Module], reached: set[nn.Module]) -> Iterator[None]:
    hooks = [m.register_forward_pre_hook(lambda m, _: reached.add(m)) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _run(model: PreTrainedModel, inputs: Mapping[str, Any]) -> str:
    """Run the model; what stopped it, or nothing."""
    implementation = model.config._attn_implementation
    if not isinstance(AttentionInterface().get(implementation), AttentionFunction):
        return (
            f"the model's attn_implementation is {implementation!r}; load it with the name that "
            "register() was given"
        )
    try:
        model(**inputs)
    except Exception as error:
        # Models fail in their own ways on inputs they do not like; that is what is reported.
        return f"the model did not run: {type(error).__name__}: {error}"
    return ""


def _tokens(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    if model.main_input_name != "input_ids":
        raise ConfigError(
            f"{type(model).__name__} takes {model.main_input_name!r}; pass verify(model, inputs) "
            "the keywords of one forward"
        )
    ids = torch.arange(1, 1 + _TOKENS, device=model.device)[None]
    tokens = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = ids
    return tokens


def _without_weights(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config._attn_implementation = name
    with torch.device("meta"):
        model = _model_class(config)._from_config(config)
    if hasattr(model, "set_experts_implementation"):
        # The one that asks for no values, which tensors without memory do not have.
        model.set_experts_implementation("batched_mm")
    return model


def _model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    found: type[PreTrainedModel]
    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            found = getattr(transformers, architecture)
            return found
    for mapping in (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_MAPPING):
        if type(config) in mapping:
            found = mapping[type(config)]
            return found
    raise ConfigError(f"transformers has no model for {type(config).__name__}")


def _own_table(config: PreTrainedConfig, error: KeyError) -> str:
    return (
        f"{config.model_type} cannot be built with this attn_implementation (KeyError: {error}): "
        "it looks attention up in a table of its own, which no registry reaches"
    )
