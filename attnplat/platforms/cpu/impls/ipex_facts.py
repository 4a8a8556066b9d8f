"""What is known of Intel's extension for PyTorch. No torch here: the catalog reads it too.

Its project is closed: 2.8.0 of August 2025 is its last release, and it imports beside torch 2.8
alone. Its wheel names no version of torch, so pip installs it beside any.
"""

from __future__ import annotations

from attnplat.config.names import Feature

IPEX_VERSION = "2.8.0"
IPEX_TORCH = "2.8"
"""The release whose functions are called, and the minor of torch that it imports beside."""

IPEX_FEATURES: frozenset[Feature] = frozenset(
    {Feature.LOGITS_SOFT_CAP, Feature.KV_CONNECTOR, Feature.ADAPTIVE_VERIFICATION}
)
"""What its kernels do rightly. Windows and ALiBi are among their arguments: a tile that a window
hides as a whole makes its rows NaN, and prompts take no slopes. They give no log-sum-exp."""

PARTITION = 128
"""Tokens that a decoding thread reads at a time: blocks must divide it. It does not check that, so
pages of other sizes are copied for it."""

MOST_GROUPED_HEADS = 16
"""Query heads of one key head that its scratch has room for. Nothing checks that, either."""


IPEX_LAYOUTS = ("LBHNC", "LHBNC", "BLHNC", "BHLNC")
"""KV-cache layouts that its kernels read in place: the tokens of a head one after the other. For
prompts it does not look at the distance between tokens; with others it is wrong without a word."""


def is_pair(extension: str, torch: str) -> bool:
    """Whether these are the versions that are known, local labels such as `+cpu` left out."""
    return extension.partition("+")[0] == IPEX_VERSION and torch.startswith(f"{IPEX_TORCH}.")
