"""A model's config.json, or a known shape's name, as the layer configs it asks for.

Plain dicts in, values out; neither torch nor transformers is imported, nothing is fetched.

    >>> from attnplat.models import layer_groups, load_config
    >>> for group in layer_groups(load_config("gemma-2-9b")):
    ...     print(group.label, group.count, group.config.sliding_window)
    decoder sliding_attention 21 (4095, -1)
    decoder full_attention 21 (-1, -1)
"""

from attnplat.models.facts import run_facts
from attnplat.models.families import known_types
from attnplat.models.groups import LayerGroup, layer_groups
from attnplat.models.load import known_shapes, load_config

__all__ = [
    "LayerGroup",
    "known_shapes",
    "known_types",
    "layer_groups",
    "load_config",
    "run_facts",
]
