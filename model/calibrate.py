"""Projections for the `code` summary from one text, and the layers that must scan often, found by ablation.

The text is prefilled through the engine's own stage, with a hook between the layers and their attention that keeps the
queries and keys it sees. Then, per layer, in closed form:

    minimise  E over queries q and keys k of  sum over heads h of (q_h . (k - k'))^2 w_h     with k' of `code_dim` numbers

where k are the keys of all KV heads end to end, mean removed, and w_h is the square of the mass that q_h puts beyond its
window: only such a query needs the scan, and a slice's share is wrong in proportion to it. With M the weighted second
moment of the queries (one block a KV head) and S = M^(1/2) the answer is the principal components U of S k, so
project = S U / scale and query = S^-1 U scale, the scale making full use of int8.

Retrieval layers: passages of the text are given again behind it, and each layer in turn loses all but sink and window.
The layers whose loss changes the next token's distribution most scan at every decode step, some more at every 4th, the
others rarely.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from qsa.errors import ConfigError
from qsa.kernels.dense_attention import dense_prefill, gather_tokens
from qsa.kernels.registry import DENSE_ID, SparseConfig
from qsa.kernels.summaries.code import CodeCalibration, save_calibration
from qsa.model.attention import StageAttention
from qsa.model.attention_plan import AttentionStep
from qsa.model.batch import Segment
from qsa.model.build import build_stage, kv_layout, resolve_dtype
from qsa.model.checkpoint.load import open_checkpoint
from qsa.model.decoder import StageModel

MIN_TOKENS = 1024  # a shorter text has no far tokens to speak of
CHUNK = 512  # tokens of a prefill step
WINDOW, SINK = 512, 32  # what counts as near
SKIP = 64  # first tokens whose keys are left out: the sink's are unlike all others
QUERY_STEP = 8  # every eighth query has its far mass measured
RANGE = 0.9999  # share of the keys whose codes fit int8 without being clipped
RIDGE = 1e-4  # added to M, as a share of its mean diagonal

PASSAGES, PASSAGE_TOKENS = 8, 40
# steps between two scans: of the sixth of the layers that matter most, of those up to three tenths, of all others
SCAN_TIERS = ((1 / 6, 1), (0.3, 4), (1.0, 16))

Progress = Callable[[str, int, int], None]


def calibrate(
    path: str | Path,
    text: str,
    *,
    out: str | Path,
    max_tokens: int = 8192,
    code_dim: int | None = None,
    progress: Progress | None = None,
) -> CodeCalibration:
    """Calibrate a model and write the file.

    Args:
        path:       a model as `open_checkpoint` takes it.
        text:       of the kind that will be served, at least 1024 tokens.
        out:        the safetensors file.
        max_tokens: tokens of the text to use, at most the model's longest sequence.
        code_dim:   int8 numbers a token and layer; default: an eighth of the layer's key width.
        progress:   called with (what is being done, done, of how many).

    Raises:
        ConfigError: the text is too short, or code_dim is more than the keys have.
    """
    report = progress or _silent
    checkpoint = open_checkpoint(str(path))
    spec = checkpoint.spec
    width = spec.num_kv_heads * spec.head_dim
    code_dim = max(8, width // 8) if code_dim is None else code_dim
    if not 0 < code_dim <= width:
        raise ConfigError(f"code_dim is {code_dim}, but a layer's keys have {width} numbers")
    token_ids = checkpoint.tokenizer().encode(text[: 16 * max_tokens])
    tail = PASSAGES * PASSAGE_TOKENS
    token_ids = token_ids[: min(max_tokens, spec.max_model_len) - tail]
    if len(token_ids) < MIN_TOKENS:
        raise ConfigError(f"calibration needs a text of at least {MIN_TOKENS + tail} tokens, found {len(token_ids)}")

    dtype = resolve_dtype("auto")
    kv = kv_layout(checkpoint, dtype)
    model = build_stage(
        checkpoint,
        first_layer=0,
        last_layer=spec.num_layers,
        num_chunks=spec.num_layers * kv.num_pages(len(token_ids) + tail),
        max_sequences=1,
        max_model_len=len(token_ids) + tail,
        sparse={DENSE_ID: SparseConfig(dense=True)},
    )
    assert isinstance(model, StageModel), "on the CPU a stage is a StageModel"
    try:
        recorder = Recorder(model.attention, spec.num_layers)
        model.attention = recorder  # type: ignore[assignment]
        _prefill(model, token_ids, report)
        recorder.is_recording = False
        layers = []
        for layer in range(spec.num_layers):
            queries, keys = recorder.take(layer)
            layers.append(solve_layer(queries, keys, spec.sm_scale, code_dim))
            report("solving layers", layer + 1, spec.num_layers)
        losses = ablate(model, recorder, token_ids, report)
    finally:
        model.close()
        checkpoint.close()
    project, query, mean = (torch.stack(parts) for parts in zip(*layers))
    calibration = CodeCalibration(project, query, mean, scan_intervals(losses))
    save_calibration(out, calibration, spec.name)
    Path(out).chmod(0o644)
    return calibration


class Recorder:
    """Stands between a stage's layers and their attention, keeps queries and keys, and can blind a layer.

    Attributes:
        is_recording: whether queries and keys are kept.
        blind_layer:  a layer that attends to sink, window and the current segment alone; None: no layer.
    """

    def __init__(self, attention: StageAttention, num_layers: int) -> None:
        self._attention = attention
        self.cache = attention.cache
        self.is_recording = True
        self.blind_layer: int | None = None
        self._queries: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self._keys: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def open(self, slot: int, sparse_id: int) -> None:
        self._attention.open(slot, sparse_id)

    def prepare(self, segments: list[Segment]) -> AttentionStep:
        return self._attention.prepare(segments)

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        if self.is_recording:
            self._queries[layer].append(q.clone())
            self._keys[layer].append(k.clone())
        out = self._attention.forward(layer, q, k, v, step)
        if layer == self.blind_layer:
            return self._near(layer, q, step.segments[0])
        return out

    def _near(self, layer: int, q: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Attention without the tokens between the sink and the window before the segment."""
        chunks = self.cache.page_chunks[layer, segment.slot].tolist()
        k, v = gather_tokens(self.cache.pages, chunks, segment.end)
        kept = torch.cat((torch.arange(SINK), torch.arange(segment.start - WINDOW, segment.end)))
        return dense_prefill(q, k[:, kept], v[:, kept], self._attention.sm_scale).reshape(len(q), -1)

    def take(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [num_tokens, num_q_heads, head_dim] and keys of a layer, which are forgotten here."""
        queries, keys = torch.cat(self._queries[layer]), torch.cat(self._keys[layer])
        self._queries[layer], self._keys[layer] = [], []
        return queries, keys

    def close(self) -> None:
        self._attention.close()


def solve_layer(
    queries: torch.Tensor, keys: torch.Tensor, sm_scale: float, code_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projection of one layer.

    Args:
        queries: [num_tokens, num_q_heads, head_dim], after RoPE
        keys:    [num_tokens, num_kv_heads, head_dim], after RoPE

    Returns:
        project [width, code_dim], query [width, code_dim], mean [width], float32.
    """
    joint = keys[SKIP:].flatten(1).double()
    mean = joint.mean(0)
    root, inverse = _roots(query_moment(queries, keys, sm_scale))
    centred = joint - mean
    white = centred @ root
    directions = torch.linalg.eigh(white.T @ white).eigenvectors[:, -code_dim:].flip(1)
    project, query = root @ directions, inverse @ directions
    reach = torch.quantile((centred @ project).abs().float(), RANGE, dim=0).double().clamp(min=1e-12)
    return (project * (127.0 / reach)).float(), (query * (reach / 127.0)).float(), mean.float()


def query_moment(queries: torch.Tensor, keys: torch.Tensor, sm_scale: float) -> torch.Tensor:
    """Second moment of the queries weighted by the square of their far mass: float64, one block a KV head."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    positions = torch.arange(min(num_tokens - 1, 2 * WINDOW), num_tokens, QUERY_STEP)
    sampled = queries[positions].float().view(len(positions), num_kv_heads, -1, head_dim)
    tokens = torch.arange(num_tokens)
    future = tokens > positions.unsqueeze(1)
    near = (tokens < SINK) | (tokens > positions.unsqueeze(1) - WINDOW)
    moment = torch.zeros(num_kv_heads, head_dim, num_kv_heads, head_dim, dtype=torch.float64)
    for head in range(num_kv_heads):
        transposed = keys[:, head].float().T.contiguous()
        for group in range(sampled.shape[2]):
            rows = sampled[:, head, group]
            scores = (rows @ transposed).mul_(sm_scale).masked_fill_(future, -torch.inf)
            mass = torch.softmax(scores, -1).masked_fill_(near, 0.0).sum(-1, keepdim=True)
            weighted = (rows * mass).double()
            moment[head, :, head] += weighted.T @ weighted / len(positions)
    return moment.view(num_kv_heads * head_dim, -1)


def _roots(moment: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square root of a symmetric matrix with a small ridge, and its inverse."""
    ridge = RIDGE * moment.diagonal().mean().clamp(min=1e-12)
    values, vectors = torch.linalg.eigh(moment + ridge * torch.eye(len(moment), dtype=moment.dtype))
    values = values.clamp(min=float(ridge) * 1e-3).sqrt()
    return (vectors * values) @ vectors.T, (vectors / values) @ vectors.T


def ablate(model: StageModel, recorder: Recorder, token_ids: list[int], report: Progress) -> list[float]:
    """How much the next token's distribution changes when a layer is blind to all but sink and window, per layer.

    Measured where the model must look far: on passages of the text, given again behind it.
    """
    start, num_layers = len(token_ids), model.spec.num_layers
    starts = [int(start * (0.03 + 0.82 * i / (PASSAGES - 1))) for i in range(PASSAGES)]
    tail = torch.tensor([token for first in starts for token in token_ids[first : first + PASSAGE_TOKENS]])
    segment = Segment(0, start, start + len(tail), DENSE_ID, True)
    rows = list(range(len(tail)))
    losses = []
    seen = model.forward([segment], tail, None, rows).log_softmax(-1)
    for layer in range(num_layers):
        recorder.blind_layer = layer
        blind = model.forward([segment], tail, None, rows).log_softmax(-1)
        losses.append(float((seen.exp() * (seen - blind)).sum(-1).mean()))
        report("ablating layers", layer + 1, num_layers)
    recorder.blind_layer = None
    return losses


def scan_intervals(losses: list[float]) -> tuple[int, ...]:
    """Decode steps between two scans of each layer: the fewer, the larger its loss. One layer at least scans at every step."""
    order = sorted(range(len(losses)), key=lambda layer: -losses[layer])
    intervals = [1] * len(losses)
    for (share, _), (_, every) in pairwise(SCAN_TIERS):
        for layer in order[max(1, round(share * len(losses))) :]:
            intervals[layer] = every
    return tuple(intervals)


def _prefill(model: StageModel, token_ids: list[int], report: Progress) -> None:
    model.attention.open(0, DENSE_ID)
    for start in range(0, len(token_ids), CHUNK):
        end = min(start + CHUNK, len(token_ids))
        model.forward([Segment(0, start, end, DENSE_ID, True)], torch.tensor(token_ids[start:end]), None, [])
        report("reading the text", end, len(token_ids))


def _silent(what: str, done: int, total: int) -> None:
    """No progress is shown."""
