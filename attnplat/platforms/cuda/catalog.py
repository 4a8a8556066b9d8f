"""What the CUDA platform knows of each backend: facts."""

from __future__ import annotations

from attnplat.backends.backend import Backend
from attnplat.backends.portable.catalog import PORTABLE, PORTABLE_GPU
from attnplat.platforms.cuda.latent import LATENT
from attnplat.platforms.cuda.multi_head import MULTI_HEAD
from attnplat.platforms.cuda.sparse import SPARSE

CATALOG: tuple[Backend, ...] = (*MULTI_HEAD, *LATENT, *SPARSE, *PORTABLE_GPU, *PORTABLE)
