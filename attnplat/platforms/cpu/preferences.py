"""What the CPU platform prefers, and why: taste."""

from __future__ import annotations

from attnplat.backends.portable.catalog import INDEXER, MHA, MLA, MLA_PREFILL, SPARSE_MLA
from attnplat.backends.portable.predicates import is_vision
from attnplat.platforms.cpu.catalog import AMX, VECTORS
from attnplat.platforms.selection import ByName, Preference

PREFERENCES: tuple[Preference, ...] = (
    Preference(
        serves=MHA,
        when=is_vision,
        order=("TORCH_SDPA", "REFERENCE"),
        because="torch's own kernel is as fast as any where there are no pages to read",
    ),
    Preference(
        serves=MHA,
        on={"traits": VECTORS},
        order=("CPU_ATTN", "TORCH_SDPA", "REFERENCE"),
        because="CPU_ATTN reads pages in place, which saves the copy that torch's kernel needs",
    ),
    Preference(
        serves=MHA,
        order=("TORCH_SDPA", "REFERENCE"),
        because="without vector instructions of its own, torch's kernel is the fastest there is",
    ),
    Preference(
        serves=MLA,
        on={"traits": AMX},
        order=("AMX_MLA", "CPU_MLA", "TORCH_SDPA", "REFERENCE"),
        because="AMX_MLA multiplies all heads with a latent row at once, at the speed of memory",
    ),
    Preference(
        serves=MLA,
        order=("CPU_MLA", "TORCH_SDPA", "REFERENCE"),
        because="CPU_MLA passes over the latent rows once for all heads",
    ),
    Preference(
        serves=SPARSE_MLA,
        on={"traits": VECTORS},
        order=("CPU_MLA_SPARSE", "TORCH_SDPA", "REFERENCE"),
        because="CPU_MLA_SPARSE reads the chosen rows where they lie, in every latent format",
    ),
    Preference(
        serves=SPARSE_MLA,
        order=("TORCH_SDPA", "REFERENCE"),
        because="gathering the chosen rows is cheap beside scoring all keys",
    ),
    Preference(
        serves=MLA_PREFILL,
        order=("ZEN_CPU", "CPU", "TORCH_SDPA", "REFERENCE"),
        because="AMD's own kernels lead on its processors; then the C++ kernels",
        never_first={"TORCH_SDPA": "CPU takes what it takes"},
    ),
    Preference(
        serves=INDEXER,
        on={"traits": VECTORS},
        order=("CPU_INDEXER", "REFERENCE"),
        because="CPU_INDEXER reads every format in place, and keeps the best keys alone",
        never_first={"REFERENCE": "CPU_INDEXER takes what it takes"},
    ),
    Preference(
        serves=INDEXER,
        order=("REFERENCE",),
        because="without vector instructions there is no faster scorer",
    ),
)

BY_NAME: tuple[ByName, ...] = (
    ByName(
        "IPEX", "its project is closed, and nothing of it is measured to be faster than CPU_ATTN"
    ),
    ByName("ZENTORCH", "it has no cache, and its advantage over torch's kernel is not measured"),
)

LAST_RESORT_AUTOMATIC = True
