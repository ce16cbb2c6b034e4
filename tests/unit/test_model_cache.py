"""Models are made once, whole or not at all, whoever is killed and however many start at once."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import model_cache
from engine.errors import ConfigError
from engine.model_cache import cache_root, cached_model, make_once
from engine.model_source import convert_file
from tests.gguf_builder import tiny_llama, write_model

DEADLINE = 60.0


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def left_over(cache):
    return sorted(path.name for path in (cache / "models").glob("*") if not path.name.endswith(".lock"))


def write_one(directory):
    (directory / "file").write_text("whole")


def test_a_model_is_made_once(cache):
    calls = []

    def make(directory):
        calls.append(directory)
        write_one(directory)

    assert cached_model("m") is None
    path = make_once("m", make)
    assert path == cached_model("m") == cache / "models" / "m"
    assert make_once("m", make) == path
    assert len(calls) == 1
    assert left_over(cache) == ["m"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_make_leaves_nothing(cache, error):
    def make(directory):
        write_one(directory)
        raise error

    with pytest.raises(error):
        make_once("m", make)
    assert left_over(cache) == []
    make_once("m", write_one)
    assert left_over(cache) == ["m"]


def test_an_unwritable_cache_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ConfigError, match="PDSERVE_CACHE"):
        make_once("m", write_one)


def test_a_full_disk_is_a_config_error(cache):
    def make(directory):
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="No space left"):
        make_once("m", make)
    assert left_over(cache) == []


class Holder:
    """A thread in the middle of making `name`, until `finish`."""

    def __init__(self, name):
        self._inside, self._go_on = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=make_once, args=(name, self._make))
        self._thread.start()
        assert self._inside.wait(DEADLINE)

    def _make(self, directory):
        write_one(directory)
        self._inside.set()
        assert self._go_on.wait(DEADLINE)

    def finish(self):
        self._go_on.set()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


def test_the_second_waits_and_finds_it_ready(cache, monkeypatch):
    holder = Holder("m")
    messages = []

    def finish_once_told(text):
        messages.append(text)
        holder.finish()

    monkeypatch.setattr(model_cache, "say", finish_once_told)
    path = make_once("m", lambda directory: pytest.fail("made twice"))
    assert (path / "file").read_text() == "whole"
    assert len(messages) == 1
    assert "another process" in messages[0]


def test_a_stalled_holder_is_given_up_by_name(cache):
    holder = Holder("m")
    try:
        with pytest.raises(ConfigError, match="m and made no progress"):
            make_once("m", write_one, stall_seconds=0)
    finally:
        holder.finish()
    assert left_over(cache) == ["m"]


def test_progress_of_the_holder_puts_the_deadline_off(cache, monkeypatch):
    holder = Holder("m")
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += 100
        if now <= 1000:
            with open(cache / "models" / ".m.partial" / "file", "a") as file:
                file.write("more")

    monkeypatch.setattr(model_cache, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    try:
        with pytest.raises(ConfigError, match="no progress for 250 s"):
            make_once("m", write_one, stall_seconds=250)
    finally:
        holder.finish()
    assert 1250 <= now <= 1400


KILLED_CHILD = """
import os, signal, sys
from pathlib import Path
from engine import gguf_checkpoint, model_cache
from engine.model_source import convert_file

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def then_die(function):
    def call(*args, **kwargs):
        function(*args, **kwargs)
        die()
    return call

point = sys.argv[2]
if point == "tokenizer written":
    gguf_checkpoint._write_weights = die
elif point == "weights half written":
    undo_permutation = gguf_checkpoint._undo_permutation
    def die_at_the_norm(name, *args):
        return die() if name == "model.norm.weight" else undo_permutation(name, *args)
    gguf_checkpoint._undo_permutation = die_at_the_norm
elif point == "weights written":
    gguf_checkpoint._write_weights = then_die(gguf_checkpoint._write_weights)
elif point == "before the rename":
    model_cache.os.rename = die
elif point == "after the rename":
    model_cache.os.rename = then_die(model_cache.os.rename)
convert_file(Path(sys.argv[1]))
"""


def run_child(script, *arguments):
    return subprocess.run([sys.executable, "-c", script, *arguments], timeout=DEADLINE, capture_output=True, text=True)


@pytest.mark.parametrize(
    "point",
    ["tokenizer written", "weights half written", "weights written", "before the rename", "after the rename"],
)
def test_a_kill_at_any_point_leaves_no_half_model(cache, tmp_path, point):
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    child = run_child(KILLED_CHILD, str(source), point)
    assert child.returncode == -signal.SIGKILL, child.stderr
    finished = [name for name in left_over(cache) if not name.startswith(".")]
    assert len(finished) == (point == "after the rename")
    path = convert_file(source)
    assert left_over(cache) == [path.name]
    assert sorted(os.listdir(path)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


CONVERTING_CHILD = """
import sys
from pathlib import Path
from engine import gguf_checkpoint
from engine.model_source import convert_file

write_weights = gguf_checkpoint._write_weights

def announced(*args):
    print("making", flush=True)
    sys.stdin.readline()
    write_weights(*args)

gguf_checkpoint._write_weights = announced
print(convert_file(Path(sys.argv[1])), flush=True)
"""


def start_child(source: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERTING_CHILD, str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_make_one_model(cache, tmp_path):
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    first = start_child(source)
    assert first.stdout.readline() == "making\n"
    second = start_child(source)
    try:
        assert "another process is making it" in second.stderr.readline()
        out, _ = first.communicate("\n", timeout=DEADLINE)
        waited, _ = second.communicate("", timeout=DEADLINE)
    finally:
        for child in (first, second):
            child.kill()
            child.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert waited == out
    assert left_over(cache) == [Path(out.strip()).name]


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {"PDSERVE_CACHE": "/some/where"}, "/some/where"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/pdserve"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/pdserve"),
        ("linux", {}, "/home/me/.cache/pdserve"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "/home/me/Library/Caches/pdserve"),
    ],
)
def test_where_the_cache_is(monkeypatch, platform, environment, expected):
    monkeypatch.setattr(sys, "platform", platform)
    for name in ("PDSERVE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)
