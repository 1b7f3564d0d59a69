"""check_tensor(): shape, dtype and device of an argument, with a message that names the tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Fail unless `tensor` has that shape (None: any length), one of the dtypes, and lies on the device.

    Raises:
        ValueError: naming the tensor, what was wanted and what was found.
    """
    found = list(tensor.shape)
    if len(found) != len(shape) or any(want is not None and want != have for want, have in zip(shape, found)):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {found}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
