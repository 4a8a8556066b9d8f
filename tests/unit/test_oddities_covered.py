"""Every numbered oddity of the recorded engine's selection has a test of the right outcome."""

from __future__ import annotations

import re
from pathlib import Path

ODDITIES = frozenset(range(1, 29))


def test_each_of_the_28_oddities_has_a_test():
    found = set()
    for path in Path(__file__).parent.glob("test_oddities_*.py"):
        names = re.findall(r"^def test_(?:oddity_)?0*(\d+)_", path.read_text(), re.MULTILINE)
        found |= set(map(int, names))
    assert found == ODDITIES
