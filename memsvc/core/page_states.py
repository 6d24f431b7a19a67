"""The states of a page; it is in exactly one of them."""

from typing import Final

FREE: Final = 0
PRIVATE: Final = 1
"""Held by one open request, which may write it."""
TREE: Final = 2
PINNED: Final = 3
LIMBO: Final = 4
"""Given up, and a step in flight may still touch it."""
QUARANTINE: Final = 5
"""Given up by a client that was fenced, whose process may still touch it."""
STATE_NAMES: Final = ("free", "private", "tree", "pinned", "limbo", "quarantine")
