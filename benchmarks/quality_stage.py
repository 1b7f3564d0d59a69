"""Documents and probes run through the engine's own stage: one prefill, then every configuration on the same K and V.

A fork is another slot with the same K and V, and the summaries of another configuration. All forks decode together, as
requests of different configurations do, each teacher-forced with the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.quality_protocols import Document, Probe
from qsa.kernels.dense_attention import gather_tokens
from qsa.kernels.registry import DENSE_ID, SparseConfig
from qsa.kernels.summaries.make import summary_slice_bytes
from qsa.memory.layout import SummaryLayout, sequence_chunks
from qsa.model.attention import StageAttention
from qsa.model.batch import Segment
from qsa.model.build import build_stage, kv_layout, resolve_dtype
from qsa.model.checkpoint.load import Checkpoint

CHUNK = 512  # tokens of a prefill step, the engine's default
DENSE = "dense"
SOURCE = 0  # the slot that documents are prefilled into; forks follow
NO_SINK = " without sink"  # a configuration's name with this: its fork's first slice holds the second's K and V


@dataclass(frozen=True)
class Scores:
    """How one configuration did on probes. `kl`, `agreement`: against dense attention on the same K and V.

    Attributes:
        count:       scored tokens.
        right:       of these, foretold.
        same:        of these, those whose best token is dense attention's.
        kl, loss:    sums over scored tokens, in nats.
    """

    count: int = 0
    right: int = 0
    same: int = 0
    kl: float = 0.0
    loss: float = 0.0

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            self.count + other.count,
            self.right + other.right,
            self.same + other.same,
            self.kl + other.kl,
            self.loss + other.loss,
        )

    @property
    def accuracy(self) -> float:
        return self.right / self.count

    @property
    def agreement(self) -> float:
        return self.same / self.count

    @property
    def mean_kl(self) -> float:
        return self.kl / self.count

    @property
    def perplexity(self) -> float:
        return float(torch.tensor(self.loss / self.count).exp())


class QualityStage:
    """The whole model as one stage, with a slot for the document and one for each configuration.

    The state: which document the source slot holds; `close` gives everything back.
    """

    def __init__(
        self, checkpoint: Checkpoint, configs: Mapping[str, SparseConfig], calibration: Path | None, max_len: int
    ) -> None:
        """configs: by name, dense left out; a name that ends in `without sink` shares the summaries of its own config."""
        spec = checkpoint.spec
        self.names = list(configs)
        self._ids = {DENSE: DENSE_ID} | {name: number for number, name in enumerate(self.names, 1)}
        sparse = {DENSE_ID: SparseConfig(dense=True)} | {self._ids[name]: config for name, config in configs.items()}
        kv = kv_layout(checkpoint, resolve_dtype("auto"))
        code_dim = max(8, spec.num_kv_heads * spec.head_dim // 8)
        layouts = [
            SummaryLayout(
                c.block_size_fine,
                summary_slice_bytes(c.summary, spec.num_kv_heads, spec.head_dim, c.block_size_fine, code_dim),
            )
            for c in configs.values()
        ]
        layouts += [SummaryLayout(1, 0)]
        self.model = build_stage(
            checkpoint,
            first_layer=0,
            last_layer=spec.num_layers,
            num_chunks=sum(sequence_chunks(kv, layout, spec.num_layers, max_len) for layout in layouts),
            max_sequences=1 + len(configs),
            max_model_len=max_len,
            sparse=sparse,
            calibration_path=calibration,
        )
        assert isinstance(self.model.attention, StageAttention)  # built for the CPU
        self.attention = self.model.attention

    def prefill(self, token_ids: Sequence[int], name: str = DENSE, slot: int = SOURCE, chunk: int = CHUNK) -> None:
        """A document from its start into a slot, under a configuration."""
        self.attention.release(slot)
        self.attention.open(slot, self._ids[name])
        for start in range(0, len(token_ids), chunk):
            end = min(start + chunk, len(token_ids))
            segment = Segment(slot, start, end, self._ids[name], True)
            self.model.forward([segment], torch.tensor(token_ids[start:end]), None, [])

    def fork(self, slot: int, name: str, seq_len: int) -> None:
        """Make `slot` hold what the source slot holds, under another configuration."""
        attention, cache = self.attention, self.attention.cache
        attention.release(slot)
        attention.open(slot, self._ids[name])
        step = attention.prepare([Segment(slot, 0, seq_len, self._ids[name], True)])
        attention.take_stats()
        for layer in range(attention.num_layers):
            k, v = gather_tokens(cache.pages, cache.page_chunks[layer, SOURCE].tolist(), seq_len)
            if name.endswith(NO_SINK):
                size = attention.sparse[self._ids[name]].block_size_fine
                for part in (k, v):
                    part[:, :size] = part[:, size : 2 * size]
            attention.write(layer, k.transpose(0, 1), v.transpose(0, 1), step)

    def decode(self, slots: Mapping[str, int], probe: Probe, seq_len: int) -> dict[str, torch.Tensor]:
        """Teacher-force a probe in all slots at once; logits [scored tokens, vocab_size] by configuration."""
        wanted = {place - 1 for place in probe.scored}
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in slots}
        for slot in slots.values():
            self.attention.forget(slot)
        for place, token in enumerate(probe.token_ids[: max(probe.scored)]):
            start = seq_len + place
            segments = [Segment(slot, start, start + 1, self._ids[name], False) for name, slot in slots.items()]
            sample = list(range(len(slots))) if place in wanted else []
            logits = self.model.forward(segments, torch.full((len(slots),), token), None, sample)
            for name, row in zip(slots, logits):
                rows[name].append(row)
        return {name: torch.stack(parts) for name, parts in rows.items()}

    def measure(self, document: Document, names: Sequence[str] | None = None) -> dict[str, Scores]:
        """Prefill densely, then every probe under dense attention and under every configuration."""
        names = self.names if names is None else names
        seq_len = len(document.context)
        self.prefill(document.context)
        slots = {DENSE: SOURCE} | {name: slot for slot, name in enumerate(names, SOURCE + 1)}
        for name in names:
            self.fork(slots[name], name, seq_len)
        totals = {name: Scores() for name in slots}
        for probe in document.probes:
            logits = self.decode(slots, probe, seq_len)
            for name in slots:
                totals[name] += score(logits[DENSE], logits[name], probe)
        for slot in slots.values():
            self.attention.release(slot)
        return totals

    def measure_prefill(self, document: Document, name: str, chunk: int) -> tuple[Scores, Scores]:
        """The context wholly prefilled under a configuration, then its probes token by token; dense first, then that one."""
        seq_len = len(document.context)
        slots = {DENSE: SOURCE, name: SOURCE + 1}
        for each, slot in slots.items():
            self.prefill(document.context, each, slot, chunk)
        totals = {each: Scores() for each in slots}
        for probe in document.probes:
            logits = self.decode(slots, probe, seq_len)
            for each in slots:
                totals[each] += score(logits[DENSE], logits[each], probe)
        for slot in slots.values():
            self.attention.release(slot)
        return totals[DENSE], totals[name]

    def close(self) -> None:
        self.model.close()


def score(dense: torch.Tensor, other: torch.Tensor, probe: Probe) -> Scores:
    """Compare logits [scored tokens, vocab_size] with the probe's tokens and with dense attention."""
    target = torch.tensor([probe.token_ids[place] for place in probe.scored])
    p, q = dense.log_softmax(-1), other.log_softmax(-1)
    best = other.argmax(-1)
    return Scores(
        len(target),
        int((best == target).sum()),
        int((best == dense.argmax(-1)).sum()),
        float((p.exp() * (p - q)).sum()),
        float(-q.gather(1, target.unsqueeze(1)).sum()),
    )
