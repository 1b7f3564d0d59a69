"""What the quality of attention is measured on: documents with probes whose right continuation is known.

A probe is a continuation of a document, teacher-forced token by token; some of its tokens are scored. Everything is a pure
function of a text's token ids, the tokenizer and a seed.

- continuation: the document's own last tokens, all scored (perplexity, KL and agreement against dense attention).
- lookup:       filler with lines `word word word: 12345` spread evenly, then the words again; the digits are scored.
- passkey:      one sentence with a number in the filler, asked for at the end; the digits are scored.
- copy:         16 tokens of an earlier passage given again, the next 24 scored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Encode = Callable[[str], list[int]]

# words that are one token, with and without a space before them
WORD_LIST = """
apple river window bridge orange engine yellow button camera forest ocean planet table chair bread water stone paper glass
metal cloud storm winter summer spring north south west east castle doctor teacher king brother mother father horse lion
snake sugar salt rice corn wheat gold iron wood street market church school hospital station library museum music color
circle square number letter word book page story movie radio phone computer network signal power energy light heat sound
voice heart brain blood bone skin hand foot head
"""
WORDS = WORD_LIST.split()
COPY_GIVEN, COPY_SCORED = 16, 24
COPY_DEPTHS = (0.03, 0.15, 0.27, 0.38, 0.50, 0.62, 0.73, 0.85)
PASSKEY_DEPTHS = (0.05, 0.30, 0.55, 0.80)


@dataclass(frozen=True)
class Probe:
    """Tokens that continue a document. `scored`: places in `token_ids` of the tokens that must be foretold."""

    token_ids: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(frozen=True)
class Document:
    """A context to prefill, and the probes that each continue it by themselves."""

    name: str
    context: tuple[int, ...]
    probes: tuple[Probe, ...]


def continuation(name: str, token_ids: Sequence[int], length: int, num_scored: int = 256) -> Document:
    """The first `length` tokens of a text; the last `num_scored` of them are fed one by one, each foretelling the next."""
    if len(token_ids) < length + 1:
        raise ValueError(f"{name} has {len(token_ids)} tokens, wanted {length + 1}")
    start = length - num_scored
    return Document(
        name, tuple(token_ids[:start]), (Probe(tuple(token_ids[start : length + 1]), tuple(range(1, num_scored + 1))),)
    )


def lookup(name: str, filler: Sequence[int], length: int, num_keys: int, encode: Encode, seed: int) -> Document:
    """Key-value lookup: `num_keys` lines in `length` tokens, each asked for by a probe."""
    rng = random.Random(seed)
    words = rng.sample(WORDS, len(WORDS))
    keys = [" ".join(words[3 * i : 3 * i + 3]) for i in range(num_keys)]
    values = [f"{rng.randrange(10000, 100000)}" for _ in keys]
    lines = [encode(f"\n{key}: {value}\n") for key, value in zip(keys, values)]
    context = _interleave(filler, length, lines, [(i + 0.5) / num_keys for i in range(num_keys)])
    return Document(name, context, tuple(_digits(encode, f"\n{key}:", value) for key, value in zip(keys, values)))


def passkeys(name: str, filler: Sequence[int], length: int, encode: Encode, seed: int) -> list[Document]:
    """One document a depth, each with one number to be found."""
    rng = random.Random(seed)
    documents = []
    for depth in PASSKEY_DEPTHS:
        number = f"{rng.randrange(10000, 100000)}"
        line = encode(f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n")
        context = _interleave(filler, length, [line], [depth])
        probe = _digits(encode, "\nWhat is the pass key? The pass key is", number)
        documents.append(Document(f"{name} {depth:.0%}", context, (probe,)))
    return documents


def copies(name: str, token_ids: Sequence[int], length: int, encode: Encode) -> Document:
    """Passages of the text's first `length` tokens given again."""
    probes = []
    for depth in COPY_DEPTHS:
        start = int(depth * length)
        lead = encode("\n\n")
        passage = token_ids[start : start + COPY_GIVEN + COPY_SCORED]
        first = len(lead) + COPY_GIVEN
        probes.append(Probe((*lead, *passage), tuple(range(first, first + COPY_SCORED))))
    return Document(name, tuple(token_ids[:length]), tuple(probes))


def _interleave(filler: Sequence[int], length: int, lines: Sequence[list[int]], depths: Sequence[float]) -> tuple[int, ...]:
    """Filler with the lines at these depths, `length` tokens in all."""
    room = length - sum(map(len, lines))
    if len(filler) < room:
        raise ValueError(f"the filler has {len(filler)} tokens, wanted {room}")
    out: list[int] = []
    cuts = [int(depth * room) for depth in depths]
    for first, last, line in zip([0, *cuts], cuts, lines):
        out += [*filler[first:last], *line]
    return tuple(out + list(filler[cuts[-1] : room]))


def _digits(encode: Encode, question: str, number: str) -> Probe:
    """A question and its number; the number's digits are scored, what comes between is not."""
    given = encode(question)
    whole = encode(f"{question} {number}")
    if whole[: len(given)] != given or len(whole) < len(given) + len(number):
        raise ValueError(f"the tokenizer does not split {number} into digits after {question!r}")
    return Probe(tuple(whole), tuple(range(len(whole) - len(number), len(whole))))
