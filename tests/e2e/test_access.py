"""A whole ring behind HTTPS and an API key: one command, nothing of the key where others can see it."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from tests.e2e.processes import UpRing, running_up, wait_until

KEY = "sk-e2e-secret"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ring(tiny_llama: Path, authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRing]:
    directory = tmp_path_factory.mktemp("access")
    leaf = authority.issue_cert("127.0.0.1")
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    (directory / "key.pem").write_bytes(leaf.private_key_pem.bytes())
    (directory / "keys").write_text("sk-from-file\n")
    flags = [
        *("--model", str(tiny_llama), "--num-blocks", "256", "--block-size", "4"),
        *("--ssl-certfile", str(directory / "cert.pem"), "--ssl-keyfile", str(directory / "key.pem")),
        *("--api-key", KEY, "--api-key-file", str(directory / "keys")),
    ]
    with running_up(directory, *flags) as ring:
        yield ring


@pytest.fixture
def client(ring: UpRing, authority: trustme.CA) -> Iterator[httpx.Client]:
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    with httpx.Client(base_url=ring.url, verify=trusting) as client:
        yield client


def test_a_key_opens_and_the_trace_reaches_both_nodes(ring: UpRing, client: httpx.Client) -> None:
    assert ring.url.startswith("https://")
    body = {"prompt": list(range(3, 60)), "max_tokens": 4}
    assert client.get("/health").status_code == 200
    assert client.post("/v1/completions", json=body).status_code == 401
    for key in (KEY, "sk-from-file"):
        headers = {"authorization": f"Bearer {key}", "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
        reply = client.post("/v1/completions", json={**body, "cache_salt": key}, headers=headers)
        assert reply.status_code == 200, reply.text
        assert TRACE_ID in reply.headers["traceparent"]
    for name in ("prefill-0", "decode-0"):
        wait_until(
            lambda name=name: any(name in line and TRACE_ID in line for line in list(ring.command.lines)),
            f"the trace in the log of {name}: {ring.command.output}",
        )
    ring.wait_until_quiescent()


def test_the_key_is_in_no_argv_and_no_log_and_only_the_server_has_it(ring: UpRing) -> None:
    for process in ring.processes:
        child = psutil.Process(process["pid"])
        assert KEY not in " ".join(child.cmdline())
        assert (KEY in child.environ().get("PDSERVE_API_KEY", "")) is (process["role"] == "server")
    assert KEY not in ring.command.output
    assert "sk-from-file" not in ring.command.output
