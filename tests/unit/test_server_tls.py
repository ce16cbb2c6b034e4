"""HTTPS: served with the given files, refused at start with the wrong ones, drained like HTTP."""

import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from engine.errors import ConfigError
from server.http_settings import TlsConfig
from server.tls import tls_context
from tests.server_rig import FakeNode, answers, events_of, running_server, wait_for, write_model_directory


@dataclass(frozen=True)
class Files:
    """An authority, a certificate that it signed for 127.0.0.1, and the key."""

    authority: trustme.CA
    directory: Path

    @property
    def certificate(self) -> Path:
        return self.directory / "cert.pem"

    @property
    def key(self) -> Path:
        return self.directory / "key.pem"

    @property
    def authorities(self) -> Path:
        return self.directory / "ca.pem"

    @property
    def config(self) -> TlsConfig:
        return TlsConfig(ssl_certfile=self.certificate, ssl_keyfile=self.key)

    def client_context(self, identity: str | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        if identity is not None:
            self.authority.issue_cert(identity).configure_cert(context)
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    authority = trustme.CA()
    files = Files(authority, tmp_path_factory.mktemp("tls"))
    leaf = authority.issue_cert("127.0.0.1")
    files.certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    files.key.write_bytes(leaf.private_key_pem.bytes())
    authority.cert_pem.write_to_path(files.authorities)
    return files


@pytest.fixture
def node() -> Iterator[FakeNode]:
    node = FakeNode()
    yield node
    node.close()


def test_answers_and_streams_over_https(files: Files, node: FakeNode, tmp_path: Path) -> None:
    with (
        running_server(write_model_directory(tmp_path), [node.address], tls=files.config) as server,
        httpx.Client(verify=files.client_context(), base_url=server.url) as client,
    ):
        assert server.url.startswith("https://127.0.0.1:")
        server.wait_ready()
        node.script = answers(server.encode("AB"))
        assert client.post("/v1/completions", json={"prompt": "Hi"}).json()["choices"][0]["text"] == "AB"
        stream = client.post("/v1/completions", json={"prompt": "Hi", "stream": True})
        assert "".join(event["choices"][0]["text"] for event in events_of(stream)) == "AB"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health")


def test_a_client_certificate_can_be_required(files: Files, node: FakeNode, tmp_path: Path) -> None:
    config = TlsConfig(ssl_certfile=files.certificate, ssl_keyfile=files.key, ssl_ca_certs=files.authorities)
    with running_server(write_model_directory(tmp_path), [node.address], tls=config) as server:
        url = f"{server.url}/health"
        assert httpx.get(url, verify=files.client_context("client.example.org")).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(url, verify=files.client_context())


@pytest.mark.parametrize("has_tls", [False, True])
def test_a_drain_ends_streams_and_idle_connections(files: Files, node: FakeNode, tmp_path: Path, has_tls: bool) -> None:
    """The rig fails if the server has not ended soon after the block."""
    node.script = lambda node, generate: node.send_output(generate.request_id, [65])
    tls = files.config if has_tls else TlsConfig()
    with (
        httpx.Client(verify=files.client_context()) as idle,
        ThreadPoolExecutor() as pool,
        running_server(write_model_directory(tmp_path), [node.address], tls=tls, shutdown_timeout=0.3) as server,
    ):
        server.wait_ready()
        assert idle.get(f"{server.url}/health").status_code == 200
        body = {"prompt": "Hi", "stream": True}
        stream = pool.submit(idle.post, f"{server.url}/v1/completions", json=body)
        wait_for(lambda: node.generates)
        server.http.stop()
        assert events_of(stream.result(10))[-1]["error"]["code"] == 503
    assert not server.http.server_state.connections


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("missing.pem", "key.pem"), "--ssl-certfile: cannot read"),
        (("cert.pem", "missing.pem"), "--ssl-keyfile: cannot read"),
        (("cert.pem", "other.pem"), "--ssl-keyfile: .*other.pem is not the key of"),
        (("key.pem", "key.pem"), "--ssl-certfile: .* holds no certificate"),
        (("cert.pem", "cert.pem"), "--ssl-keyfile: .* is no unencrypted private key"),
        (("cert.pem", "encrypted.pem"), "--ssl-keyfile: .* is no unencrypted private key"),
        (("cert.pem", "key.pem", "missing.pem"), "--ssl-ca-certs: cannot read"),
        (("cert.pem", "key.pem", "key.pem"), "--ssl-ca-certs: .* holds no certificate"),
    ],
)
def test_wrong_files_are_named_before_anything_starts(files: Files, names: tuple[str, ...], words: str) -> None:
    directory = files.directory
    (directory / "other.pem").write_bytes(files.authority.issue_cert("x.example").private_key_pem.bytes())
    key = load_pem_private_key(files.key.read_bytes(), None)
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    (directory / "encrypted.pem").write_bytes(encrypted)
    fields = dict(zip(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"), (directory / n for n in names), strict=False))
    with pytest.raises(ConfigError, match=words):
        tls_context(TlsConfig(**fields))


@pytest.mark.parametrize(
    "fields", [{"ssl_certfile": Path("c")}, {"ssl_keyfile": Path("k")}, {"ssl_ca_certs": Path("a")}]
)
def test_half_of_the_files_is_refused(fields: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="--ssl-"):
        TlsConfig(**fields)
