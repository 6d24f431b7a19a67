"""Other sites' pages in a browser on this machine: what they may not do with a server that trusts who reaches it."""

import re
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import Scope

from launch.http.errors import ApiError

_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?")


_OTHER_SITES = ("cross-site", "same-site")


def check_origin(scope: Scope) -> None:
    """Browsers say on whose page a request was made. Another site's page must not drive a server on this machine.

    Every method and route: a GET can be work too. Images and links of a page come without Origin, but browsers tell
    by Sec-Fetch-Site where those are from; same-site is another port or another name of the same domain.
    Raises ApiError 403.
    """
    headers = Headers(scope=scope)
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise ApiError(403, f"requests of pages of {origin[:200]!r} are not served, only those of this server's own")
    if headers.get("sec-fetch-site", "").lower() in _OTHER_SITES:
        raise ApiError(403, "requests of pages of other sites are not served, only those of this server's own")


class HostCheck:
    """Refuses requests under a name that is not this machine's.

    A page can have its own name resolve to 127.0.0.1 (DNS rebinding); the browser then takes this server for the
    page's own and hands over what it answers, but still sends the page's name as Host. Off unless the server listens
    on a loopback address and asks for no key: a page has no key, a proxy in front may pass any name on, and a
    server on a network is reached under names that it does not know.
    """

    def __init__(self, bound_host: str, requires_key: bool) -> None:
        self._bound = bound_host.lower()
        self._is_on = not requires_key and _is_loopback(self._bound)

    def check(self, scope: Scope) -> None:
        """Raises ApiError 403. A request without Host is let through: it comes from no browser."""
        if not self._is_on:
            return
        for host in Headers(scope=scope).getlist("host"):
            name = _name_of(host)
            if name != self._bound and not _is_loopback(name):
                raise ApiError(
                    403,
                    f"Host is {host[:200]!r}: without an API key, a server on {self._bound!r} answers under"
                    " 'localhost' and loopback addresses only",
                )


def _name_of(host: str) -> str:
    """A Host header without its port, and without the brackets of an IPv6 address; empty if it is malformed."""
    parts = _HOST.fullmatch(host.lower())
    return (parts[1] or parts[2]).removesuffix(".") if parts else ""


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False
