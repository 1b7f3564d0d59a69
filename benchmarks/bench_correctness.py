"""Logits beside transformers' own model on the same weights, and token ids beside an independent tokenizer, as figures.

The tests hold the same comparisons to their bars; this writes the numbers down.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.summary import Line, record, show
from qsa.model.checkpoint.load import open_checkpoint

TESTS = Path(__file__).resolve().parent.parent / "tests"


def main() -> None:
    sys.path[:0] = [str(TESTS), str(TESTS / "model")]
    from stages import Stages  # noqa: PLC0415  the tests' helpers are no package
    from test_decoder import dequantized_llama  # noqa: PLC0415

    checkpoint = open_checkpoint("default")
    with np.load(TESTS / "data" / "logits_f32.npz") as file:
        ids = file["input_ids"].tolist()
    lines = []
    with torch.inference_mode():
        theirs = dequantized_llama(checkpoint)(torch.tensor([ids])).logits[0]
        for num_stages, cuts in ((1, []), (2, [15])):
            stages = Stages(checkpoint, cuts, dtype="float32", max_model_len=512)
            ours = stages.prefill(0, ids, all_rows=True)
            stages.close()
            name = f"model.logits_{num_stages}_stage{'s' if num_stages > 1 else ''}"
            lines.append(Line(f"{name}.max_difference", float((ours - theirs).abs().max()), "logit", "<= 0.001"))
            same = float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            lines.append(Line(f"{name}.same_argmax", same, f"of {len(ids)}", f">= {len(ids)}"))
    tokenizer = checkpoint.tokenizer()
    cases = json.loads((TESTS / "data" / "token_ids.json").read_text())
    wrong = sum(tokenizer.encode(case["text"], parse_special=True) != case["ids"] for case in cases)
    lost = sum(tokenizer.decode_bytes(case["ids"], skip_special=False) != case["text"].encode() for case in cases)
    lines.append(Line("model.tokens.different_encodings", wrong, f"of {len(cases)}", "<= 0"))
    lines.append(Line("model.tokens.different_decodings", lost, f"of {len(cases)}", "<= 0"))
    show(lines)
    record(lines)


if __name__ == "__main__":
    main()
