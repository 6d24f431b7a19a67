"""Messages and errors in a form for the log: sizes, ids and codes, and nothing that a user wrote."""

import traceback
from pathlib import Path

import msgspec

MAX_CHARS = 4000

_PLAIN_TEXTS = ("engine", "role", "kind", "reason")
"""Fields whose text is a name or a code of ours."""
_PLAIN_ERRORS = (AssertionError, OSError, MemoryError, RuntimeError)
"""Their texts come from us, torch or the system. A KeyError or a ValueError quotes what it was given."""


def outline(value: object, field: str = "") -> str:
    """value without its contents: bytes (packed tokens among them) and texts by their length, numbers as they are."""
    match value:
        case bytes():
            return f"<{len(value)} bytes>"
        case str() if field not in _PLAIN_TEXTS:
            return f"<{len(value)} chars>"
        case list() | tuple():
            return f"[{', '.join(outline(item) for item in value)}]"
        case dict():
            return f"<{len(value)} entries>"
        case msgspec.Struct():
            fields = [f"{name}={outline(getattr(value, name), name)}" for name in value.__struct_fields__]
            return f"{type(value).__name__}({', '.join(fields)})"
        case _:
            return repr(value)


def trace(error: BaseException) -> str:
    """Kind of an error and the places it came through, the innermost last; its text only if that quotes nobody."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames)
    text = f": {error}" if isinstance(error, _PLAIN_ERRORS) else ""
    return f"{type(error).__name__}{text} at {places or 'an unknown place'}"
