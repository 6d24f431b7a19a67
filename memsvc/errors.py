"""What the client raises. All of it derives from MemoryServiceError."""


class MemoryServiceError(Exception):
    """The service refused a request as the caller's mistake; the text is its reason. Nothing was changed."""


class ServiceDown(MemoryServiceError):
    """No answer within the limit. The numbering is lost with it: register again before anything else."""


class FencedError(MemoryServiceError):
    """The epoch is over. Stop touching pages, then register again; no request of the old epoch is open."""
