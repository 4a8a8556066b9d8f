"""The kernels under one name for all operations, as the conformance suite wants to ask them."""

from __future__ import annotations

from attnplat.config.names import Operation
from attnplat.platforms.cpu.impls.sparse import LatentRowsImpl


class EveryOperation(LatentRowsImpl):
    """CPU_ATTN, CPU_MLA, CPU_MLA_SPARSE and CPU in one."""

    operations = frozenset(
        {Operation.MHA, Operation.MLA, Operation.SPARSE_MLA, Operation.MLA_PREFILL}
    )
