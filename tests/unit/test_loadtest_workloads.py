"""What is asked, and when: pure, seeded, and with what prefixes share."""

import json
import statistics
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from loadtest import arrivals
from loadtest.config import LoadConfig, LoadTestConfig, OutputConfig, TargetConfig, WorkloadConfig
from loadtest.conversation import Conversation
from loadtest.errors import SettingError
from loadtest.words import WORDS, TokenRatio
from loadtest.workloads import Plan, make_plan

ONE_TO_ONE = TokenRatio()


def config(load: dict[str, Any] | None = None, **workload: Any) -> LoadTestConfig:
    return LoadTestConfig(load=LoadConfig(**(load or {})), workload=WorkloadConfig(**workload))


def plan(load: dict[str, Any] | None = None, seed: str = "7", ratio: TokenRatio = ONE_TO_ONE, **workload: Any) -> Plan:
    return make_plan(config(load, **workload), seed, ratio)


def asked(made: Plan, most: int = 1000) -> list[Conversation]:
    return list(islice(made.flows[0].conversations, most))


def num_words(text: str) -> int:
    return len(text.split())


def gaps(offsets: Any, number: int = 20_000) -> list[float]:
    return [after - before for before, after in pairwise(islice(offsets, number))]


def test_arrivals_have_the_rate_and_the_spread_asked_for() -> None:
    assert list(islice(arrivals.constant(4), 5)) == [0, 0.25, 0.5, 0.75, 1.0]
    for offsets, variation in (
        (arrivals.poisson(4, Random(1)), 1.0),
        (arrivals.gamma(4, 1.0, Random(2)), 1.0),
        (arrivals.gamma(4, 0.25, Random(3)), 2.0),
        (arrivals.gamma(4, 4.0, Random(4)), 0.5),
    ):
        found = gaps(offsets)
        assert statistics.mean(found) == pytest.approx(0.25, rel=0.05)
        assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(variation, rel=0.05)
    assert list(islice(arrivals.delayed(arrivals.constant(1), 3), 2)) == [3, 4]


def test_the_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) > 500


def test_a_ratio_learnt_from_two_prompts_gives_prompts_of_the_length_asked_for() -> None:
    ratio = TokenRatio.fit((8, 30), (40, 94))
    assert (ratio.tokens_per_word, ratio.overhead) == (2.0, 14.0)
    assert ratio.num_words(114) == 50
    assert ratio.num_words(114, with_overhead=False) == 57
    assert ratio.num_words(3) == 1
    assert TokenRatio.fit((8, 30), (40, 30)) == ONE_TO_ONE


def test_the_same_seed_asks_the_same_and_another_asks_something_else() -> None:
    for workload in ("chat", "long", "interference", "multi-turn"):
        first, again, other = (asked(plan(seed=seed, workload=workload), 4) for seed in ("7", "7", "8"))
        assert first == again
        assert first[0].turns[0].text != other[0].turns[0].text
        assert first[0].turns[0].text != first[1].turns[0].text
    load = {"rate": 5.0}
    offsets = [list(islice(plan(load, seed=seed).flows[0].offsets or (), 9)) for seed in ("7", "7", "8")]
    assert offsets[0] == offsets[1] != offsets[2]


def test_lengths_and_their_spread() -> None:
    (conversation, *_) = asked(plan(workload="chat"))
    (turn,) = conversation.turns
    assert (num_words(turn.text), turn.num_input_tokens, turn.num_output_tokens) == (128, 128, 128)
    assert num_words(asked(plan(workload="long"), 1)[0].turns[0].text) == 2000
    spread = asked(plan(input_tokens=100, output_tokens=10, length_spread=0.5))
    lengths = [num_words(conversation.turns[0].text) for conversation in spread]
    assert 50 <= min(lengths) < 60
    assert 140 < max(lengths) <= 150


def test_how_many() -> None:
    assert len(asked(plan())) == 64
    assert len(asked(plan({"num_requests": 5}))) == 5
    assert len(asked(plan({"duration": 1.0}), 100)) == 100
    assert len(asked(plan({"concurrency": 6}, workload="interference"))) == 6


def test_interference_is_a_closed_loop_of_decodes_and_an_open_one_of_long_prompts_after_the_lead() -> None:
    made = plan({"concurrency": 3, "rate": 0.25}, workload="interference", lead=7.0, long_tokens=50)
    decodes, long_prompts = made.flows
    assert (decodes.concurrency, decodes.offsets, decodes.background) == (3, None, False)
    assert long_prompts.background
    assert list(islice(long_prompts.offsets or (), 3)) == [7, 11, 15]
    conversation = next(long_prompts.conversations)
    assert conversation.kind == "long"
    assert num_words(conversation.turns[0].text) == 50
    assert conversation.turns[0].num_output_tokens == 1


def test_multi_turn_conversations_share_system_prompts() -> None:
    conversations = asked(plan(workload="multi-turn", num_prefixes=3, system_tokens=20, turns=5, think_time=2.0))
    systems = {conversation.system for conversation in conversations}
    assert len(systems) == 3
    assert {num_words(system) for system in systems} == {20}
    assert {len(conversation.turns) for conversation in conversations} == {5}
    assert conversations[0].think_time == 2.0
    texts = [turn.text for conversation in conversations for turn in conversation.turns]
    assert len(set(texts)) == len(texts)
    assert asked(plan(workload="multi-turn", system_tokens=0), 1)[0].system == ""


def write_trace(path: Path, *rows: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return path


def shared_prefix(first: str, second: str) -> int:
    """In words."""
    pairs = zip(first.split(), second.split(), strict=False)
    return next((number for number, (one, two) in enumerate(pairs) if one != two), -1)


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    file = write_trace(
        tmp_path / "trace.jsonl",
        (5000, 1200, 7, [1, 2, 3]),
        (6000, 1100, 8, [1, 2, 4]),
        (9000, 600, 9, [5, 6]),
    )
    made = plan({"speed": 2.0}, workload="trace", file=file)
    first, second, third = (conversation.turns[0] for conversation in asked(made))
    assert list(made.flows[0].offsets or ()) == [0, 0.5, 2.0]
    assert [num_words(turn.text) for turn in (first, second, third)] == [1200, 1100, 600]
    assert [turn.num_output_tokens for turn in (first, second, third)] == [7, 8, 9]
    assert shared_prefix(first.text, second.text) == 1024
    assert shared_prefix(first.text, third.text) == 0


def test_a_scaled_trace_shares_the_same_part(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "t", (0, 1200, 10, [1, 2, 3]), (0, 1200, 10, [1, 2, 4]), (0, 5000, 1, []))
    made = plan(workload="trace", file=file, trace_scale=0.1, max_input_tokens=200)
    first, second = (conversation.turns[0] for conversation in asked(made))
    assert made.num_left_out == 1
    assert num_words(first.text) == 120
    assert first.num_output_tokens == 1
    assert shared_prefix(first.text, second.text) == 2 * 51
    with pytest.raises(SettingError, match="--max-input-tokens"):
        plan(workload="trace", file=file, max_input_tokens=3)


def test_a_trace_may_be_driven_by_a_rate_or_a_concurrency(tmp_path: Path) -> None:
    file = write_trace(tmp_path / "t", (0, 10, 1, [1]), (99000, 10, 1, [1]))
    by_rate = plan({"rate": 2.0, "arrivals": "constant"}, workload="trace", file=file)
    assert list(islice(by_rate.flows[0].offsets or (), 2)) == [0, 0.5]
    assert plan({"concurrency": 3}, workload="trace", file=file).flows[0].concurrency == 3


@pytest.mark.parametrize("line", ["{", "[]", '{"timestamp": 1}', '{"timestamp":0,"input_length":0,"output_length":1}'])
def test_what_is_no_row_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    file = write_trace(tmp_path / "t", (0, 10, 1, [1]))
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(SettingError, match="line 2"):
        plan(workload="trace", file=file)


SHAREGPT = [
    {"conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "a b c"}]},
    {
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "one"},
            {"from": "gpt", "value": "word " * 10},
            {"from": "human", "value": "two"},
            {"from": "gpt", "value": "word " * 20},
            {"from": "human", "value": "no answer"},
        ]
    },
    {"messages": [{"role": "user", "content": "x " * 300}, {"role": "assistant", "content": "y"}]},
    {"messages": [{"role": "assistant", "content": "y"}, {"role": "user", "content": [1]}]},
    "nonsense",
]


@pytest.mark.parametrize("lines", [False, True])
def test_conversations_from_a_file(tmp_path: Path, lines: bool) -> None:
    file = tmp_path / "conversations"
    file.write_text("\n".join(map(json.dumps, SHAREGPT)) if lines else json.dumps(SHAREGPT))
    found = sorted(asked(plan(workload="sharegpt", file=file)), key=lambda conversation: len(conversation.turns))
    assert [len(conversation.turns) for conversation in found] == [1, 2]
    assert found[1].system == "be brief"
    assert [(turn.text, turn.num_output_tokens) for turn in found[1].turns] == [("one", 13), ("two", 26)]
    short = plan(workload="sharegpt", file=file, max_input_tokens=200, turns=1)
    assert [len(conversation.turns) for conversation in asked(short)] == [1]
    assert short.num_left_out == 1


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", json.dumps(SHAREGPT[:1])):
        (tmp_path / "f").write_text(text)
        with pytest.raises(SettingError, match="--file"):
            plan(workload="sharegpt", file=tmp_path / "f")


@pytest.mark.parametrize(
    ("flag", "make"),
    [
        ("--base-url", lambda: TargetConfig(base_url="localhost:8000")),
        ("--body", lambda: TargetConfig(body="[1]")),
        ("--body", lambda: TargetConfig(body="{")),
        ("--timeout", lambda: TargetConfig(timeout=0)),
        ("--rate", lambda: config({"rate": 1.0, "concurrency": 2})),
        ("--rate", lambda: config({"rate": 0.0})),
        ("--arrivals", lambda: config({"arrivals": "constant"})),
        ("--arrivals", lambda: config({"arrivals": "trace"})),
        ("--max-concurrency", lambda: config({"max_concurrency": 2, "concurrency": 2})),
        ("--burstiness", lambda: config({"rate": 1.0, "burstiness": 0.5})),
        ("--concurrency", lambda: config({"concurrency": 0})),
        ("--file", lambda: config(workload="trace")),
        ("--file", lambda: config(workload="chat", file=Path("x"))),
        ("--length-spread", lambda: config(length_spread=1.0)),
        ("--goodput", lambda: OutputConfig(goodput=("itl:5",))),
        ("--goodput", lambda: OutputConfig(goodput=("ttft",))),
        ("--json", lambda: OutputConfig(json=Path("no/such/directory/x.json"))),
        ("--file", lambda: plan(workload="trace", file=Path("no/such/file"))),
    ],
)
def test_a_bad_setting_is_named(flag: str, make: Any) -> None:
    with pytest.raises(SettingError, match=flag):
        make()
