"""The caller's mistake, found before anything was changed."""


class RequestError(ValueError):
    """Answered as BadRequest; the text says what to change."""
