"""A tokenizer for a model that has none of its own: every byte is a token, every further id a made-up word.

For random weights: prompts have as many tokens as bytes, and whatever the model says is text of some kind.
"""

from __future__ import annotations

import tokenizers

from qsa.errors import CheckpointError
from qsa.model.tokenizer import Tokenizer, byte_of_character

NUM_BYTES = 256
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def check_holds_bytes(vocab_size: int) -> None:
    """Raise a CheckpointError where the vocabulary is smaller than the bytes."""
    if vocab_size < NUM_BYTES:
        raise CheckpointError(
            f"a vocabulary of {vocab_size} cannot hold the {NUM_BYTES} bytes; give the model a tokenizer.json"
        )


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids 0 to 255 are the bytes, those above words of letters after a space.

    Raises:
        CheckpointError: the vocabulary is smaller than the bytes.
    """
    check_holds_bytes(vocab_size)
    characters = {byte: character for character, byte in byte_of_character().items()}
    vocab = {characters[byte]: byte for byte in range(NUM_BYTES)}
    space = characters[ord(" ")]
    vocab |= {space + _word(index): NUM_BYTES + index for index in range(vocab_size - NUM_BYTES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, bos_id=None, eos_ids=(), adds_bos=False, special_ids=(), chat_template=None)


def _word(index: int) -> str:
    """A word of at least two letters, another for every index."""
    letters = ""
    while index or len(letters) < 2:
        index, letter = divmod(index, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters
