"""What each kind of grammar allows, what is refused, and where a grammar ends; by the real library."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from engine.grammar import MAX_GRAMMAR_CHARS, Grammar, GrammarError
from engine.grammar_compiler import GrammarCompiler
from engine.grammar_matcher import GrammarMatcher, leaves_some
from engine.grammar_source import lark_of
from tests.tiny_models import SPECIAL_TOKENS, VOCAB_SIZE, save_tokenizer

EOS, OTHER_EOS = SPECIAL_TOKENS["<|im_end|>"], SPECIAL_TOKENS["<|endoftext|>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler(directory: Path) -> GrammarCompiler:
    return GrammarCompiler(directory, VOCAB_SIZE, [EOS, OTHER_EOS])


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = int.from_bytes(matcher.mask(), "little")
    return {token_id for token_id in range(VOCAB_SIZE) if bits >> token_id & 1}


def follows(compiled: GrammarMatcher, token_ids: list[int]) -> bool:
    """Whether the text is one that the grammar allows from beginning to end."""
    matcher = compiled.copy()
    for token_id in token_ids:
        if token_id not in allowed(matcher):
            return False
        matcher.accept(token_id)
    return bool({EOS, OTHER_EOS} & allowed(matcher))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (schema({"type": "object"}), ["{}", '{"a":1}', '{"a": [1, {"b":null}]}'], ["[]", "1", "{", '{"a"}', "x"]),
        (schema({"enum": ["ä", 3]}), ['"ä"', "3"], ["4", '"a"']),
        (Grammar("regex", "a{2,3}b?"), ["aa", "aaab"], ["a", "aab ", "b", "caab"]),
        (Grammar("choice", '["yes", "no", "n\\"o\\\\"]'), ["yes", "no", 'n"o\\'], ["", "maybe", "yesno"]),
        (
            Grammar("choice", '["日本", "a\\nb", "{}", "/x/", "</s>"]'),
            ["日本", "a\nb", "/x/", "</s>"],
            ["日", "ab", "x"],
        ),
        (Grammar("lark", 'start: "a" start | "b"'), ["b", "aab"], ["a", "ba"]),
        (Grammar("lark", lark_of('root ::= "a" root | [b-c]\n')), ["b", "aac"], ["a", "d"]),
    ],
)
def test_what_each_kind_allows(
    compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    compiled = compiler.compile(grammar)
    for text in good:
        assert follows(compiled, tokenizer.encode(text).ids), text
    for text in bad:
        assert not follows(compiled, tokenizer.encode(text).ids), text


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ('{"a":1,"b":[true,false]}', True),
        ('{"a": 1, "b": [true, false]}', True),
        ('{ "a":1,"b":[]}', False),
        ('{"a":  1,"b":[]}', False),
        ('{"a":1,\n"b":[]}', False),
        ('{"a":1,"b":[]} ', False),
    ],
)
def test_a_schema_leaves_no_room_for_endless_whitespace(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, is_allowed: bool
) -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}}
    wanted = {"type": "object", "properties": properties, "required": ["a", "b"]}
    # Nor does a schema that asks for it itself.
    for options in ({}, {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s*"}}):
        compiled = compiler.compile(schema(wanted | options | {"additionalProperties": False}))
        assert follows(compiled, tokenizer.encode(text).ids) is is_allowed


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"type": "array", "contains": {}}), "contains"),
        (schema({"if": {}, "then": False}), "if"),
        (schema({"dependentRequired": {"a": ["b"]}}), "dependentRequired"),
        (schema({"unevaluatedProperties": False}), "unevaluatedProperties"),
        (schema({"oneOf": [{"type": "string"}, {"const": "a"}], "x-guidance": {"coerce_one_of": True}}), "oneOf"),
        (schema({"type": "string", "format": "color"}), "color"),
        (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (schema({"type": "text"}), "text"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"$ref": "http://example.com/schema"}), "example.com"),
        (schema({"$ref": "#/$defs/missing"}), "missing"),
        (schema({"maximum": 10**400}), "beyond|cannot be read"),
        (schema([1]), "must be an object"),
        (Grammar("json_schema", "{"), "not valid JSON"),
        (Grammar("json_schema", '{"items":' * 50_00 + "{}" + "}" * 50_00), "recursion|cannot be read"),
        (Grammar("regex", "a(+"), "repetition operator"),
        (Grammar("regex", r"(a)\1"), "backreferences"),
        (Grammar("choice", "[]"), "not empty"),
        (Grammar("choice", '["a", 1]'), "strings"),
        (Grammar("lark", "start: nothing"), "nothing"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        compiler.compile(grammar)


def test_a_text_that_is_no_grammar_at_all() -> None:
    with pytest.raises(GrammarError, match="neither Lark nor GBNF"):
        lark_of("root ::= (")


def test_a_text_over_the_limit() -> None:
    Grammar("regex", "a" * MAX_GRAMMAR_CHARS)
    with pytest.raises(GrammarError, match="characters"):
        Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    for text in (None, "{}", "not JSON"):
        if text is not None:
            (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(GrammarError, match=r"tokenizer\.json"):
            GrammarCompiler(tmp_path, VOCAB_SIZE, [EOS])


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 9, VOCAB_SIZE, VOCAB_SIZE + 17])
def test_masks_are_as_long_as_the_models_vocabulary(directory: Path, vocab_size: int) -> None:
    matcher = GrammarCompiler(directory, vocab_size, [EOS]).compile(Grammar("regex", ".*"))
    bits = int.from_bytes(matcher.mask(), "little")
    assert len(matcher.mask()) == -(-vocab_size // 8)
    assert bits >> min(vocab_size, VOCAB_SIZE) == 0, "ids without a token are never allowed"


def test_where_a_grammar_ends(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(Grammar("choice", '["a", "ab"]'))
    assert allowed(matcher) == {64}
    matcher.accept(64)
    assert allowed(matcher) == {65, EOS, OTHER_EOS}, "every end token of the model, and what may follow"
    assert not matcher.is_over
    ended, complete = matcher.copy(), matcher.copy()
    ended.accept(OTHER_EOS)
    complete.accept(65)
    assert ended.is_over
    assert complete.is_over
    assert (ended.error, complete.error) == (None, None)


def test_a_token_that_does_not_follow(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("regex", "a+"))
    with pytest.raises(GrammarError, match="does not follow"):
        matcher.accept(65)
    assert matcher.error
    assert not any(matcher.mask())


def test_copies_go_their_own_ways(compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(Grammar("choice", '["ax", "by"]'))
    first, second = compiled.copy(), compiled.copy()
    first.accept(64)
    second.accept(65)
    assert (allowed(first), allowed(second), allowed(compiled)) == ({87}, {88}, {64, 65})


def test_bans_give_way_where_they_would_leave_nothing(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("choice", '["a", "b"]'))
    mask = matcher.mask()
    assert leaves_some(mask, (64,))
    assert not leaves_some(mask, (64, 65))
    assert leaves_some(mask, ())


def test_a_grammar_that_becomes_too_complex_says_so(compiler: GrammarCompiler) -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    matcher = compiler.compile(schema({"type": "object", "properties": properties, "additionalProperties": False}))
    matcher.accept(90)  # {, which is allowed
    assert not any(matcher.mask())
    assert "2000" in str(matcher.error)


def test_random_walks_through_schemas_end_in_valid_documents(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The keywords that the library implements, against another implementation."""
    for number, wanted in enumerate(
        [
            {"type": "integer", "minimum": -3, "exclusiveMaximum": 17, "multipleOf": 4},
            {"type": "number", "minimum": 1.5, "exclusiveMaximum": 2},
            {"type": "string", "pattern": "b+", "maxLength": 5},
            {"type": "string", "minLength": 2, "maxLength": 4},
            {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False},
            {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1, "maxProperties": 2},
            {"allOf": [{"type": "string", "minLength": 1}, {"maxLength": 2}]},
        ]
    ):
        compiled = compiler.compile(schema(wanted))
        for seed in range(20):
            document = walk(compiled, tokenizer, random.Random(1000 * number + seed))
            if document is not None:
                Draft202012Validator(wanted).validate(json.loads(document))


def walk(compiled: GrammarMatcher, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    matcher, token_ids = compiled.copy(), []
    for _ in range(200):
        token_id = rng.choice(sorted(allowed(matcher) - {OTHER_EOS}))
        matcher.accept(token_id)
        token_ids.append(token_id)
        if matcher.is_over:
            return tokenizer.decode([i for i in token_ids if i != EOS])
    return None
