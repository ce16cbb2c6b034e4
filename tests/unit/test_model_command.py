"""`pdserve model`: what is printed where, and the exit codes."""

import pytest

from deploy import model_command
from deploy.model_command import main
from engine.model_source import BUILTIN_MODELS
from tests.gguf_builder import tiny_llama, write_model


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fetched(cache):
    directory = cache / "models" / BUILTIN_MODELS["smollm2-135m"].cache_name
    directory.mkdir(parents=True)
    return directory


def test_list_says_what_is_there(capsys):
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m\tnot fetched\t")


def test_list_shows_where(fetched, capsys):
    assert main(["list"]) == 0
    assert f"smollm2-135m\t{fetched}\t" in capsys.readouterr().out


def test_path_prints_only_the_path(fetched, capsys):
    assert main(["path", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == f"{fetched}\n"


@pytest.mark.parametrize("name", ["smollm2-135m", "nothing"])
def test_path_of_what_is_not_there_is_one_line_and_code_2(name, capsys):
    assert main(["path", name]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert name in output.err


def test_fetch_prints_the_directory_on_stdout_and_the_rest_on_stderr(tmp_path, cache, capsys):
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    assert main(["fetch", str(source)]) == 0
    output = capsys.readouterr()
    assert output.out.startswith(str(cache))
    assert output.out.count("\n") == 1
    assert "converting m.gguf" in output.err


def test_fetch_of_an_unknown_model_is_one_line_and_code_2(capsys):
    assert main(["fetch", "nothing"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("pdserve model: --model: nothing is neither built in")
    assert output.err.count("\n") == 1


def test_fetch_shows_a_bar_on_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("engine.progress.on_terminal", lambda: True)
    source = write_model(tmp_path / "m.gguf", tiny_llama())
    assert main(["fetch", str(source)]) == 0
    assert "converting m.gguf" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "code"), [(["--help"], 0), (["steal"], 2), ([], 2), (["fetch"], 2)])
def test_arguments_are_checked(argv, code, capsys):
    assert main(argv) == code
    assert "Traceback" not in capsys.readouterr().err


def test_every_command_has_a_help_text():
    for command in (model_command.Fetch, model_command.List, model_command.Path):
        assert command.__doc__
