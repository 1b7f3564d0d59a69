"""StageAttention: dense and covering configurations equal dense attention, smaller budgets the reference, slots are reused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import assert_matches_oracle
from stage_attention import (
    FIRST_LAYER,
    NUM_LAYERS,
    SMALL,
    Sequence,
    dense_ref,
    make_attention,
    run_decode,
    run_group,
    run_prompt,
)

from qsa.kernels.block_select_ref import block_select_ref
from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_decode_ref import sparse_decode_ref
from qsa.model.batch import Segment

DTYPES = [torch.float32, torch.bfloat16]
SUMMARIES = ["code", "sketch", "minmax", "mean"]
COVERING = SparseConfig(**{**SMALL, "top_k_fine": 64, "summary": "sketch"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", [SparseConfig(dense=True), COVERING], ids=["dense", "covering"])
@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 80), (2, 2, 128)], ids=str)
def test_dense_and_covering_budget_equal_dense_attention(heads, config, dtype):
    seq = Sequence.random(1200, 0, dtype, heads)
    attention = make_attention({0: config}, dtype, heads=heads)
    attention.open(1, 0)
    got = torch.cat((run_prompt(attention, 1, seq, 1190, 0), run_decode(attention, 1, seq, 1190, 1200, 0)), 1)
    for layer in range(NUM_LAYERS):
        wide = Sequence(seq.q.double(), seq.k.double(), seq.v.double())
        assert_matches_oracle("out", got[layer], dense_ref(wide, layer), dense_ref(seq, layer))


@pytest.mark.parametrize("summary", SUMMARIES)
def test_a_list_of_all_candidates_equals_dense(summary):
    """top_k_fine one below and at the number of candidates: the sparse path and the dense path, the latter exact."""
    seq = Sequence.random(401, 1, torch.float32)
    candidates = -(-(401 - 64) // 32)
    for top_k_fine, tolerance in ((candidates - 1, 0.2), (candidates, 2e-6)):
        config = SparseConfig(**{**SMALL, "top_k_fine": top_k_fine, "summary": summary})
        attention = make_attention({1: config}, torch.float32)
        attention.open(0, 1)
        run_prompt(attention, 0, seq, 400, 1)
        got = run_decode(attention, 0, seq, 400, 401, 1)
        error = (got[0, 0] - dense_ref(seq, 0)[400]).abs().max()
        assert error < tolerance
        (figures,) = attention.take_stats()
        assert (figures.num_selected > 0) == (top_k_fine < candidates)


def expected_pool(attention, method, layer, slot, seq, seq_len):
    """The pool a scan must propose now, from the summaries as they are in memory."""
    config = method.config
    num_candidates = -(-(seq_len - config.window_size) // config.block_size_fine)
    pool_size = config.pool_size(FIRST_LAYER + layer)
    if config.rerank == "exact" and num_candidates <= pool_size:
        return torch.arange(num_candidates).expand(1 if config.list_per == "layer" else 3, -1)
    scores = method.summary.scan(
        layer,
        attention.cache.pool.buffer,
        seq.q[layer, seq_len - 1].view(3, 3, 64),
        attention.cache.summary_chunks[layer, slot].tolist(),
        config.sink_size,
        seq_len - config.window_size,
        0.125,
    ).unsqueeze(0)
    blocks = None
    if config.propose == "blocks":
        blocks = method.summary.block_scores(scores, 2).double()
    return block_select_ref(
        scores.double(),
        pool_size,
        per_layer=config.list_per == "layer",
        block_scores=blocks,
        top_k_coarse=config.top_k_coarse,
        slices_per_block=2,
    )[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("summary", SUMMARIES)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(rerank="none"),
        dict(list_per="layer"),
        dict(propose="blocks", top_k_coarse=6),
        dict(propose="blocks", top_k_coarse=6, rerank="none", list_per="layer"),
        dict(candidate_factor=8),  # nothing to scan: every candidate is in the pool
        dict(candidate_factor=(9, 9, 1, 3)),  # one layer attends to its pool, the other chooses from it
        dict(candidate_factor=(9, 9, 8, 2), list_per="layer"),  # one layer's pool holds every candidate
        dict(candidate_factor=(9, 9, 1, 2), propose="blocks", top_k_coarse=6),
    ],
    ids=str,
)
def test_decode_attends_to_the_reference_set(options, summary, dtype):
    config = SparseConfig(**{**SMALL, "summary": summary, **options})
    seq = Sequence.random(1010, 2, dtype)
    attention = make_attention({1: config}, dtype)
    attention.open(2, 1)
    run_prompt(attention, 2, seq, 1003, 1)
    method = attention._methods[1]
    for position in range(1003, 1010):
        got = run_decode(attention, 2, seq, position, position + 1, 1)
        for layer in range(NUM_LAYERS):
            pool = expected_pool(attention, method, layer, 2, seq, position + 1)
            sizes = dict(top_k=4, slice_size=32, sink_size=16, window_size=64, sm_scale=0.125)
            k, v = (t[layer, : position + 1].transpose(0, 1) for t in (seq.k, seq.v))
            q = seq.q[layer, position]
            oracle, chosen, _ = sparse_decode_ref(q.double(), k.double(), v.double(), pool, **sizes)
            peer, _, _ = sparse_decode_ref(q, k, v, chosen, **sizes)
            assert_matches_oracle("out", got[layer, 0], oracle, peer)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)], ids=str)
def test_other_types_of_k_and_v(dtype, kv_dtype):
    seq = Sequence.random(712, 12, dtype)
    config = SparseConfig(**SMALL, summary="sketch")
    attention, exact = make_attention({1: config}, kv_dtype), make_attention({1: config}, torch.float32)
    wide = Sequence(seq.q.float(), seq.k.float(), seq.v.float())
    outs = []
    for one, sequence in ((attention, seq), (exact, wide)):
        one.open(0, 1)
        prompt = run_prompt(one, 0, sequence, 700, 1)
        outs.append(torch.cat((prompt, run_decode(one, 0, sequence, 700, 712, 1)), 1))
    assert outs[0].dtype == dtype
    error = (outs[0].float() - outs[1]).abs()
    assert (error < 0.02).float().mean() > 0.98  # but for a list that rounding has changed


def test_summaries_do_not_depend_on_how_tokens_arrived():
    """Chunks that end inside a slice, then token by token, against one chunk: the same choices and the same output."""
    seq = Sequence.random(700, 3, torch.float32)
    for summary in SUMMARIES:
        attention = make_attention({1: SparseConfig(**SMALL, summary=summary)}, torch.float32)
        for slot in range(2):
            attention.open(slot, 1)
        run_prompt(attention, 0, seq, 699, 1, chunk=1024)
        run_prompt(attention, 1, seq, 330, 1, chunk=45)
        run_decode(attention, 1, seq, 330, 699, 1)
        one, other = (run_decode(attention, slot, seq, 699, 700, 1) for slot in (0, 1))
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [dict(), dict(rerank="none"), dict(list_per="layer", reselect_every=3)], ids=str)
def test_a_sequence_does_not_depend_on_its_company(options, dtype):
    """Bit for bit: alone, and with others of other lengths and configurations, that select and that do not."""
    sparse = {
        0: SparseConfig(dense=True),
        1: SparseConfig(**SMALL, **options),
        2: SparseConfig(**SMALL, summary="sketch"),
    }
    lengths, ids = [700, 411, 130, 905, 68, 650, 300], [1, 1, 1, 1, 1, 2, 0]
    sequences = [Sequence.random(length + 70, length, dtype) for length in lengths]
    together = make_attention(sparse, dtype, slots=8)
    for slot, (seq, length, sparse_id) in enumerate(zip(sequences, lengths, ids)):
        together.open(slot, sparse_id)
        run_prompt(together, slot, seq, length, sparse_id)
    steps = []
    for i in range(70):  # over two slices, so that summaries are written by decode steps too
        segments = [Segment(slot, n + i, n + i + 1, ids[slot], False) for slot, n in enumerate(lengths)]
        steps.append(run_group(together, segments, sequences))
    batched = torch.stack(steps, 2)  # [num_layers, sequence, step, num_q_heads, head_dim]
    for slot, (seq, length, sparse_id) in enumerate(zip(sequences, lengths, ids)):
        alone = make_attention(sparse, dtype)
        alone.open(0, sparse_id)
        run_prompt(alone, 0, seq, length, sparse_id)
        solo = run_decode(alone, 0, seq, length, length + 70, sparse_id)
        assert torch.equal(solo, batched[:, slot]), f"sequence of {length} tokens, configuration {sparse_id}"


def test_default_geometry_does_not_depend_on_company():
    """The same with slices of 64, a window of 512 and the pool of 64 that the scan fills at 5K tokens."""
    sparse = {1: SparseConfig()}
    lengths = [5000, 4907, 1700]
    sequences = [Sequence.random(length + 3, length, torch.bfloat16) for length in lengths]
    outs = []
    for members in ([0, 1, 2], [0], [1], [2]):
        attention = make_attention(sparse, torch.bfloat16, max_seq_len=5120)
        for slot in members:
            attention.open(slot, 1)
            attention.cache.extend(slot, lengths[slot])
            for layer in range(NUM_LAYERS):
                for page, chunk in enumerate(attention.cache.page_chunks[layer, slot].tolist()):
                    if chunk >= 0:
                        rng = torch.Generator().manual_seed(100 * slot + page)
                        attention.cache.pages[chunk] = torch.randn(attention.cache.pages.shape[1:], generator=rng).bfloat16()
                chunk = int(attention.cache.summary_chunks[layer, slot, 0])
                rng = torch.Generator().manual_seed(slot)
                attention.cache.pool.buffer[chunk] = torch.randint(0, 255, (1 << 20,), generator=rng).to(torch.uint8)
        steps = []
        for i in range(3):
            segments = [Segment(slot, lengths[slot] + i, lengths[slot] + i + 1, 1, False) for slot in members]
            steps.append(run_group(attention, segments, [sequences[slot] for slot in members]))
        outs.append(torch.stack(steps))
    for slot in range(3):
        assert torch.equal(outs[0][:, :, slot], outs[1 + slot][:, :, 0]), f"sequence {slot}"


def pools_of(attention, slot):
    return attention._methods[1].state.pools(torch.tensor([slot]))[:, 0]


def test_each_layer_scans_at_its_own_interval():
    intervals = (1, 1, 3, 2)  # of the whole model; this stage has layers 2 and 3
    seq = Sequence.random(900, 4, torch.float32)
    attention = make_attention({1: SparseConfig(**SMALL, reselect_every=intervals)}, torch.float32)
    attention.open(0, 1)
    run_prompt(attention, 0, seq, 850, 1)
    scanned = []
    before = pools_of(attention, 0)
    for position in range(850, 862):
        run_decode(attention, 0, seq, position, position + 1, 1)
        after = pools_of(attention, 0)
        scanned.append([not torch.equal(after[layer], before[layer]) for layer in range(2)])
        before = after
    assert [a for a, _ in scanned] == [i % 3 == 0 for i in range(12)]
    assert [b for _, b in scanned] == [i % 2 == 0 for i in range(12)]


def test_scans_at_the_first_step_that_selects():
    """A request that grows past its budget while decoding scans then, not at its interval."""
    config = SparseConfig(**SMALL, reselect_every=100, rerank="none")
    seq = Sequence.random(300, 5, torch.float32)
    attention = make_attention({1: config}, torch.float32)
    attention.open(0, 1)
    run_prompt(attention, 0, seq, 150, 1)
    first_selecting = 64 + 4 * 32 + 1  # tokens of context at which a fifth slice becomes a candidate
    run_decode(attention, 0, seq, 150, first_selecting - 1, 1)
    assert (pools_of(attention, 0) == -1).all()
    got = run_decode(attention, 0, seq, first_selecting - 1, first_selecting, 1)
    assert (pools_of(attention, 0) >= 0).all() and torch.isfinite(got).all()


def test_a_reused_slot_remembers_nothing():
    config = SparseConfig(**SMALL, reselect_every=50)
    first, second = Sequence.random(900, 6, torch.bfloat16), Sequence.random(620, 7, torch.bfloat16)
    used, fresh = (make_attention({1: config}, torch.bfloat16) for _ in range(2))
    used.open(0, 1)
    run_prompt(used, 0, first, 890, 1)
    run_decode(used, 0, first, 890, 900, 1)
    used.release(0)
    used.release(0)  # releasing a free slot does nothing
    assert used.cache.pool.num_free == used.cache.pool.num_chunks
    outs = []
    for attention in (used, fresh):
        attention.open(0, 1)
        prompt = run_prompt(attention, 0, second, 600, 1)
        outs.append(torch.cat((prompt, run_decode(attention, 0, second, 600, 620, 1)), 1))
        (figures,) = attention.take_stats()
        assert figures.newly_hit < figures.num_selected
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("summary", SUMMARIES)
def test_prefill_finds_what_decode_would(summary):
    """A key that only one late query looks for: the tile's list holds its slice, and a window alone does not."""
    seq = Sequence.random(1024, 8, torch.float32)
    seq.q[:], seq.k[:] = 0.1 * seq.q, 0.1 * seq.k
    needle = 300
    seq.k[:, needle] = 0
    seq.k[:, needle, :, 5] = 60.0
    seq.v[:, needle] = 9.0
    seq.q[:, 992:1024, :, 5] = 3.0
    config = SparseConfig(**SMALL, summary=summary)
    attention = make_attention({1: config}, torch.float32)
    attention.open(0, 1)
    got = run_prompt(attention, 0, seq, 1024, 1)
    assert (got[:, 992:] > 8.0).all()
    assert dense_ref(seq, 0)[992:].min() > 8.0
    (figures,) = attention.take_stats()
    assert figures.attended < 0.6 * figures.context


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("list_per", ["kv_head", "layer"])
def test_prefill_with_few_blocks_reads_nothing_else(list_per, dtype):
    """Two blocks of two slices cannot fill a list of eight: what is left of it attends to nothing, least of all other memory.

    With V one-hot in the slice that a token lies in, the result shows which slices were attended.
    """
    config = SparseConfig(**SMALL, summary="mean", propose="blocks", top_k_coarse=2, list_per=list_per)
    seq = Sequence.random(1024, 11, dtype)
    seq.v[:] = 0
    for token in range(1024):
        seq.v[:, token, :, token // 32] = 1
    attention = make_attention({1: config}, dtype)
    attention.open(2, 1)
    got = run_prompt(attention, 2, seq, 1024, 1)[:, 992:]
    assert torch.isfinite(got).all()
    far = (got[..., 1:29] > 0).sum(-1)  # before the tile's window, which begins at token 928, and without slice 0
    assert ((far > 0) & (far <= 4)).all()
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


def test_prefill_is_dense_until_lists_overflow_and_counts_what_it_attends():
    config = SparseConfig(**SMALL, summary="mean")
    seq = Sequence.random(640, 9, torch.float32)
    attention = make_attention({1: config}, torch.float32)
    attention.open(3, 1)
    got = run_prompt(attention, 3, seq, 640, 1)
    first_sparse = next(t for t in range(0, 640, 32) if max(0, t + 1 - 64) // 32 - 1 > 8)
    torch.testing.assert_close(got[1, :first_sparse], dense_ref(seq, 1)[:first_sparse], rtol=0, atol=5e-6)
    (figures,) = attention.take_stats()
    expected = 0
    for position in range(640):
        tile = position // 32 * 32
        window = position + 1 - max(0, tile + 1 - 64) // 32 * 32
        expected += position + 1 if position < first_sparse else 32 + 8 * 32 + window
    assert figures.slot == 3
    assert figures.attended == NUM_LAYERS * expected
    assert figures.context == NUM_LAYERS * 640 * 641 // 2


def test_decode_figures():
    config = SparseConfig(**SMALL, summary="mean")
    seq = Sequence.random(710, 10, torch.float32)
    attention = make_attention({1: config}, torch.float32)
    attention.open(0, 1)
    run_prompt(attention, 0, seq, 700, 1)
    attention.take_stats()
    run_decode(attention, 0, seq, 700, 701, 1)
    (first,) = attention.take_stats()
    lists = NUM_LAYERS * 3
    assert first.num_selected == first.newly_hit == lists * 4
    assert first.context == NUM_LAYERS * 701
    assert NUM_LAYERS * (16 + 64 + 3 * 32) < first.attended <= NUM_LAYERS * (16 + 64 + 4 * 32)
    assert first.margin > 0
    run_decode(attention, 0, seq, 701, 702, 1)
    (second,) = attention.take_stats()
    assert 0 < second.newly_hit < second.num_selected
    assert attention.take_stats() == []


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"page holds 64 tokens, fewer than the 128 tokens of sparse.block_size_fine"):
        make_attention({1: SparseConfig(block_size_fine=128)}, torch.float32, heads=(16, 16, 128))
    with pytest.raises(ValueError, match="the window must hold a slice until it is complete"):
        make_attention({1: replace(SparseConfig(**SMALL), window_size=16)}, torch.float32)
    with pytest.raises(ValueError, match="has 3 entries, but the model has a layer 3"):
        make_attention({1: SparseConfig(**SMALL, reselect_every=(1, 1, 1))}, torch.float32)
    attention = make_attention({1: SparseConfig(**SMALL)}, torch.float32)
    with pytest.raises(ValueError, match=r"no sparse configuration 4, there are \[1\]"):
        attention.open(0, 4)
    attention.open(0, 1)
    attention.open(1, 1)
    with pytest.raises(ValueError, match="decode segments or one prefill segment"):
        attention.prepare([Segment(0, 0, 5, 1, True), Segment(1, 0, 5, 1, True)])
    assert attention.first_layer == FIRST_LAYER
    attention.close()
    attention.close()
