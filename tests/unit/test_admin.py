import socket

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from connector.admin import AdminEndpoint, AdminView
from engine.errors import ConfigError


@pytest.fixture
def reasons() -> list[str]:
    return ["loading the model"]


def make_endpoint(reasons: list[str], *, debug: bool = True, port: int = 0) -> AdminEndpoint:
    registry = CollectorRegistry()
    Counter("pdserve_things", "Things", registry=registry).inc(3)
    view = AdminView(
        not_ready_reason=lambda: reasons[-1],
        registry=registry,
        debug_state=(lambda: {"blocks": 7}) if debug else None,
    )
    return AdminEndpoint("127.0.0.1", port, view)


def test_it_tells_health_readiness_metrics_and_state(reasons: list[str]):
    endpoint = make_endpoint(reasons)
    with httpx.Client(base_url=endpoint.url) as client:
        assert (client.get("/health").status_code, client.get("/health").content) == (200, b"")
        assert (client.get("/ready").status_code, client.get("/ready").json()["reason"]) == (503, "loading the model")
        reasons.append("")
        assert client.get("/ready").status_code == 200
        assert [client.head(path).status_code for path in ("/health", "/ready")] == [200, 200]
        assert "pdserve_things_total 3.0" in client.get("/metrics").text
        assert client.get("/debug/state").json() == {"blocks": 7}
    endpoint.close()


def test_state_is_off_unless_asked_for(reasons: list[str]):
    endpoint = make_endpoint(reasons, debug=False)
    assert httpx.get(f"{endpoint.url}/debug/state").status_code == 404
    endpoint.close()


def test_a_taken_port_is_named(reasons: list[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--admin-port: cannot listen on 127.0.0.1:{port}"):
            make_endpoint(reasons, port=port)
