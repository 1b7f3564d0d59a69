"""The tokenizer that GGUF metadata describes, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from qsa.errors import CheckpointError, UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # token types

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS.format(digits=r"\p{N}{1,3}")
_QWEN2 = _WORDS.format(digits=r"\p{N}")
# what llama.cpp does with files that do not say: punctuation, then words, then digits by three
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")

PRE_TOKENIZERS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": _DEFAULT,
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def gguf_backend(fields: Mapping[str, Any], where: str) -> tuple[tokenizers.Tokenizer, set[int], bool]:
    """Build the tokenizer of a GGUF file.

    Returns:
        The tokenizer, its control tokens, and whether models of this kind expect BOS when the file does not say.
    """
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not tokens:
        raise CheckpointError(f"{where}: the metadata has no tokenizer.ggml.tokens")
    pieces: list[str] = list(tokens)
    types: list[int] = list(fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(pieces))
    if len(types) != len(pieces):
        raise CheckpointError(f"{where}: {len(pieces)} tokens, but {len(types)} entries in tokenizer.ggml.token_type")
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")]
    special = {i for i, type_ in enumerate(types) if type_ in (UNKNOWN, CONTROL)}
    special |= {int(i) for i in ends if i is not None and 0 <= int(i) < len(pieces)}
    if kind == "gpt2":
        backend, adds_bos = _byte_level(fields, pieces, where), fields.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(fields, pieces, types, special, where), True
    else:
        raise UnsupportedModelError(f"{where}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")
    backend.add_special_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in sorted(special)])
    own = [pieces[i] for i, type_ in enumerate(types) if type_ == USER_DEFINED and i not in special]
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in own])
    if backend.get_vocab_size(with_added_tokens=True) != len(pieces):
        raise CheckpointError(f"{where}: tokenizer.ggml.tokens holds a token twice")
    return backend, special, adds_bos


def _byte_level(fields: Mapping[str, Any], pieces: Sequence[str], where: str) -> tokenizers.Tokenizer:
    name = fields.get("tokenizer.ggml.pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(f"{where}: pre-tokenizer {name!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}")
    merges = fields.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(f"{where}: the metadata has no tokenizer.ggml.merges")
    vocab = {piece: i for i, piece in enumerate(pieces)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    if wrong := [pair for pair in pairs if len(pair) != 2 or "".join(pair) not in vocab]:
        raise CheckpointError(f"{where}: merge {' '.join(wrong[0])!r} makes no token of the vocabulary")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=name in _LLAMA3_NAMES))
    if name in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    fields: Mapping[str, Any], pieces: Sequence[str], types: Sequence[int], special: set[int], where: str
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all adjacent pairs that form a token, the one with the best score is merged first."""
    scores = fields.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(pieces):
        raise CheckpointError(f"{where}: tokenizer.ggml.scores must have {len(pieces)} entries")
    scores = list(scores)
    vocab = {piece: i for i, piece in enumerate(pieces)}
    parts = {piece: i for piece, i in vocab.items() if types[i] in (NORMAL, USER_DEFINED) and i not in special}
    ranked = []
    for piece, i in parts.items():
        if types[i] != NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in parts and right in parts:
                ranked.append((-scores[i], parts[left], parts[right], left, right))
    ranked.sort()
    has_bytes = all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    unknown = fields.get("tokenizer.ggml.unknown_token_id")
    if not has_bytes:
        raise UnsupportedModelError(f"{where}: a SentencePiece vocabulary without byte tokens is not supported")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in ranked],
            unk_token=None if unknown is None else pieces[int(unknown)],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[normalizers.Normalizer] = []
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.append(normalizers.Prepend("▁"))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend
