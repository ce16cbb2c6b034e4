import os
import subprocess
import sys

import pytest

from engine.block_hash import extend_block_hashes, hash_block, root_hash

ROOT = root_hash("model", "")


def chain(token_ids: list[int], block_size: int = 4, root: bytes = ROOT) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, root, token_ids, block_size)
    return hashes


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (33, 8)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(chain(list(range(num_tokens)))) == num_hashes


def test_extending_continues_the_chain() -> None:
    tokens = list(range(21))
    hashes: list[bytes] = []
    for known in (0, 3, 4, 5, 12, 21):
        extend_block_hashes(hashes, ROOT, tokens[:known], 4)
    assert hashes == chain(tokens)


def test_a_hash_names_everything_before_it() -> None:
    tokens = list(range(12))
    other = [99, *tokens[1:]]
    assert all(a != b for a, b in zip(chain(tokens), chain(other), strict=True))
    assert chain(tokens)[:2] == chain([*tokens[:8], 77, 78, 79, 80])[:2]


@pytest.mark.parametrize("root", [root_hash("other model", ""), root_hash("model", "salt")])
def test_model_and_salt_part_the_chains(root: bytes) -> None:
    assert not set(chain(list(range(12)))) & set(chain(list(range(12)), root=root))


def test_fields_of_the_root_do_not_run_into_each_other() -> None:
    assert len({root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc", ""), root_hash("", "abc")}) == 4


def test_token_ids_do_not_run_into_each_other() -> None:
    assert hash_block(ROOT, [1, 0]) != hash_block(ROOT, [0, 1]) != hash_block(ROOT, [256, 0])
    assert hash_block(ROOT, [2**31 - 1]) != hash_block(ROOT, [2**31])


def test_known_values() -> None:
    """Peers and stored blocks of another release depend on them."""
    assert root_hash("model", "").hex()[:16] == "6c1990c1f44d7e1b"
    assert hash_block(ROOT, [1, 2, 3, 4]).hex()[:16] == "d399ff4459f21c7d"


def test_hashes_do_not_depend_on_pythonhashseed() -> None:
    program = "from engine.block_hash import *; print(hash_block(root_hash('m', 's'), [1, 2, 3]).hex())"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert seen == {hash_block(root_hash("m", "s"), [1, 2, 3]).hex() + "\n"}
