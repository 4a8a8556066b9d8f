"""Sequences whose keys are spread over ranks: who has which, and joining the results.

Position j is on rank (j // interleave) % size, so ranks hold runs of `interleave` tokens in
turn, and each keeps its own tokens without gaps, in order of position. For decode, and for the
context of a prompt: there every query sees every key of its context, so each rank runs without
a causal mask over what it has, and the results are joined by log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnplat.errors import ConfigError
from attnplat.ops.merge import apply_sinks, merge_states


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's share of every sequence.

    Attributes:
        rank, size: this rank, and how many share a sequence.
        interleave: tokens in a run.

    Raises:
        ConfigError: numbers that name no share.
    """

    rank: int
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.interleave < 1 or not 0 <= self.rank < self.size:
            raise ConfigError(
                f"rank {self.rank} of {self.size} with interleave {self.interleave} is no share; "
                "size and interleave take at least 1, rank 0 to size - 1"
            )

    def local_lens(self, seq_lens: torch.Tensor) -> torch.Tensor:
        """How many of each sequence's first `seq_lens` tokens this rank has; same dtype.

        Whole turns give `interleave` each; of the last, begun turn this rank has what goes
        beyond the ranks before it.
        """
        turn = self.size * self.interleave
        whole = torch.div(seq_lens, turn, rounding_mode="floor") * self.interleave
        begun = seq_lens % turn - self.rank * self.interleave
        return whole + begun.clamp(0, self.interleave)

    def holds(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether this rank has the tokens at these positions: bool, in their shape."""
        run = torch.div(positions, self.interleave, rounding_mode="floor")
        return run % self.size == self.rank

    def local_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Where this rank keeps the tokens at `positions` of a sequence; -1 for another's."""
        turn = torch.div(positions, self.size * self.interleave, rounding_mode="floor")
        local = turn * self.interleave + positions % self.interleave
        return torch.where(self.holds(positions), local, -1)

    def global_positions(self, local: torch.Tensor) -> torch.Tensor:
        """The positions in the whole sequence of this rank's tokens `local` >= 0."""
        run = torch.div(local, self.interleave, rounding_mode="floor")
        return (run * self.size + self.rank) * self.interleave + local % self.interleave


def combine_shards(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over all ranks' keys from each rank's, in the order given.

    Args:
        outs: [num_tokens, num_heads, v_head_size] of each rank, computed without sinks. What
            the output of a rank without keys holds is never looked at.
        lses: float32 [num_tokens, num_heads] of each; -inf where a rank has no visible key.
        sinks: [num_heads], joined here, once; pass them to no rank.
        out: where to write the result; may be one of `outs`. Default: allocated.

    Returns:
        (out, lse); 0 and -inf where no rank has a key (with a sink: 0 and the sink).

    Raises:
        ConfigError: no ranks, or lists of different lengths.
    """
    merged, lse = merge_states(outs, lses)
    if sinks is not None:
        merged, lse = apply_sinks(merged, lse, sinks)
    if out is None:
        return merged, lse
    out.copy_(merged)
    return out, lse
