"""The tiles of a prefill chunk that select, as a card wants them: made on the device, without its waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsa.kernels.registry import SparseConfig
from qsa.kernels.sparse_prefill import first_sparse_tile, tile_window_slice
from qsa.model.batch import Segment


@dataclass(frozen=True)
class GpuTiles:
    """Tiles of consecutive queries; as TilePlan of the CPU, without its masks.

    Attributes:
        first:         position of the first tile's first query; may lie before the chunk when the chunk cuts a tile.
        num_slices:    candidates of the last tile are slices 1 .. num_slices - 1.
        window_slices: int32 [num_tiles], first slice of each tile's window; its candidates are slices 1 .. that - 1.
        sampled:       int64 [num_tiles, samples], rows that choose a tile's list, 0 the first query that selects.
        weights:       float32 [num_tiles, samples], 0 where a sampled row is not a query of the chunk.
    """

    first: int
    num_slices: int
    window_slices: torch.Tensor
    sampled: torch.Tensor
    weights: torch.Tensor

    @property
    def num_tiles(self) -> int:
        return len(self.window_slices)


def plan_gpu_tiles(segment: Segment, config: SparseConfig, device: torch.device) -> tuple[int, GpuTiles | None]:
    """Where a chunk's queries begin to select, and their tiles; None when none does."""
    size, tile = config.block_size_fine, config.prefill_tile
    list_size = config.prefill_factor * config.top_k_fine
    first = first_sparse_tile(segment.start, tile, config.window_size, size, list_size)
    start, end = min(max(first, segment.start), segment.end), segment.end
    if start == end:
        return end, None
    num_tiles = -(-(end - first) // tile)
    starts = first + tile * torch.arange(num_tiles, device=device)
    step = min(config.sample_every, tile)
    sampled = starts.unsqueeze(1) + torch.arange(step - 1, tile, step, device=device)
    sampled[:, -1] = (starts + tile).clamp(max=end) - 1  # the last query of a tile inside the chunk is always asked
    weights = ((sampled >= start) & (sampled < end)).float()
    num_slices = tile_window_slice(first + (num_tiles - 1) * tile, config.window_size, size)
    windows = torch.div(starts + 1 - config.window_size, size, rounding_mode="floor").to(torch.int32)
    return start, GpuTiles(first, num_slices, windows, sampled.clamp(start, end - 1) - start, weights)


def near_tokens(start: int, end: int, config: SparseConfig) -> int:
    """Tokens of slice 0 and of the windows that the queries [start, end) attend to, summed; all of them select."""
    size, tile = config.block_size_fine, config.prefill_tile
    total = size * (end - start)
    for tile_start in range(start // tile * tile, end, tile):
        first, last = max(start, tile_start), min(end, tile_start + tile)
        window = tile_window_slice(tile_start, config.window_size, size) * size
        total += (first + 1 + last) * (last - first) // 2 - window * (last - first)
    return total
