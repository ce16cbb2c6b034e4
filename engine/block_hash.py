"""Content hashes of full KV blocks, chained: a block's hash names its tokens and everything before them.

    root = H(model digest, cache salt)     hash[0] = H(root, tokens[0:B])     hash[i] = H(hash[i-1], tokens[iB:(i+1)B])

Two processes that serve the same model compute the same hashes, whatever PYTHONHASHSEED says: sha256 over a canonical
form, in which every text is preceded by its length and every token id is four bytes, little-endian.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256


def root_hash(model_digest: str, cache_salt: str) -> bytes:
    """What all tokens of a request depend on: requests with different roots never share KV."""
    digest = sha256(b"pdserve.block.v1")
    for text in (model_digest, cache_salt):
        data = text.encode()
        digest.update(struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of the block that holds `token_ids` and follows the block (or root) `parent`."""
    return sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def extend_block_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Appends to `hashes` until every full block of `token_ids` has one."""
    parent = hashes[-1] if hashes else root
    for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
