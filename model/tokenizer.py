"""Text to token ids and back, exactly: from a Hugging Face tokenizer.json or from GGUF metadata.

A user's text cannot forge control tokens: they are only recognised where the caller says so. Bytes are exact: every
token stands for fixed bytes, and the bytes of encoded text are that text's.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from qsa.errors import CheckpointError, UnsupportedModelError
from qsa.model.checkpoint.gguf_tokenizer import gguf_backend
from qsa.model.checkpoint.safetensors import read_json

SPACE = "▁"  # what SentencePiece vocabularies write for a space
_BETWEEN_WORDS = re.compile(r"[a-z](?= [a-z])")
_LONG = 1 << 15  # characters
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@functools.cache
def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable bytes are themselves, others shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """A vocabulary with its rules. Safe to use from several threads at once.

    Attributes:
        bos_id:        the token that begins a text, or None.
        adds_bos:      whether the model expects it.
        eos_ids:       tokens that end a text, as the tokenizer's own files list them.
        special_ids:   control tokens: recognised only on request, not shown in decoded text unless asked for.
        chat_template: Jinja source, or None.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        adds_bos: bool,
        special_ids: Iterable[int],
        chat_template: str | None,
    ) -> None:
        self._is_byte_level = _is_byte_level(backend)
        self._added = {id_: token for id_, token in backend.get_added_tokens_decoder().items()}
        self.bos_id = bos_id
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.adds_bos = adds_bos and bos_id is not None
        self.special_ids = frozenset(special_ids)
        self.chat_template = chat_template
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token = None if bos_id is None else backend.id_to_token(bos_id)
        self.eos_token = backend.id_to_token(self.eos_ids[0]) if self.eos_ids else None
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # control tokens in plain text stay text
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        specials = {self._added[i].content: i for i in self.special_ids if i in self._added}
        self._special_of = specials
        pattern = "|".join(re.escape(text) for text in sorted(specials, key=len, reverse=True))
        self._special_pattern = re.compile(pattern) if pattern else None

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], where: str = "") -> Tokenizer:
        """Rebuild the tokenizer that a GGUF file describes.

        Raises:
            UnsupportedModelError: a tokenizer model or pre-tokenizer that is not supported, by name.
            CheckpointError: its metadata is missing or inconsistent.
        """
        backend, special_ids, adds_bos = gguf_backend(fields, where)
        bos = fields.get("tokenizer.ggml.bos_token_id")
        ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return cls(
            backend,
            bos_id=None if bos is None else int(bos),
            eos_ids=[int(end) for end in ends if end is not None],
            adds_bos=bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos)),
            special_ids=special_ids,
            chat_template=fields.get("tokenizer.chat_template"),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of a model folder.

        Raises:
            CheckpointError: no tokenizer.json, or it cannot be read.
            UnsupportedModelError: a tokenizer whose tokens do not stand for fixed bytes.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; only tokenizers in this format are supported")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: cannot read: {error}") from None
        settings = _optional_json(folder / "tokenizer_config.json")
        generation = _optional_json(folder / "generation_config.json")
        config = _optional_json(folder / "config.json")

        bos_id = _token_id(backend, settings.get("bos_token"))
        if bos_id is None and "bos_token" not in settings and isinstance(config.get("bos_token_id"), int):
            bos_id = config["bos_token_id"]
        eos_ids = [*_id_list(config.get("eos_token_id")), *_id_list(generation.get("eos_token_id"))]
        own_eos = _token_id(backend, settings.get("eos_token"))
        ends = [*([] if own_eos is None else [own_eos]), *eos_ids]
        adds_bos = settings.get("add_bos_token")
        if adds_bos is None:
            adds_bos = bos_id is not None and backend.encode("x", add_special_tokens=True).ids[:1] == [bos_id]
        marked = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        unmarked = [i for i in {bos_id, *ends} - marked if i is not None and i in backend.get_added_tokens_decoder()]
        backend.add_special_tokens([_as_special(backend.get_added_tokens_decoder()[i]) for i in unmarked])
        return cls(
            backend,
            bos_id=bos_id,
            eos_ids=ends,
            adds_bos=bool(adds_bos),
            special_ids=marked | set(unmarked),
            chat_template=_chat_template(folder, settings),
        )

    def encode(
        self,
        text: str,
        *,
        parse_special: bool = False,
        add_bos: bool | None = None,
        plain_spans: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        """Token ids of a text. A lone surrogate, which has no bytes, becomes U+FFFD.

        Args:
            parse_special: recognise control tokens written in the text (for rendered chat templates).
            add_bos:       None: as the model expects; True: begin with BOS; False: do not add it. Never a second one.
            plain_spans:   [start, end) character ranges in which `parse_special` does not apply: a user's own words.
        """
        if _has_surrogates(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # joins pairs, replaces lone ones
        ids: list[int] = []
        position = 0
        if parse_special and self._special_pattern is not None:
            for start, end in _outside(self._special_pattern, text, sorted(plain_spans)):
                token_id = self._special_of[text[start:end]]
                token = self._added[token_id]
                piece = text[position:start]
                ids += self._encode_plain(piece.rstrip() if token.lstrip else piece, is_first=position == 0)
                ids.append(token_id)
                position = end
                if token.rstrip:
                    position += len(text[end:]) - len(text[end:].lstrip())
        ids += self._encode_plain(text[position:], is_first=position == 0)
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def _encode_plain(self, text: str, is_first: bool) -> list[int]:
        if not text:
            return []
        backend = self._backend if is_first else self._continuation
        ids: list[int] = []
        for piece in self._pieces(text):
            # unlike `encode` it lets other threads run, which is worth its cost for long texts only
            encodings = (
                [backend.encode(piece, add_special_tokens=False)]
                if len(piece) < _LONG
                else backend.encode_batch_fast([piece], add_special_tokens=False)
            )
            ids += encodings[0].ids
        return ids

    def _pieces(self, text: str) -> Iterator[str]:
        """A long text cut where no token can cross: before the space between two words of ASCII letters.

        Millions of tokens in one go are three times slower, and hold the interpreter for a quarter of a second.
        """
        start = 0
        while self._can_cut and len(text) - start > 2 * _LONG:
            match = _BETWEEN_WORDS.search(text, start + _LONG)
            if match is None:
                break
            yield text[start : match.end()]
            start = match.end()
        yield text[start:] if start else text

    @functools.cached_property
    def _can_cut(self) -> bool:
        """Byte-level pre-tokenizers begin a new word at a space; an added token with a space in it could cross."""
        return self._is_byte_level and not any(" " in token.content for token in self._added.values())

    @functools.cached_property
    def _continuation(self) -> tokenizers.Tokenizer:
        """The same rules for text that follows a control token, where a prefix space belongs to the first text only."""
        rules = json.loads(self._backend.to_str())
        if not _only_first_gets_space(rules.get("pre_tokenizer")):
            return self._backend
        backend = tokenizers.Tokenizer.from_str(json.dumps(rules))
        backend.encode_special_tokens = True
        return backend

    @functools.cached_property
    def strips_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding takes away again."""
        if self._is_byte_level:
            return False
        ids = self._encode_plain("x", is_first=True)
        return b"".join(map(self.token_bytes, ids)).startswith(b" ")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; of a control token, its name. Empty for an id without a token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._compute_bytes(token_id)
        return known

    def _compute_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if piece is None:
            return b""
        if self._is_byte_level:
            table = byte_of_character()
            if all(character in table for character in piece):
                return bytes(table[character] for character in piece)
            return piece.encode()
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(SPACE, " ").encode()

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """The bytes of a whole text: those of its tokens, less the space that encoding put before it."""
        parts = []
        is_first = self.strips_space
        for token_id in ids:
            if token_id in self.special_ids:
                parts.append(b"" if skip_special else self.token_bytes(token_id))
                continue
            piece = self.token_bytes(token_id)
            parts.append(piece.removeprefix(b" ") if is_first else piece)
            is_first = False
        return b"".join(parts)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _outside(pattern: re.Pattern[str], text: str, spans: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Matches from left to right that do not touch any of the sorted spans; one that does is looked past."""
    position, index = 0, 0
    while match := pattern.search(text, position):
        start, end = match.span()
        while index < len(spans) and spans[index][1] <= start:
            index += 1
        if any(span[0] < end and span[1] > start for span in spans[index : index + 2]):
            position = start + 1
            continue
        yield start, end
        position = end


def _only_first_gets_space(rules: Any) -> bool:
    """Turn `prepend_scheme: first` into `never` wherever it stands; whether there was any."""
    found = False
    if isinstance(rules, dict):
        if rules.get("type") == "Metaspace" and rules.get("prepend_scheme") == "first":
            rules["prepend_scheme"] = "never"
            found = True
        for value in rules.values():
            found = _only_first_gets_space(value) or found
    elif isinstance(rules, list):
        for value in rules:
            found = _only_first_gets_space(value) or found
    return found


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    rules = json.loads(backend.to_str())
    kind = rules["model"]["type"]
    if kind != "BPE":
        raise UnsupportedModelError(f"tokenizer model {kind!r} is not supported, only BPE")
    decoder = json.dumps(rules.get("decoder") or {})
    if "ByteLevel" in decoder:
        return True
    if rules["model"].get("byte_fallback") or "ByteFallback" in decoder or "Metaspace" in decoder:
        return False
    raise UnsupportedModelError("a BPE tokenizer that is neither byte-level nor has byte fallback is not supported")


def _as_special(token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content, special=True, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_id(backend: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token written as a string, or as an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    found: int | None = backend.token_to_id(token) if isinstance(token, str) else None
    return found


def _id_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, where the template is a string or a list of named ones."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
