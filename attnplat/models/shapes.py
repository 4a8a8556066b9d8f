from __future__ import annotations

SHAPES: dict[str, dict[str, object]] = {}
