"""StageModel: the layers of one stage, from token ids or hidden states to hidden states or logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qsa.kernels.pointwise import signed_sine
from qsa.model.attention import StageAttention
from qsa.model.batch import Segment, split_groups
from qsa.model.checkpoint.load import Checkpoint
from qsa.model.layers import DecoderLayer, Embedding, Head
from qsa.model.rope import rope_table
from qsa.model.weights import WeightPolicy

PREFILL_COPY_BYTES = 2 << 30  # packed models hold bfloat16 copies for prefill when those of the whole model take no more


class StageModel:
    """Layers [first_layer, last_layer) of a model; the first stage has the embedding too, the last one norm and head.

    The state: weights, and the attention whose KV cache `forward` writes to.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        first_layer: int,
        last_layer: int,
        attention: StageAttention,
        dtype: torch.dtype,
        quantization: str,
        max_model_len: int,
        device: torch.device,
        prefill_copy_bytes: int = PREFILL_COPY_BYTES,
    ) -> None:
        """Read this stage's weights, tensor by tensor.

        Args:
            quantization:       as `WeightPolicy.choose` reads it.
            max_model_len:      longest sequence in tokens; the rotation is made for it.
            prefill_copy_bytes: most bytes of bfloat16 copies of the whole model; above it they are made on the fly.
        """
        spec = checkpoint.spec
        self.spec, self.dtype, self.device = spec, dtype, device
        self.first_layer, self.last_layer = first_layer, last_layer
        self.attention = attention
        self.cache = attention.cache
        copies = checkpoint.stage_weight_bytes(0, spec.num_layers, bytes_per_weight=2)  # however the model is split
        policy = WeightPolicy.choose(quantization, dtype, device, keeps_copies=copies <= prefill_copy_bytes)
        self._embedding = Embedding(checkpoint.read("embed_tokens.weight"), policy) if self.is_first else None
        self._layers = [DecoderLayer(spec, layer, checkpoint.read, policy) for layer in range(first_layer, last_layer)]
        self._head: Head | None = None
        if self.is_last:
            table = checkpoint.read("embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight")
            is_float = policy.target is None and policy.kernel_of(table) == "float"
            if spec.tie_word_embeddings and self._embedding is not None and is_float:
                table = self._embedding.table  # one copy for both
            self._head = Head(checkpoint.read("norm.weight"), table, policy, spec.rms_norm_eps)
        cos, sin = rope_table(spec.rope, max_model_len)
        self._cos = cos.unsqueeze(1).to(device)  # [max_model_len, 1, head_dim]
        self._sin = signed_sine(sin).unsqueeze(1).to(device)

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
        """Bytes of embedding, matrices and head held."""
        held = [*self._layers, *(part for part in (self._embedding, self._head) if part is not None)]
        return sum(part.nbytes for part in held)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        token_ids: torch.Tensor | None,
        hidden: torch.Tensor | None,
        sample_rows: Sequence[int],
    ) -> torch.Tensor:
        """Run this stage's layers on one step.

        Args:
            segments:    what is computed: decode segments first, then prefill ones; rows are packed in that order.
            token_ids:   int64 [num_tokens] on the first stage, else None.
            hidden:      [num_tokens, hidden_size] on the other stages, else None; not changed.
            sample_rows: rows whose logits are wanted, in rising order; read by the last stage only.

        Returns:
            [num_tokens, hidden_size]; on the last stage, float32 logits [len(sample_rows), vocab_size].
        """
        x = self._inputs(segments, token_ids, hidden)
        groups = split_groups(segments)
        if [segment for group in groups for segment in group] != list(segments):
            raise ValueError("decode segments must come before prefill segments")
        first = 0
        sampled: list[torch.Tensor] = []
        for group in groups:
            end = first + sum(segment.extend_len for segment in group)
            rows = [row - first for row in sample_rows if first <= row < end] if self.is_last else None
            sampled.append(self._run_group(group, x[first:end], rows))
            first = end
        if self._head is None:
            return x
        wanted = torch.cat(sampled)
        if wanted.shape[0] == 0:
            return torch.empty(0, self.spec.vocab_size)
        return self._head.forward(wanted)

    def _inputs(self, segments: Sequence[Segment], token_ids: torch.Tensor | None, hidden: torch.Tensor | None) -> torch.Tensor:
        """The residual stream at the stage's entry, in memory of its own."""
        num_tokens = sum(segment.extend_len for segment in segments)
        given = token_ids if self.is_first else hidden
        if given is None or given.shape[0] != num_tokens:
            name = "token_ids" if self.is_first else "hidden"
            found = "nothing" if given is None else list(given.shape)
            raise ValueError(f"the segments have {num_tokens} tokens, so {name} must have as many rows, found {found}")
        return given.to(self.dtype, copy=True) if self._embedding is None else self._embedding.forward(given)

    def _run_group(self, group: Sequence[Segment], x: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
        """All layers on one group; x [num_tokens, hidden_size] is updated in place.

        rows: None, or on the last stage the rows whose logits are wanted. The last layer of a prefill segment computes
        nothing but K and V for the others.

        Returns:
            x, or its `rows` when they are given.
        """
        step = self.attention.prepare(group)
        cos, sin = self._rotation(group)
        is_prefill = group[0].is_prefill
        for layer in self._layers[:-1]:
            layer.finish(x, layer.attend(x, cos, sin, self.attention, step, is_prefill), is_prefill)
        layer = self._layers[-1]
        attended = layer.attend(x, cos, sin, self.attention, step, is_prefill)
        if rows is not None and len(rows) < x.shape[0]:
            index = torch.tensor(rows, dtype=torch.int64, device=x.device)
            x, attended, is_prefill = x[index], attended[index], False
        elif rows is not None:
            is_prefill = False
        if x.shape[0]:
            layer.finish(x, attended, is_prefill)
        return x

    def _rotation(self, group: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        if len(group) == 1:
            return self._cos[group[0].start : group[0].end], self._sin[group[0].start : group[0].end]
        positions = torch.tensor([segment.start for segment in group], device=self.device)
        return self._cos[positions], self._sin[positions]

    def close(self) -> None:
        """Give weights, attention workspace and KV memory back. Calling it again does nothing."""
        for layer in self._layers:
            layer.free()
        if self._head is not None:
            self._head.free()
        self._layers, self._embedding, self._head = [], None, None
        self.attention.close()
        self.cache.close()
