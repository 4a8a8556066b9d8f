"""Which backend each kind of layer of a transformers model would use, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, PreTrainedModel

from attnplat.config.attention import AttentionConfig
from attnplat.config.layer import MhaConfig, MlaConfig
from attnplat.integrations.transformers.kernels import platform_on
from attnplat.models import LayerGroup, layer_groups
from attnplat.platforms import current_platform
from attnplat.platforms.advice import in_words
from attnplat.platforms.explain import describe
from attnplat.platforms.platform import Platform
from attnplat.platforms.selection import Selection


@dataclass(frozen=True)
class Explanation:
    """The layer kinds of a model, each with what was decided for it."""

    decisions: tuple[tuple[LayerGroup, Selection], ...]

    @property
    def ok(self) -> bool:
        """Whether every kind has a backend."""
        return all(selection.ok for _, selection in self.decisions)

    def __str__(self) -> str:
        """One line per kind; the whole story is in each selection's `explain()`."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for group, selection in self.decisions:
            layer = f"{group.count} x {describe(group.config)}"
            chosen = selection.chosen
            if chosen is None:
                yield f"{layer} -> none: {selection.failure().splitlines()[0]}"
            else:
                mark = selection.proof(chosen).mark
                yield f"{layer} -> {chosen.name} [{mark}] because {reason(selection)}"
            yield from (f"  advice: {in_words(change)}" for change in selection.advice)


def explain(
    model: PreTrainedModel | PreTrainedConfig,
    attention: AttentionConfig | None = None,
    *,
    platform: Platform | None = None,
) -> Explanation:
    """What each kind of layer would use. Nothing is run, and no weights are needed.

    The layers are those that transformers hands to attention: latent ones arrive expanded, as
    ordinary heads whose values are narrower than their keys.

    Args:
        model: a model, or its config.
        attention: the user's wishes; None for what the environment says.
        platform: the device to answer for; default the model's, else this machine's.

    Raises ModelFileError for a config that does not say what its layers are.
    """
    dtype = None
    if isinstance(model, PreTrainedModel):
        platform = platform or platform_on(model.device)
        dtype = str(model.dtype)
        model = model.config
    platform = platform or current_platform()
    groups = [_as_dispatched(g) for g in layer_groups(model.to_dict(), dtype=dtype)]
    return Explanation(tuple((g, platform.select(g.config, attention)) for g in groups))


def _as_dispatched(group: LayerGroup) -> LayerGroup:
    """A group as its attention function is called: transformers expands latents before that."""
    config = group.config
    if not isinstance(config, MlaConfig) or config.v_head_size is None:
        return group
    head_size = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0)
    expanded = MhaConfig(
        head_size=head_size or config.head_size,
        v_head_size=config.v_head_size,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        scale=config.scale,
        attn_type=config.attn_type,
        causal=config.causal,
        sliding_window=config.sliding_window,
        sinks=config.sinks,
        topk=config.index_topk,
        label=config.label,
        provenance=config.provenance,
    )
    return replace(group, config=expanded)


def reason(selection: Selection) -> str:
    """Why the chosen backend was chosen, a clause; "" where none was."""
    chosen = selection.chosen
    if chosen is None:
        return ""
    if selection.requested is not None:
        return f"the {selection.requested_by} asked for it"
    before = selection.candidates[: selection.candidates.index(chosen.name)]
    refused = [_refusal(name, selection) for name in before if name in selection.rejections]
    if refused:
        return f"it comes next after {', '.join(refused)}"
    return selection.row.because if selection.row is not None else ""


def _refusal(name: str, selection: Selection) -> str:
    first = str(selection.rejections[name][0])
    return f"{name} ({first.removeprefix(f'{name}: ')})"
