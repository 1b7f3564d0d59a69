"""GpuStageModel: the layers of one stage on a card. Decode steps replay CUDA graphs, prefill chunks are launched one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsa.kernels.pointwise_triton import add_rms_norm
from qsa.kernels.skinny_linear_triton import SkinnyLinear
from qsa.model.batch import Segment, split_groups
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.decode_graph import DecodeBuffers, DecodeRows, DecodeSteps, ReadyStep
from qsa.model.gpu_attention import DecodeStep, GpuAttention, PrefillStep
from qsa.model.gpu_warm_up import warm_up
from qsa.model.spec import ModelSpec
from qsa.model.weights import ReadWeight, Weight, WeightPolicy, make_head, make_linear, plain_weight

FEW_ROWS = 16  # up to as many rows of a prompt go to the head as those of a decode step do


class GpuLayer:
    """Attention and gated MLP around a residual stream. What a product adds to it is added by the norm that follows."""

    def __init__(self, spec: ModelSpec, local: int, layer: int, read: ReadWeight, policy: WeightPolicy) -> None:
        """Read layer `layer` of the model, number `local` of the stage; `read` gives a tensor by its canonical name."""
        self.local, self._eps = local, spec.rms_norm_eps
        prefix = f"layers.{layer}."

        def linear(names: Sequence[str], has_bias: bool) -> Any:
            weights = [read(f"{prefix}{name}.weight") for name in names]
            biases = [plain_weight(read(f"{prefix}{name}.bias")) if has_bias else None for name in names]
            return make_linear(weights, biases, policy)

        def norm(name: str) -> torch.Tensor:
            return policy.to_float(read(f"{prefix}{name}.weight"))

        self._input_norm, self._mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self._qkv = linear([f"self_attn.{x}_proj" for x in "qkv"], spec.qkv_bias)
        self._o = linear(["self_attn.o_proj"], spec.o_bias)
        self._gate_up = linear(["mlp.gate_proj", "mlp.up_proj"], spec.mlp_bias)
        self._down = linear(["mlp.down_proj"], spec.mlp_bias)
        for product in (self._qkv, self._o, self._gate_up):  # behind norms and attention; what is before `down` leaves no room
            if isinstance(product, SkinnyLinear):
                product.begin_early(policy.device)
        self._head_norm: torch.Tensor | None = None
        if spec.qk_norm:
            q_norm, k_norm = (norm(f"self_attn.{x}_norm").float() for x in "qk")
            self._head_norm = torch.cat((q_norm.expand(spec.num_q_heads, -1), k_norm.expand(spec.num_kv_heads, -1)))

    @property
    def _linears(self) -> tuple[Any, ...]:
        return self._qkv, self._o, self._gate_up, self._down

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's matrices."""
        return sum(linear.nbytes for linear in self._linears)

    def decode(self, x: torch.Tensor, parts: torch.Tensor | None, attention: GpuAttention, step: DecodeStep) -> torch.Tensor:
        """The rows of a decode step.

        Args:
            x:     [batch, hidden_size], the residual stream; updated in place.
            parts: float32 [splits, batch, hidden_size], what the layer before adds to it.

        Returns:
            Like parts, what this layer adds.
        """
        qkv = self._qkv.forward(add_rms_norm(x, parts, self._input_norm, self._eps))
        attended = attention.decode(self.local, qkv, step, self._head_norm)
        normed = add_rms_norm(x, self._o.forward_parts(attended), self._mlp_norm, self._eps)
        parts = self._down.forward_parts(self._gate_up.forward_gated(normed))
        return parts

    def write(self, x: torch.Tensor, added: torch.Tensor | None, attention: GpuAttention, step: PrefillStep) -> torch.Tensor:
        """The first part of `prefill`: K, V and summaries of a chunk are written. Returns the queries.

        added: [num_tokens, hidden_size], what the layer before adds to x.
        """
        qkv = self._qkv.forward_prefill(add_rms_norm(x, added, self._input_norm, self._eps))
        return attention.write(self.local, qkv, step, self._head_norm)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The part after attention, for any rows of a chunk. Returns what the layer adds to x."""
        normed = add_rms_norm(x, self._o.forward_prefill(attended.to(x.dtype)), self._mlp_norm, self._eps)
        added: torch.Tensor = self._down.forward_prefill(self._gate_up.forward_gated_prefill(normed))
        return added

    def free(self) -> None:
        for linear in self._linears:
            linear.free()


class GpuHead:
    """Last norm and projection to the vocabulary."""

    def __init__(self, norm: torch.Tensor, linear: Any, eps: float) -> None:
        self._norm, self._linear, self._eps = norm, linear, eps

    @property
    def nbytes(self) -> int:
        return int(self._linear.nbytes)

    def forward(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        """[num_rows, hidden_size] and what the last layer adds to it; float32 logits [num_rows, vocab_size]."""
        logits: torch.Tensor = self._linear.forward(add_rms_norm(x, added, self._norm, self._eps))
        return logits

    def forward_prefill(self, x: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        """The same for rows of one prompt."""
        if len(x) <= FEW_ROWS:
            return self.forward(x, added)
        logits: torch.Tensor = self._linear.forward_prefill(add_rms_norm(x, added, self._norm, self._eps))
        return logits

    def free(self) -> None:
        self._linear.free()


class GpuStageModel:
    """Layers [first_layer, last_layer) of a model; the first stage has the embedding too, the last one norm and head.

    The state: weights, decode buffers and graphs, and the attention whose KV cache `forward` writes to.
    """

    backend = "triton"

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        first_layer: int,
        last_layer: int,
        attention: GpuAttention,
        dtype: torch.dtype,
        policy: WeightPolicy,
        prefill_chunk: int,
    ) -> None:
        """Read this stage's weights, tensor by tensor.

        Args:
            policy:        in which form weights are held.
            prefill_chunk: most tokens of a prefill segment, for the warm-up.
        """
        spec = checkpoint.spec
        self.spec, self.dtype, self.device = spec, dtype, policy.device
        self.first_layer, self.last_layer = first_layer, last_layer
        self.attention, self.cache, self._prefill_chunk = attention, attention.cache, prefill_chunk
        self._embedding: torch.Tensor | None = None
        if self.is_first:
            self._embedding = policy.to_float(checkpoint.read("embed_tokens.weight"))
        self._layers = [
            GpuLayer(spec, layer - first_layer, layer, checkpoint.read, policy) for layer in range(first_layer, last_layer)
        ]
        self._head: GpuHead | None = None
        self._shares_table = spec.tie_word_embeddings and self.is_first and policy.target is None  # embedding and head
        if self.is_last:
            table: Weight | None = self._embedding if self._shares_table else None
            if table is None:
                table = checkpoint.read("embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight")
            self._head = GpuHead(policy.to_float(checkpoint.read("norm.weight")), make_head(table, policy), spec.rms_norm_eps)
        self._steps = DecodeSteps(
            self._decode_rows,
            num_layers=last_layer - first_layer,
            max_sequences=self.cache.max_sequences,
            hidden_size=None if self.is_first else spec.hidden_size,
            dtype=dtype,
            device=self.device,
        )

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.last_layer == self.spec.num_layers

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states between stages."""
        return self.spec.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of embedding, matrices and head held; a table that is both counts once."""
        held = sum(layer.nbytes for layer in self._layers)
        if self._embedding is not None:
            held += self._embedding.nbytes
        if self._head is not None and not self._shares_table:
            held += self._head.nbytes
        return held

    @property
    def num_graphs(self) -> int:
        """CUDA graphs captured so far."""
        return self._steps.num_graphs

    def warm_up(self, report: Callable[[int, int, str], None] | None = None) -> None:
        """Compile every kernel, capture every graph: what would otherwise happen in the first requests. No slot may be open.

        report: told steps done, steps in all, and what is being done.
        """
        warm_up(self, self._steps, self._prefill_chunk, report)

    def capture(self, sparse_id: int, batch: int) -> None:
        """The part of `warm_up` for decode steps of `batch` sequences of one configuration alone."""
        size = min(size for size in self._steps.sizes if size >= batch)
        for scans_rare in self.attention.scan_forms(sparse_id):
            self._steps.capture(sparse_id, size, scans_rare)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        sample_rows: Sequence[int],
    ) -> torch.Tensor:
        """Run this stage's layers on one step. The host does not wait for the device; what is returned may not be there yet.

        Args:
            segments:    what is computed: decode segments first, then prefill ones; rows are packed in that order.
            token_ids:   int [num_tokens] on the first stage, else None; on the host or on the device.
            hidden:      [num_tokens, hidden_size] on the other stages, else None; not changed.
            sample_rows: rows whose logits are wanted, in rising order; read by the last stage only.

        Returns:
            [num_tokens, hidden_size]; on the last stage, float32 logits [len(sample_rows), vocab_size].
        """
        given = self._checked(segments, token_ids, hidden)
        groups = split_groups(segments)
        if [segment for group in groups for segment in group] != list(segments):
            raise ValueError("decode segments must come before prefill segments")
        outs = []
        first = 0
        for group in groups:
            end = first + sum(segment.extend_len for segment in group)
            rows = [row - first for row in sample_rows if first <= row < end] if self.is_last else None
            run = self._prefill if group[0].is_prefill else self._decode
            outs.append(run(group, given[first:end], rows))
            first = end
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _checked(
        self, segments: Sequence[Segment], token_ids: torch.Tensor | None, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        num_tokens = sum(segment.extend_len for segment in segments)
        given = token_ids if self.is_first else hidden
        if given is None or given.shape[0] != num_tokens:
            name = "token_ids" if self.is_first else "hidden"
            found = "nothing" if given is None else list(given.shape)
            raise ValueError(f"the segments have {num_tokens} tokens, so {name} must have as many rows, found {found}")
        return given

    # decode

    def _decode(self, group: Sequence[Segment], given: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """Decode segments: one step a configuration, from graphs where they are captured."""
        members: dict[int, list[int]] = {}
        for place, segment in enumerate(group):
            members.setdefault(segment.sparse_id, []).append(place)
        plans = [
            self.attention.plan_decode(sparse_id, [group[i] for i in places], places if len(members) > 1 else None)
            for sparse_id, places in members.items()
        ]
        out = self._run_decode(plans[0], given)[0] if len(plans) == 1 else self._decode_mixed(plans, given, len(group))
        if rows is None or len(rows) == len(group):
            return out
        return out[torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)]

    def _decode_mixed(self, plans: Sequence[DecodeRows], given: torch.Tensor, num_rows: int) -> torch.Tensor:
        out: torch.Tensor | None = None
        for plan in plans:
            part, places = self._run_decode(plan, given)
            out = part.new_empty(num_rows, part.shape[1]) if out is None else out
            out.index_copy_(0, places.long(), part)
        assert out is not None
        return out

    def _run_decode(self, plan: DecodeRows, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run_ready(self._steps.prepare(plan), given)

    def _run_ready(self, ready: ReadyStep, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, figures, places = self._steps.run(ready, given)
        self.attention.count(ready.rows, figures)
        return out, places

    @torch.inference_mode()
    def prepare_decode(self, segments: Sequence[Segment]) -> ReadyStep | None:
        """Do ahead what `forward` of these decode segments does on the host before it launches anything.

        To be followed by `run_prepared` or `drop_prepared`, and by no `forward` of the same slots before that.

        Returns:
            None where it is not done ahead: the tokens need chunks, which are taken only by a step that runs, or the rows have
            several configurations.
        """
        sparse_ids = {segment.sparse_id for segment in segments}
        if len(sparse_ids) != 1 or not all(self.cache.has_room(segment.slot, segment.end) for segment in segments):
            return None
        return self._steps.prepare(self.attention.plan_decode(sparse_ids.pop(), segments, None))

    @torch.inference_mode()
    def run_prepared(self, ready: ReadyStep, given: torch.Tensor) -> torch.Tensor:
        """What `forward` returns for the segments that were prepared, on the last stage with all rows wanted.

        given: token_ids or hidden, as `forward` takes them.
        """
        return self._run_ready(ready, given)[0]

    def drop_prepared(self, ready: ReadyStep) -> None:
        """The step is not run after all."""
        self.attention.unplan_decode(ready.rows)

    def _decode_rows(
        self, sparse_id: int, buffers: DecodeBuffers, scans_rare: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The launches of a decode step: hidden states or logits, and the figures of its selection."""
        if self._embedding is not None:
            x = self._embedding.index_select(0, buffers.token_ids)
        else:
            assert buffers.hidden is not None
            x = buffers.hidden
        step = self.attention.begin(sparse_id, buffers, scans_rare)
        parts: torch.Tensor | None = None
        for layer in self._layers:
            parts = layer.decode(x, parts, self.attention, step)
        assert parts is not None
        figures = self.attention.figures(step)
        if self._head is not None:
            return self._head.forward(x, parts), figures
        return x.add_(parts.sum(0)), figures

    # prefill

    def _prefill(self, group: Sequence[Segment], given: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """One prefill segment. rows: None, or on the last stage those whose logits are wanted: the last layer computes
        nothing but K and V for the others."""
        step = self.attention.plan_prefill(group[0])
        given = given.to(self.device, non_blocking=True)
        x = given.to(self.dtype, copy=True) if self._embedding is None else self._embedding.index_select(0, given)
        added: torch.Tensor | None = None
        for layer in self._layers[:-1]:
            q = layer.write(x, added, self.attention, step)
            added = layer.finish(x, self.attention.prefill(layer.local, q, step))
        layer = self._layers[-1]
        q = layer.write(x, added, self.attention, step)
        if self._head is None or rows is None:
            return x.add_(layer.finish(x, self.attention.prefill(layer.local, q, step)))
        if not rows:
            return torch.empty(0, self.spec.vocab_size, device=self.device)
        attended = self.attention.prefill(layer.local, q, step)
        if len(rows) < len(x):
            index = torch.tensor(rows, dtype=torch.int64).to(self.device, non_blocking=True)
            x, attended = x.index_select(0, index), attended.index_select(0, index)
        return self._head.forward_prefill(x, layer.finish(x, attended))

    def close(self) -> None:
        """Give weights, graphs, attention workspace and KV memory back. Calling it again does nothing."""
        self._steps.close()
        for layer in self._layers:
            layer.free()
        if self._head is not None:
            self._head.free()
        self._layers, self._embedding, self._head = [], None, None
        self.attention.close()
        self.cache.close()
