"""Helpers of the decoder's tests: models cut into stages, sequences prefilled and decoded through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from qsa.kernels.registry import DENSE_ID, SparseConfig
from qsa.model.batch import Segment
from qsa.model.build import build_stage
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.decoder import StageModel

SMALL_ID = 1  # a budget of 112 tokens: selection is at work in short texts
SPARSE = {
    DENSE_ID: SparseConfig(dense=True),
    SMALL_ID: SparseConfig(
        window_size=64,
        sink_size=16,
        block_size_coarse=64,
        block_size_fine=16,
        top_k_fine=2,
        candidate_factor=2,
        summary="sketch",
    ),
}


class Stages:
    """All stages of one model; slots are opened as they are first used."""

    def __init__(self, checkpoint: Checkpoint, cuts: Sequence[int], **options: object) -> None:
        """cuts: first layers of the second and later stages."""
        bounds = [0, *cuts, checkpoint.spec.num_layers]
        settings = {"num_chunks": 512, "max_sequences": 8, "max_model_len": checkpoint.spec.max_model_len, "sparse": SPARSE}
        settings |= options
        self.models: list[StageModel] = [
            build_stage(checkpoint, first_layer=first, last_layer=last, **settings) for first, last in pairwise(bounds)
        ]

    def forward(self, segments: Sequence[Segment], token_ids: Sequence[int], sample_rows: Sequence[int]) -> torch.Tensor:
        """One step through every stage; slots that begin are opened."""
        hidden = None
        for model in self.models:
            for segment in segments:
                if segment.start == 0:
                    model.attention.release(segment.slot)
                    model.attention.open(segment.slot, segment.sparse_id)
            ids = torch.tensor(token_ids) if model.is_first else None
            hidden = model.forward(segments, ids, hidden, sample_rows)
        return hidden

    def prefill(
        self, slot: int, token_ids: Sequence[int], *, chunk: int = 1 << 20, all_rows: bool = False, sparse_id: int = DENSE_ID
    ) -> torch.Tensor:
        """A prompt from its start, in chunks; logits of every token or of the last one."""
        logits = []
        for start in range(0, len(token_ids), chunk):
            end = min(start + chunk, len(token_ids))
            last = [end - start - 1] if end == len(token_ids) else []
            rows = list(range(end - start)) if all_rows else last
            segment = Segment(slot, start, end, sparse_id, True)
            logits.append(self.forward([segment], token_ids[start:end], rows))
        return torch.cat(logits)

    def decode(
        self, slots: Sequence[int], lengths: Sequence[int], token_ids: Sequence[int], sparse_id: int = DENSE_ID
    ) -> torch.Tensor:
        """One token for each of some sequences that hold `lengths` tokens; their logits."""
        segments = [Segment(slot, length, length + 1, sparse_id, False) for slot, length in zip(slots, lengths)]
        return self.forward(segments, token_ids, list(range(len(slots))))

    def close(self) -> None:
        for model in self.models:
            model.close()


def mean_kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over rows of KL(reference || other), from logits, in nats."""
    p, q = reference.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
