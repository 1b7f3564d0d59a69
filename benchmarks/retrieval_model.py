"""A model whose weights are set by hand: it says what followed a word the last time that word was said, however far back.

Two layers in the shape of Llama. Every token has a code of +1 and -1. Layer 0 gives each token the code of the one before
it, by the fast turning numbers of the rotation. Layer 1 looks up where that code is the current token's, by numbers that
hardly turn in half a million tokens, and copies what stands there: an induction head. Dense attention is then right at any
distance, with a margin that rounding cannot reach; sparse attention is right exactly when it finds the slice.

    python -m benchmarks.retrieval_model FOLDER     # writes it as a model that `qsa serve --model FOLDER` loads
"""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

from qsa.errors import CheckpointError
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.checkpoint.tensors import stage_tensors
from qsa.model.spec import ModelSpec
from qsa.model.tokenizer import Tokenizer, byte_of_character

MAX_LEN = 1 << 19
HEAD_DIM, NUM_LAYERS, HIDDEN, INNER = 128, 2, 512, 512
NUM_Q_HEADS, NUM_KV_HEADS = 8, 4  # in layer 1 the first head of a group looks far back, the second at its own token
THETA = 1e18
HALF = HEAD_DIM // 2
NUM_FAST = 22  # pairs of a head that tell positions apart
FIRST_SLOW = 24  # pairs from here on turn by less than 0.05 in 262144 tokens and carry codes
CODE = 2 * (HALF - FIRST_SLOW)  # numbers of a code: 80

CONSTANT = 8.0  # what the residual stream holds beside the codes, the same for every token
PLACES = {"token": 0, "before": CODE, "answer": 2 * CODE, "constant": 3 * CODE}  # where the residual stream holds what
NEAR_LOGIT, MATCH_LOGIT, HEAD_LOGIT = 40.0, 60.0, 40.0  # of a position pair, of a code found, of the right answer

END, NUM_BYTES = 0, 256  # token 0 ends a text, then come the bytes, then words
NUM_KEYS, NUM_VALUES, NUM_FILLERS = 64, 256, 1471
FIRST_KEY = 1 + NUM_BYTES
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
VOCAB_SIZE = FIRST_FILLER + NUM_FILLERS  # 2048
VALUE_TOKENS = 3  # a fact is a key and as many values
FARTHEST = 32  # most that the codes of a key or value and of any other token agree by, of 80
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CONFIG = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float32"},
    **{"num_hidden_layers": NUM_LAYERS, "hidden_size": HIDDEN, "intermediate_size": INNER, "head_dim": HEAD_DIM},
    **{"num_attention_heads": NUM_Q_HEADS, "num_key_value_heads": NUM_KV_HEADS, "vocab_size": VOCAB_SIZE},
    **{"max_position_embeddings": MAX_LEN, "rope_theta": THETA, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    **{"eos_token_id": END, "bos_token_id": None},
}


@functools.cache
def codes() -> torch.Tensor:
    """A code for every token, float32 [VOCAB_SIZE, CODE] of +1 and -1; those of keys and values are unlike all others."""
    rng = torch.Generator().manual_seed(0)
    special: list[torch.Tensor] = []

    def draw() -> torch.Tensor:
        while True:
            code = torch.randint(2, (CODE,), generator=rng) * 2.0 - 1.0
            if not special or float((torch.stack(special) @ code).abs().max()) <= FARTHEST:
                return code

    for _ in range(NUM_KEYS + NUM_VALUES):
        special.append(draw())
    others = [draw() for _ in range(VOCAB_SIZE - len(special))]
    return torch.stack(others[:FIRST_KEY] + special + others[FIRST_KEY:])


def _norm(num_codes: int) -> float:
    """What RMSNorm multiplies the residual stream by when it holds `num_codes` codes and the constant."""
    return float((HIDDEN / (num_codes * CODE + CONSTANT**2)) ** 0.5)


def _pair_rows(first: int, count: int) -> torch.Tensor:
    """Rows of a head that hold the pairs [first, first + count): the first numbers of each, then the second ones."""
    pairs = torch.arange(first, first + count)
    return torch.cat((pairs, pairs + HALF))


def _turns(kv_head: int) -> torch.Tensor:
    """Each KV head of layer 1 holds codes turned its own way, so that their lists are chosen by different numbers."""
    rng = torch.Generator().manual_seed(1 + kv_head)
    return torch.linalg.qr(torch.randn(CODE, CODE, generator=rng))[0]


def _position_query(distance: int) -> torch.Tensor:
    """What a query holds in the fast pairs, [2 * NUM_FAST], so that it is most like the key `distance` tokens before."""
    angles = THETA ** (-torch.arange(NUM_FAST, dtype=torch.float64) / HALF) * distance
    # both are turned by their positions; the query starts out turned back by the distance
    return torch.cat((angles.cos(), -angles.sin())).float()


def _projections(layer: int) -> dict[str, torch.Tensor]:
    """Weights of q, k, v and o of a layer."""
    q, k = torch.zeros(NUM_Q_HEADS, HEAD_DIM, HIDDEN), torch.zeros(NUM_KV_HEADS, HEAD_DIM, HIDDEN)
    v, o = torch.zeros(NUM_KV_HEADS, HEAD_DIM, HIDDEN), torch.zeros(HIDDEN, NUM_Q_HEADS, HEAD_DIM)
    group, unit, scale = NUM_Q_HEADS // NUM_KV_HEADS, _norm(1 + layer), HEAD_DIM**0.5
    fast, slow = _pair_rows(0, NUM_FAST), _pair_rows(FIRST_SLOW, HALF - FIRST_SLOW)
    token, before = (torch.arange(PLACES[name], PLACES[name] + CODE) for name in ("token", "before"))
    constant = PLACES["constant"]
    for head in range(NUM_KV_HEADS):
        k[head, fast[:NUM_FAST], constant] = 1 / (unit * CONSTANT)
        v[head, :CODE, token] = torch.eye(CODE) / unit
        if layer == 1:
            k[head, slow.unsqueeze(1), before] = _turns(head) / unit
    for head in range(NUM_Q_HEADS):
        if layer == 1 and head % group == 0:
            factor = MATCH_LOGIT * scale / CODE
            q[head, slow.unsqueeze(1), token] = _turns(head // group) * factor / unit
            o[PLACES["answer"] : PLACES["answer"] + CODE, head, :CODE] = torch.eye(CODE) / NUM_KV_HEADS
        else:
            query = _position_query(1 if layer == 0 else 0)
            q[head, fast, constant] = query * NEAR_LOGIT * scale / (unit * CONSTANT)
        if layer == 0:
            o[PLACES["before"] : PLACES["before"] + CODE, head, :CODE] = torch.eye(CODE) / NUM_Q_HEADS
    parts = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1), "o": o.flatten(1)}
    return {f"layers.{layer}.self_attn.{name}_proj.weight": weight for name, weight in parts.items()}


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    """All tensors of the model by canonical name, float32."""
    spec = ModelSpec.from_hf(CONFIG)
    shapes = stage_tensors(spec, 0, NUM_LAYERS, embedding=True, head=True)
    rng = torch.Generator().manual_seed(3)
    made = {name: torch.ones(shape) if len(shape) == 1 else torch.zeros(shape) for name, shape in shapes.items()}
    embedding, head = made["embed_tokens.weight"], made["lm_head.weight"]
    embedding[:, :CODE], embedding[:, PLACES["constant"]] = codes(), CONSTANT
    head[:, PLACES["answer"] : PLACES["answer"] + CODE] = codes() * HEAD_LOGIT / (CODE * _norm(3))
    unused = PLACES["constant"] + 1
    for layer in range(NUM_LAYERS):
        made |= _projections(layer)
        # the MLP computes something, which it leaves where nobody reads and too small to change a norm
        for name in ("gate", "up"):
            made[f"layers.{layer}.mlp.{name}_proj.weight"] = torch.randn(INNER, HIDDEN, generator=rng) * HIDDEN**-0.5
        made[f"layers.{layer}.mlp.down_proj.weight"][unused:] = torch.randn(HIDDEN - unused, INNER, generator=rng) * 1e-3
    for name, shape in shapes.items():
        assert made[name].shape == shape, name
    return made


def words() -> list[str]:
    """The words that are one token each, keys first, then values, then fillers; a space begins each."""
    return [f" {first}{second}" for first in SYLLABLES for second in SYLLABLES][: VOCAB_SIZE - FIRST_KEY]


def _backend() -> tokenizers.Tokenizer:
    characters = {byte: character for character, byte in byte_of_character().items()}
    vocab = {"<|end|>": END} | {characters[byte]: 1 + byte for byte in range(NUM_BYTES)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words()])
    return backend


class RetrievalCheckpoint(Checkpoint):
    """The model without files."""

    def __init__(self) -> None:
        super().__init__(ModelSpec.from_hf(CONFIG, name="retrieval"), Path("retrieval"), {}, None)

    def read(self, name: str) -> torch.Tensor:
        if name not in weights():
            raise CheckpointError(f"retrieval: has no tensor {name}")
        return weights()[name].clone()

    def stage_weight_bytes(self, first_layer: int, last_layer: int, *, bytes_per_weight: float | None = None) -> int:
        names = stage_tensors(self.spec, first_layer, last_layer, embedding=first_layer == 0, head=last_layer == NUM_LAYERS)
        return int(sum(weights()[name].numel() for name in names) * (bytes_per_weight or 4))

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(
            _backend(), bos_id=None, eos_ids=(END,), adds_bos=False, special_ids=(END,), chat_template=CHAT_TEMPLATE
        )


def write_folder(folder: Path) -> Path:
    """Write the model as a folder that the engine loads: config.json, safetensors, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    stored = {(name if name == "lm_head.weight" else f"model.{name}"): weight for name, weight in weights().items()}
    save_file({name: weight.contiguous() for name, weight in stored.items()}, folder / "model.safetensors")
    _backend().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@dataclass(frozen=True)
class Facts:
    """A context with facts in it: token ids, and by depth (0 to 1) the key and what was said after it."""

    context: tuple[int, ...]
    facts: tuple[tuple[float, int, tuple[int, ...]], ...]


def plant(num_tokens: int, depths: Sequence[float], seed: int = 0) -> Facts:
    """Filler of `num_tokens` tokens with one fact at each depth; no key and no value occurs twice.

    Token 0 is a filler: the first token has none before it, and is given its own code.
    """
    if len(depths) > min(NUM_KEYS, NUM_VALUES // VALUE_TOKENS):
        raise ValueError(f"there are keys and values for fewer than {len(depths)} facts")
    rng = random.Random(seed)
    keys = rng.sample(range(FIRST_KEY, FIRST_VALUE), len(depths))
    values = rng.sample(range(FIRST_VALUE, FIRST_FILLER), len(depths) * VALUE_TOKENS)
    context = [rng.randrange(FIRST_FILLER, VOCAB_SIZE) for _ in range(num_tokens)]
    facts, length = [], 1 + VALUE_TOKENS
    room = num_tokens - 1 - length * len(depths)
    if room < 0:
        raise ValueError(f"{num_tokens} tokens do not hold {len(depths)} facts")
    for index, (depth, key) in enumerate(sorted(zip(depths, keys))):
        value = tuple(values[index * VALUE_TOKENS : (index + 1) * VALUE_TOKENS])
        start = 1 + round(depth * room) + index * length
        context[start : start + length] = [key, *value]
        facts.append((depth, key, value))
    return Facts(tuple(context), tuple(facts))


def calibration_text(num_tokens: int, seed: int = 1) -> str:
    """Filler with facts, for `qsa calibrate`."""
    listed = words()
    return "".join(listed[token - FIRST_KEY] for token in plant(num_tokens, [i / 31 for i in range(32)], seed).context)


if __name__ == "__main__":
    print("written:", write_folder(Path(sys.argv[1])))
