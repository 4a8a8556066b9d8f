"""L: state layers. Their cases come with their implementations."""

from __future__ import annotations

from attnplat.testing.case import CaseList

L = CaseList("L", "state layers")

DEFERRED = "deferred: no implementation of state layers (mamba, gated delta net ...) is here yet"

for number, claim in enumerate(
    (
        "Without a state before, NaN in the slot has no effect: the start is exactly zero",
        "A state index of -1 computes nothing and writes nothing",
        "A chunk shorter than the convolution's width less one keeps its source intact",
        "Reading one slot and writing another leaves the source intact",
        "Several tokens a step continue an existing state",
        "Padding on the right does not enter the state",
        "Decode and prefill mixed in one batch keep their offsets",
        "After speculation the state goes back to any number of accepted tokens",
        "A prompt split anywhere gives what the whole gives",
        "Very small and very large decays neither under- nor overflow",
        "As many value heads as key heads keep their strides",
    ),
    start=1,
):
    L.absent(number, claim, DEFERRED)
