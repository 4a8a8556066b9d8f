"""A plugin for attnplat: one backend for layers with a sliding window, in plain torch."""

ATTNPLAT_CONTRACT = 1
"""The contract with attnplat that this package was written for."""
