"""Base URLs of replicas: what is understood and what is refused."""

import pytest

from weir.engines.http_exchange import Origin, parse_origin
from weir.errors import EngineError


@pytest.mark.parametrize(
    ("url", "origin", "authority"),
    [
        ("http://127.0.0.1:8000", Origin("127.0.0.1", 8000, False, ""), "127.0.0.1:8000"),
        ("http://engine/v1/", Origin("engine", 80, False, ""), "engine"),
        ("https://engine/v1", Origin("engine", 443, True, ""), "engine"),
        ("https://engine:8443/openai/v1", Origin("engine", 8443, True, "/openai"), "engine:8443"),
        ("http://[::1]:80/a/", Origin("::1", 80, False, "/a"), "[::1]"),
    ],
)
def test_base_urls(url: str, origin: Origin, authority: str) -> None:
    """A base URL may end in /v1 and may have a path before it."""
    assert parse_origin(url) == origin
    assert origin.authority == authority


@pytest.mark.parametrize("url", ["", "engine:80", "ftp://engine", "http://", "http://engine:port", "http://[::1"])
def test_what_is_no_url(url: str) -> None:
    """What cannot be called is refused by name."""
    with pytest.raises(EngineError):
        parse_origin(url)


@pytest.mark.parametrize(
    "url",
    ["http://me:zebra@engine", "http://zebra@engine", "http://e/v1?k=zebra", "http://e/?", "http://e#zebra", "http://e/a b"],
)
def test_what_is_more_than_a_base_url(url: str) -> None:
    """What would be dropped or break a request line is refused, and not repeated: it may be a secret."""
    with pytest.raises(EngineError, match="a host, a port and a path") as refused:
        parse_origin(url)
    assert "zebra" not in refused.value.detail
