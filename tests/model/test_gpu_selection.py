"""When layers scan, as StepPlanner has it, and figures that arrive late."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stage_attention import SMALL, Sequence, make_attention, run_decode, run_prompt

from qsa.kernels.registry import SparseConfig
from qsa.kernels.selection_figures_ref import NUM_FIGURES
from qsa.model.decode_graph import STEPS_IN_FLIGHT, DecodeBuffers, DecodeRows, DecodeSteps
from qsa.model.gpu_selection import ScanClock, SelectionFigures, slot_figures
from qsa.model.selection import count_decode


@pytest.mark.parametrize("rerank", ["exact", "none"])
def test_layers_scan_as_on_the_host(rerank):
    """From a context that fits the list over one that fits the pool to one that needs scans."""
    config = SparseConfig(
        **{**SMALL, "summary": "mean", "rerank": rerank, "reselect_every": (9, 9, 1, 3), "candidate_factor": 2}
    )
    seq = Sequence.random(420, 3, torch.float32)
    attention = make_attention({1: config}, torch.float32)
    attention.open(0, 1)
    run_prompt(attention, 0, seq, 100, 1)
    clock = ScanClock(config, 2, 2)
    for position in range(100, 420):
        if position == 300:
            attention.forget(0)
            clock.forget(0)
        run_decode(attention, 0, seq, position, position + 1, 1)
        clock.tick([0], [position + 1])
        clock.tick_back([0], [position + 1])  # as if it had not been
        due = clock.tick([0], [position + 1])[:, 0].tolist()
        groups = attention._uncounted
        if groups and not groups[0].all_slots:
            assert due == [int(layer[0]) for layer in groups[0].is_due], position
        else:
            assert due == [1, 1]


def test_figures_are_those_of_the_host(rng):
    config = SparseConfig(window_size=64, sink_size=16, block_size_fine=32, top_k_fine=4)
    chosen, before = (torch.rand(3, 2, 2, 20, generator=rng).argsort(-1)[..., :4].sort(-1).values for _ in range(2))
    edges = torch.rand(3, 2, 2, 2, generator=rng)
    want = count_decode(chosen, before, edges, config, [5, 2], [700, 90])
    known = (chosen.unsqueeze(-1) == before.unsqueeze(-2)).any(-1).sum((2, 3))
    tokens = torch.minimum((chosen + 1) * 32, torch.tensor(700 - 64)) - (chosen * 32).clamp(min=16)
    far = tokens.clamp(min=0).sum((2, 3)) / 2
    gaps = (edges[..., 0] / edges[..., 1]).log().sum(2)
    figures = torch.stack((far, gaps, torch.full_like(gaps, 2), torch.full_like(gaps, 8), known), -1)
    got = slot_figures(figures, config, DecodeRows(1, [5, 2], [700, 90], np.zeros((3, 2))))
    for name in ("slot", "attended", "context", "num_selected", "newly_hit", "margin"):
        assert getattr(got[0], name) == pytest.approx(getattr(want[0], name), rel=1e-6), name
    assert (got[1].attended, got[1].context, got[1].num_selected) == (270, 270, 0), "all candidates fit the list"


class Late:
    """Figures that arrive when they are told to, or when somebody waits."""

    def __init__(self, far: float) -> None:
        self.is_ready, self.waits, self._values = False, 0, torch.tensor([[[far, 0, 0, 4, 0]]])

    def wait(self) -> torch.Tensor:
        self.waits += not self.is_ready
        return self._values


def test_figures_are_counted_when_they_are_there():
    config = SparseConfig(window_size=64, sink_size=16, block_size_fine=32, top_k_fine=4)
    rows = DecodeRows(1, [3], [900], np.zeros((1, 1)))
    figures, late = SelectionFigures(), [Late(i) for i in range(6)]
    for one in late[:3]:
        figures.add_later(config, rows, one)
    assert figures.take() == [] and not any(one.waits for one in late)
    late[0].is_ready = late[2].is_ready = True
    (sums,) = figures.take()
    assert (sums.attended, sums.num_selected) == (80, 4), "the third must not overtake the second"
    for one in late[3:5]:
        figures.add_later(config, rows, one)
    assert [one.waits for one in late] == [0, 1, 0, 0, 0, 0], "its memory would be written again"
    assert figures.take()[0].num_selected == 8
    figures.add_later(config, rows, late[5])
    figures.forget(3)
    late[5].is_ready = True
    assert figures.take() == [] and not late[5].waits


def test_steps_without_figures_leave_those_of_others_alone():
    """As many steps with figures as may be awaited, each followed by one of another configuration, which has none."""

    def compute(sparse_id: int, buffers: DecodeBuffers, scans_rare: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        figures = buffers.token_ids.float().view(1, -1, 1).expand(2, -1, NUM_FIGURES) if sparse_id else None
        return buffers.token_ids.unsqueeze(1), figures

    sizes = dict(num_layers=2, max_sequences=1, hidden_size=None, dtype=torch.float32, device=torch.device("cpu"))
    steps = DecodeSteps(compute, **sizes)
    hosts = []
    for token in range(STEPS_IN_FLIGHT):
        for sparse_id in (1, 0):
            ready = steps.prepare(DecodeRows(sparse_id, [0], [9], np.zeros((2, 1), np.int32)))
            _, host, _ = steps.run(ready, torch.tensor([token]))
            hosts += [] if host is None else [host]
    assert [float(host.wait()[0, 0, 0]) for host in hosts] == list(range(STEPS_IN_FLIGHT))
