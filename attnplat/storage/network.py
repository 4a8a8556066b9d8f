"""The network, refused by name where the user has said so."""

from __future__ import annotations

from attnplat.config.env import Environment
from attnplat.errors import OfflineError


def refuse_network(environment: Environment, what: str, instead: str) -> None:
    """Call before anything is fetched: an error where ATTNPLAT_OFFLINE is set.

    Args:
        what: what would be fetched, and from where: "the model x from the Hugging Face hub".
        instead: what the user can do without the network.

    Raises OfflineError.
    """
    if environment.offline:
        raise OfflineError(f"{what} would need the network, and ATTNPLAT_OFFLINE is set; {instead}")
