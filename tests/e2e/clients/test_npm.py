"""The npm package `openai`: npm/openai.test.mjs, under node's own test runner."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.clients.conftest import API_KEY, MODEL
from tests.e2e.processes import UpRing

PROJECT = Path(__file__).parent / "npm"
MIN_NODE = 20


@pytest.fixture(scope="module")
def node() -> str:
    """Missing, it is a failure: a suite that skips itself says nothing."""
    path = shutil.which("node") or pytest.fail(f"node {MIN_NODE} or newer is needed")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=10).stdout
    assert int(version.removeprefix("v").partition(".")[0]) >= MIN_NODE, version
    assert (PROJECT / "node_modules/openai").is_dir(), "`make test` installs it with `npm ci`"
    return path


def test_the_npm_package(ring: UpRing, node: str):
    settings = {"PDSERVE_URL": ring.url, "PDSERVE_MODEL": MODEL, "PDSERVE_API_KEY": API_KEY}
    run = subprocess.run(
        [node, "--test", "--test-reporter=tap", str(PROJECT / "openai.test.mjs")],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert {"# pass 10", "# skipped 0"} <= set(run.stdout.splitlines()), run.stdout
