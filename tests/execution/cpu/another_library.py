"""A pytest plugin: the C++ kernels come from the folder that ATTNPLAT_TESTED_LIBRARY names."""

from __future__ import annotations

import os

from attnplat.platforms.cpu import kernels

kernels.__path__.insert(0, os.environ["ATTNPLAT_TESTED_LIBRARY"])
