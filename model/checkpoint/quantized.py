"""A weight as a GGUF file stores it: low-bit rows, dequantised on demand or split into their exact parts.

The bits are interpreted by the `gguf` library; the three types that map on PyTorch's own low-bit kernels
(groups of 32 with one scale: Q4_0, Q4_1, Q8_0) are also handed out in parts, so that nothing is rounded twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import gguf
import torch

GROUP_SIZE = 32
PART_KINDS = ("Q4_0", "Q4_1", "Q8_0")
KINDS = (*PART_KINDS, "Q4_K", "Q5_K", "Q6_K")


@dataclass(frozen=True)
class QuantizedTensor:
    """Rows of quantised blocks.

    Attributes:
        kind:  GGUF type name, one of KINDS.
        shape: [rows, columns] of the weight, in elements.
        data:  uint8 [rows, bytes per row], as in the file.
    """

    kind: str
    shape: tuple[int, int]
    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    @property
    def has_parts(self) -> bool:
        """Whether `parts` is available: groups of 32 along a row with one scale and one minimum."""
        return self.kind in PART_KINDS

    def select_rows(self, rows: torch.Tensor) -> QuantizedTensor:
        """These rows only, in this order; blocks run along a row, so any choice of rows is exact."""
        return QuantizedTensor(self.kind, (rows.numel(), self.shape[1]), self.data.index_select(0, rows))

    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whole numbers, scale and minimum: weight = scale * values + minimum, exact in float32 up to that rounding.

        Returns:
            values:  [rows, columns], uint8 in 0..15 for Q4_0 and Q4_1, int8 for Q8_0.
            scale:   float32 [rows, columns / 32].
            minimum: float32 [rows, columns / 32]; zero for Q8_0.

        Raises:
            ValueError: the kind has no such parts.
        """
        if not self.has_parts:
            raise ValueError(f"parts of {self.kind} are not available, only of {', '.join(PART_KINDS)}")
        rows, columns = self.shape
        groups = columns // GROUP_SIZE
        blocks = self.data.reshape(rows, groups, -1)  # [rows, groups, bytes per block]
        scale = _float16_at(blocks, 0)
        if self.kind == "Q8_0":
            values = blocks[..., 2:].contiguous().view(torch.int8).reshape(rows, columns)
            return values, scale, torch.zeros_like(scale)
        minimum = _float16_at(blocks, 2) if self.kind == "Q4_1" else scale * -8.0
        packed = blocks[..., 4 if self.kind == "Q4_1" else 2 :]  # low nibbles first half of a group, high ones the second
        values = torch.cat((packed & 15, packed >> 4), dim=-1).reshape(rows, columns)
        return values, scale, minimum

    @property
    def values(self) -> torch.Tensor:
        return self.parts()[0]

    @property
    def scale(self) -> torch.Tensor:
        return self.parts()[1]

    @property
    def minimum(self) -> torch.Tensor:
        return self.parts()[2]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight [rows, columns]: computed in float32 as the `gguf` library does, then rounded to `dtype`."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype)
        step = max(1, (1 << 22) // columns)  # a few rows at a time: the float32 copy of a whole head can be gigabytes
        for start in range(0, rows, step):
            out[start : start + step] = self._dequantize_rows(start, min(start + step, rows))
        return out

    def _dequantize_rows(self, start: int, end: int) -> torch.Tensor:
        part = QuantizedTensor(self.kind, (end - start, self.shape[1]), self.data[start:end])
        if self.has_parts:
            values, scale, minimum = part.parts()
            grouped = values.reshape(end - start, -1, GROUP_SIZE).float() * scale[..., None]
            return (grouped + minimum[..., None]).reshape(part.shape)
        kind = gguf.GGMLQuantizationType[self.kind]
        return torch.from_numpy(gguf.quants.dequantize(part.data.numpy(), kind)).reshape(part.shape)


def _float16_at(blocks: torch.Tensor, byte: int) -> torch.Tensor:
    """The two bytes at `byte` of every block as float32, [rows, groups]."""
    return blocks[..., byte : byte + 2].contiguous().view(torch.float16).squeeze(-1).float()
