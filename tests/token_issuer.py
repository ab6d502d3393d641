"""An identity provider for tests: it makes tokens of every kind, right and wrong, and publishes its keys, over HTTP or not.

Nothing in it uses the code that is tested: tokens are put together byte by byte, and a test says what they are signed with.
"""

import base64
import hmac
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

from joserfc.jwk import ECKey, OKPKey, RSAKey
from joserfc.jws import JWSRegistry

from weir import errors

DISCOVERY = "/.well-known/openid-configuration"
AUDIENCE = "weir"
NOW_MS = 1_800_000_000_000
Key: TypeAlias = RSAKey | ECKey | OKPKey
PRIVATE_KEYS: dict[str, Key] = {
    "RS256": RSAKey.generate_key(2_048),
    "ES256": ECKey.generate_key("P-256"),
    "ES384": ECKey.generate_key("P-384"),
    "Ed25519": OKPKey.generate_key("Ed25519"),
}
"""One of each kind for a whole run: an RSA key takes half a second to make."""


def encoded(content: bytes) -> str:
    """base64url without padding."""
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


def signed_with_secret(header: Mapping[str, Any], claims: Mapping[str, Any], secret: bytes) -> str:
    """A token with an HMAC, whose secret may be anybody's public key."""
    content = ".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    return f"{content}.{encoded(hmac.digest(secret, content.encode(), 'sha256'))}"


def put_together(header: Mapping[str, Any] | bytes, claims: Mapping[str, Any] | bytes, key: Key | None, algorithm: str) -> str:
    """A token of any parts. key: None for an empty signature. algorithm: what is signed with, whatever the header says."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]
    content = ".".join(map(encoded, parts))
    if key is None:
        return f"{content}."
    return f"{content}.{encoded(JWSRegistry(algorithms=[algorithm]).get_alg(algorithm).sign(content.encode(), key))}"


def public(key: Key, **members: Any) -> dict[str, Any]:
    """A key's public half as a member of a set."""
    return {**key.as_dict(private=False), **members}


class TokenIssuer:
    """In memory. keys: what it publishes, by key id. It signs with the key `signing`. asked: how often for which path."""

    def __init__(self, url: str = "http://127.0.0.1:1/realm", now_ms: int = NOW_MS) -> None:
        self.url = url
        self.now_ms = now_ms
        self.keys: dict[str, dict[str, Any]] = {}
        self.signing = ""
        self.is_away = False
        self.asked: Counter[str] = Counter()
        self.others: dict[str, bytes] = {}
        self.sign_with("first", PRIVATE_KEYS["RS256"], "RS256")

    def sign_with(self, key_id: str, key: Key, algorithm: str) -> None:
        """Publish another key, and sign with it from now on; those before stay published."""
        self.keys[key_id] = public(key, kid=key_id, alg=algorithm, use="sig")
        self.signing, self._key, self._algorithm = key_id, key, algorithm

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Good claims with changes; None leaves one out."""
        now_s = self.now_ms // 1_000
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "robot", "iat": now_s, "exp": now_s + 300}
        return {name: value for name, value in {**usual, **changes}.items() if value is not None}

    def token(self, header: Mapping[str, Any] | None = None, **changes: Any) -> str:
        """A token signed with the present key. header: in place of its members; None leaves one out."""
        usual = {"alg": self._algorithm, "kid": self.signing, "typ": "JWT"}
        kept = {name: value for name, value in {**usual, **(header or {})}.items() if value is not None}
        return put_together(kept, self.claims(**changes), self._key, self._algorithm)

    def key_set(self) -> bytes:
        """Its keys as it publishes them."""
        return json.dumps({"keys": [*self.keys.values()]}).encode()

    def document(self, url: str) -> bytes | None:
        """What it answers at a URL; None for nothing."""
        path = url.removeprefix(self.url)
        self.asked[path] += 1
        if self.is_away:
            return None
        discovery = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        return {"/keys": self.key_set(), DISCOVERY: json.dumps(discovery).encode(), **self.others}.get(path)


class MemoryDocuments:
    """A `FetchDocument` on issuers in memory. late: it does not answer in time."""

    def __init__(self, *issuers: TokenIssuer) -> None:
        self._issuers = issuers
        self.late = False

    async def __call__(self, url: str, *, wait_ms: int, bytes_max: int) -> bytes:
        """As the port says."""
        found = next((issuer.document(url) for issuer in self._issuers if url.startswith(issuer.url)), None)
        if self.late:
            raise errors.IssuerUnavailable("It did not answer in time.")
        if found is None:
            raise errors.IssuerUnavailable("It answered 404.")
        if len(found) > bytes_max:
            raise errors.IssuerUnavailable("Its answer is too large, or not HTTP.")
        return found


@contextmanager
def served(issuer: TokenIssuer, moved: Sequence[str] = (), hanging: Sequence[str] = ()) -> Iterator[TokenIssuer]:
    """The issuer over HTTP on a free port of this host; its URL becomes that. moved, hanging: paths that redirect, or hang."""
    over = threading.Event()

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in hanging:
                over.wait(20)
            if self.path in moved:
                self.send_response(302)
                self.send_header("location", f"{issuer.url}/keys")
                self.send_header("content-length", "0")
                self.end_headers()
                return
            found = issuer.document(f"http://{self.headers['host']}{self.path}")
            self.send_response(404 if found is None else 200)
            self.send_header("content-length", str(len(found or b"")))
            self.end_headers()
            self.wfile.write(found or b"")

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield issuer
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
