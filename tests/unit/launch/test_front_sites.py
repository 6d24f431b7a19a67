"""Which Host a front answers to: a page whose name resolves to this machine must not read what it serves."""

import pytest

from launch.http.errors import ApiError
from launch.http.sites import HostCheck


def passes(host: str, bound: str = "127.0.0.1", *, requires_key: bool = False) -> bool:
    scope = {"type": "http", "headers": [(b"host", host.encode())]}
    try:
        HostCheck(bound, requires_key).check(scope)
    except ApiError as error:
        return (error.status, repr(host) in error.message) != (403, True)
    return True


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:30000", "localhost.:1", "127.0.0.1", "127.0.0.1:30000", "127.9.9.9", "[::1]:30000"]
)
def test_names_of_this_machine_are_answered(host: str):
    assert passes(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:30000", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.7", "[fe80::1]",
        "", ":30000", "localhost@evil.example", "0.0.0.0", "127.1:80", "[::1", "[::1]evil.example", "evil.example:[::1]", "localhost:evil",
    ],
)  # fmt: skip
def test_names_of_others_are_refused(host: str):
    assert not passes(host)


def test_a_second_host_header_is_looked_at_too():
    with pytest.raises(ApiError):
        HostCheck("127.0.0.1", requires_key=False).check(
            {"type": "http", "headers": [(b"host", b"localhost"), (b"host", b"evil.example")]}
        )


def test_a_request_without_host_comes_from_no_browser():
    HostCheck("127.0.0.1", requires_key=False).check({"type": "http", "headers": []})


def test_the_name_that_was_bound_is_answered():
    assert passes("localhost:1", bound="localhost")
    assert passes("127.0.0.5:1", bound="127.0.0.5")
    assert not passes("evil.example", bound="::1")


def test_with_a_key_or_on_a_network_any_name_is_answered():
    assert passes("llm.example", requires_key=True)
    assert passes("llm.example", bound="0.0.0.0")
    assert passes("llm.example", bound="192.168.1.5")
