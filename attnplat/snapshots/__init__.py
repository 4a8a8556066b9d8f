"""Pinned decisions: cases in, outcomes out, compared with what was recorded.

A case is one JSON object a line: a device, a package profile, a layer, and optionally the
outcome that someone expects. `attnplat select` reads and writes them.
"""
