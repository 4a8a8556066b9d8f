"""attnplat's own files: where they go, how they are locked, kept whole and cleaned up.

    >>> store = Store(cache_folder(read_env()), "probes")
    >>> version = store.read_or_make(key_of("amd-aiter", "0.1.7"), probe)

Entries are caches: each can be made again, is checked at every use, and replaced as a whole.
A folder that cannot be written is told of once, and then done without.
"""

from __future__ import annotations

from attnplat.storage.folder import FolderState, cache_folder, check_folder, tell_unkept
from attnplat.storage.kinds import KINDS, Kind
from attnplat.storage.locks import Owner, locked
from attnplat.storage.network import refuse_network
from attnplat.storage.store import Entry, Store, file_digest, key_of

__all__ = [
    "KINDS",
    "Entry",
    "FolderState",
    "Kind",
    "Owner",
    "Store",
    "cache_folder",
    "check_folder",
    "file_digest",
    "key_of",
    "locked",
    "refuse_network",
    "tell_unkept",
]
