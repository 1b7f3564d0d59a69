"""The pieces of a decoder: token embedding, linear layers in the form a checkpoint allows, one decoder layer, the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qsa.kernels.linear import FloatLinear, can_fuse_gate, gated_linear
from qsa.kernels.quant_linear import PREFILL_ROWS
from qsa.model.attention import StageAttention
from qsa.model.attention_plan import AttentionStep
from qsa.model.checkpoint.packed import PackedTensor
from qsa.model.checkpoint.quantized import QuantizedTensor
from qsa.model.spec import ModelSpec
from qsa.model.weights import Linear, ReadWeight, Weight, WeightPolicy, make_head, make_linear, plain_weight


class Embedding:
    """Rows of the token table in the activations' type; a packed table is dequantised row by row."""

    def __init__(self, table: Weight, policy: WeightPolicy) -> None:
        self._dtype = policy.dtype
        keeps_packed = isinstance(table, QuantizedTensor) and policy.is_packed and not policy.keeps_copies
        keeps_packed &= not isinstance(table, PackedTensor)  # whose rows cannot be read one by one
        self.table: Weight = table if keeps_packed else policy.to_float(table)

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [num_tokens] to [num_tokens, hidden_size]."""
        if isinstance(self.table, QuantizedTensor):
            return self.table.select_rows(token_ids).dequantize(self._dtype)
        return self.table.index_select(0, token_ids)


class Head:
    """Last norm and projection to the vocabulary; rows are independent of each other."""

    def __init__(self, norm: Weight, table: Weight, policy: WeightPolicy, eps: float) -> None:
        self._norm = policy.operator("rms_norm", weight=policy.to_float(norm), eps=eps)
        self._linear = make_head(table, policy)
        self._input_dtype = policy.dtype if isinstance(self._linear, FloatLinear) else torch.float32

    @property
    def nbytes(self) -> int:
        return self._linear.nbytes + self._norm.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] to float32 logits [num_rows, vocab_size]."""
        normed = self._norm.forward(x.to(self._input_dtype))
        return self._linear.forward(normed).float()

    def free(self) -> None:
        self._linear.free()
        self._norm.free()


class DecoderLayer:
    """Attention and gated MLP around a residual stream, for Llama, Mistral, Qwen2 and Qwen3."""

    def __init__(self, spec: ModelSpec, layer: int, read: ReadWeight, policy: WeightPolicy) -> None:
        """Read and pack layer `layer` (numbered in the whole model); `read` gives a tensor by its canonical name."""
        self.layer = layer
        self._q_heads, self._kv_heads, self._head_dim = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
        self._rotated_heads = spec.num_q_heads + spec.num_kv_heads
        eps = spec.rms_norm_eps
        prefix = f"layers.{layer}."

        def linear(names: Sequence[str], has_bias: bool) -> Linear:
            weights = [read(f"{prefix}{name}.weight") for name in names]
            biases = [plain_weight(read(f"{prefix}{name}.bias")) if has_bias else None for name in names]
            return make_linear(weights, biases, policy)

        def norm(name: str) -> Any:
            return policy.operator("rms_norm", weight=policy.to_float(read(f"{prefix}{name}.weight")), eps=eps)

        self._input_norm = norm("input_layernorm")
        self._qkv = linear([f"self_attn.{x}_proj" for x in "qkv"], spec.qkv_bias)
        self._o = linear(["self_attn.o_proj"], spec.o_bias)
        self._mlp_norm = norm("post_attention_layernorm")
        self._gate_up = linear(["mlp.gate_proj", "mlp.up_proj"], spec.mlp_bias)
        self._down = linear(["mlp.down_proj"], spec.mlp_bias)
        self._rotary, self._gate = policy.operator("rotary"), policy.operator("silu_multiply")
        self._rotate, self._silu_multiply = self._rotary.forward, self._gate.forward
        self._bare_norm = policy.operator("rms_norm", eps=eps)
        self._can_fuse_gate = policy.backend == "torch" and can_fuse_gate(policy.dtype)
        self._head_norm: torch.Tensor | None = None
        if spec.qk_norm:
            q_norm, k_norm = (policy.to_float(read(f"{prefix}self_attn.{x}_norm.weight")) for x in "qk")
            self._head_norm = torch.cat((q_norm.expand(self._q_heads, -1), k_norm.expand(self._kv_heads, -1)))

    @property
    def _linears(self) -> tuple[Linear, ...]:
        return self._qkv, self._o, self._gate_up, self._down

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's matrices."""
        return sum(linear.nbytes for linear in self._linears)

    def attend(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: StageAttention,
        step: AttentionStep,
        is_prefill: bool,
    ) -> torch.Tensor:
        """Project, rotate, attend; K and V of the rows are written.

        Args:
            x:        [num_tokens, hidden_size], not changed.
            cos, sin: [num_tokens, 1, head_dim], of the tokens' positions; sin from `signed_sine`.

        Returns:
            [num_tokens, num_q_heads * head_dim], for `finish`.
        """
        if is_prefill:
            qkv = self._qkv.forward_prefill(self._input_norm.forward_prefill(x))
        else:
            qkv = self._qkv.forward(self._input_norm.forward(x))
        heads = qkv.view(qkv.shape[0], -1, self._head_dim)
        rotated = heads.narrow(1, 0, self._rotated_heads)
        if self._head_norm is not None:
            normed = self._bare_norm.forward_prefill(rotated) if is_prefill else self._bare_norm.forward(rotated)
            rotated = normed.mul_(self._head_norm)
        rotated = self._rotate(rotated, cos, sin)
        q = rotated.narrow(1, 0, self._q_heads)
        k = rotated.narrow(1, self._q_heads, self._kv_heads)
        v = heads.narrow(1, self._rotated_heads, self._kv_heads)
        return attention.forward(self.layer, q, k, v, step)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, is_prefill: bool) -> None:
        """Output projection and MLP; x [num_tokens, hidden_size] is updated in place."""
        if is_prefill:
            x.add_(self._o.forward_prefill(attended))
            x.add_(self._down.forward_prefill(self._gate_prefill(self._mlp_norm.forward_prefill(x))))
        else:
            x.add_(self._o.forward(attended))
            gate_up = self._gate_up.forward(self._mlp_norm.forward(x))
            x.add_(self._down.forward(self._silu_multiply(gate_up)))

    def _gate_prefill(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up for the rows of a prefill chunk, in the fused form where weights and library allow it."""
        whole = getattr(self._gate_up, "whole_weight", None) if x.shape[0] >= PREFILL_ROWS else None
        if whole is not None and self._can_fuse_gate:
            return gated_linear(x, whole)
        return self._gate.forward_prefill(self._gate_up.forward_prefill(x))

    def free(self) -> None:
        for operator in (*self._linears, self._input_norm, self._mlp_norm, self._bare_norm, self._rotary, self._gate):
            operator.free()
