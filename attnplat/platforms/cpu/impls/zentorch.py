"""ZENTORCH: encoder attention by AMD's extension, through the operator it registers with torch.

The operator is no public interface: it is known in one version beside one minor of torch, and
no other is called. It takes dense tensors of equal heads, so that each request is copied; without
AVX-512 its own reference code runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

import torch

from attnplat.backends.batch import Batch, HostLengths, PageTable
from attnplat.backends.formats.encodings import Encoding
from attnplat.backends.interface import AttentionImpl
from attnplat.backends.plan import Call, Plan, Schedule
from attnplat.backends.workspace import Workspace
from attnplat.config.layer import LayerConfig
from attnplat.config.names import AttnType, Operation
from attnplat.errors import ConfigError, PackageError
from attnplat.platforms.cpu.impls.features import (
    ZENTORCH_FEATURES,
    ZENTORCH_TORCH,
    ZENTORCH_VERSION,
)
from attnplat.platforms.cpu.impls.opening import require_cpu

OPERATOR = (
    "zentorch::zentorch_sdpa(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None, "
    'str zentorch_op_name="zentorch::zentorch_sdpa") -> (Tensor, Tensor)'
)
"""The one operator that is called, as the known version declares it."""

Run = tuple[int, int, int]
"""First query row, first row of k and v, and how many there are of both."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ZentorchSchedule(Schedule):
    """Requests of equal length run together: their numbers of rows, and where each begins."""

    runs: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


class ZentorchImpl(AttentionImpl):
    """Attention of whole sequences over themselves, without a cache."""

    name = "ZENTORCH"
    operations = frozenset({Operation.MHA})
    features = ZENTORCH_FEATURES
    encodings: ClassVar[frozenset[Encoding]] = frozenset(
        {Encoding.FLOAT32, Encoding.BFLOAT16, Encoding.FLOAT16}
    )
    needs_host_lengths = True

    def __init__(
        self, config: LayerConfig, device: torch.device | str, encoding: Encoding | str | None
    ) -> None:
        super().__init__(config, device, encoding)
        require_cpu(self.name, self.device)
        kind = getattr(config, "attn_type", None)
        if kind not in (AttnType.ENCODER, AttnType.ENCODER_ONLY) or self.form.mask.causal:
            raise ConfigError(
                f"{self.name} runs encoders without a causal mask; the layer is {kind}"
                f"{', causal' if self.form.mask.causal else ''}"
            )
        self._operator = load_operator()

    def _schedule(
        self,
        batch: Batch,
        pages: PageTable | None,
        lengths: HostLengths | None,
        workspace: Workspace | None,
    ) -> ZentorchSchedule:
        assert lengths is not None
        by_length: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        starts = batch.kv_starts(lengths)
        for r, seq_len in enumerate(lengths.seq_lens):
            rows = lengths.query_len(r)
            if rows == 0:
                continue
            if rows != seq_len:
                raise ConfigError(
                    f"request {r} has {rows} queries and {seq_len} keys; {self.name} runs whole "
                    "sequences over themselves"
                )
            by_length[rows].append((lengths.query_start[r], starts[r]))
        return ZentorchSchedule(runs=tuple((n, tuple(at)) for n, at in by_length.items()))

    def _attend(self, plan: Plan, call: Call) -> None:
        assert isinstance(plan.schedule, ZentorchSchedule)
        assert call.k is not None and call.v is not None
        for rows, starts in plan.schedule.runs:
            q = self._stack(call.q, rows, [first for first, _ in starts])
            k, v = (self._stack(x, rows, [kv for _, kv in starts]) for x in (call.k, call.v))
            out, lse = self._operator(q, k, v, 0.0, False, scale=self.form.scale)
            self._check_results(out, lse, q)
            for n, (first, _) in enumerate(starts):
                call.out[first : first + rows] = out[n].transpose(0, 1)
                if call.lse is not None:
                    call.lse[first : first + rows] = lse[n].T

    def _stack(self, tensor: torch.Tensor, rows: int, starts: list[int]) -> torch.Tensor:
        """[requests, num_heads, rows, size], heads of keys repeated for those of their group."""
        parts = [tensor[first : first + rows].transpose(0, 1) for first in starts]
        stacked = torch.stack(parts)
        groups = self.form.num_heads // stacked.shape[1]
        return stacked.repeat_interleave(groups, dim=1) if groups > 1 else stacked

    def _check_results(self, out: torch.Tensor, lse: torch.Tensor, q: torch.Tensor) -> None:
        """An operator of another build could return anything of any shape."""
        fits = out.shape == q.shape and out.dtype == q.dtype
        if not fits or lse.shape != q.shape[:3] or lse.dtype != torch.float32:
            raise PackageError(
                f"zentorch returned {list(out.shape)} {out.dtype} and {list(lse.shape)} "
                f"{lse.dtype} for queries {list(q.shape)} {q.dtype}; it is not the build that "
                f"{self.name} was written for (zentorch {ZENTORCH_VERSION})"
            )


def load_operator() -> Callable[..., Any]:
    """zentorch's operator; imports the package, which takes seconds.

    Raises PackageError for another version of it or of torch, and for another operator.
    """
    try:
        found = version("zentorch")
    except PackageNotFoundError as error:
        raise PackageError("ZENTORCH needs the package zentorch, which is not installed") from error
    beside = torch.__version__.partition("+")[0]
    if found != ZENTORCH_VERSION or not beside.startswith(f"{ZENTORCH_TORCH}."):
        raise PackageError(
            f"ZENTORCH runs zentorch {ZENTORCH_VERSION} beside torch {ZENTORCH_TORCH}; installed "
            f"are zentorch {found} and torch {torch.__version__}"
        )
    try:
        __import__("zentorch")
        declared = str(torch._C._get_schema("zentorch::zentorch_sdpa", ""))
    except (ImportError, OSError, RuntimeError) as error:
        raise PackageError(f"zentorch {found} cannot be used: {error}") from error
    if declared != OPERATOR:
        raise PackageError(f"zentorch's operator is {declared}; ZENTORCH calls {OPERATOR}")
    operator: Callable[..., Any] = torch.ops.zentorch.zentorch_sdpa.default
    return operator
