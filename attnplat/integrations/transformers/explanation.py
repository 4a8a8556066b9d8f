"""Which backend each kind of layer of a transformers model would use, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from attnplat.config.attention import AttentionConfig
from attnplat.integrations.transformers.kernels import platform_on
from attnplat.models import LayerGroup, layer_groups
from attnplat.platforms import current_platform
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
                yield f"{layer} -> {chosen.name} [{chosen.mark}] because {reason(selection)}"


def explain(
    model: PreTrainedModel | PreTrainedConfig,
    attention: AttentionConfig | None = None,
    *,
    platform: Platform | None = None,
) -> Explanation:
    """What each kind of layer would use. Nothing is run, and no weights are needed.

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
    groups = layer_groups(model.to_dict(), dtype=dtype)
    return Explanation(tuple((g, platform.select(g.config, attention)) for g in groups))


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
