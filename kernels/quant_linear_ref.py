"""Reference for kernels/quant_linear.py: dequantise in the given type, then multiply."""

import torch


def dequantize_groups_ref(values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """w = scale * value + minimum, one scale and minimum a group of consecutive values of a row.

    Args:
        values:  [out_features, in_features] integers
        scale:   [out_features, in_features / group]; the result has its dtype
        minimum: like scale

    Returns:
        [out_features, in_features]
    """
    grouped = values.view(*scale.shape, -1).to(scale.dtype)
    return torch.addcmul(minimum.unsqueeze(-1), grouped, scale.unsqueeze(-1)).flatten(1)


def quant_linear_ref(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ dequantised.T + bias, computed in the dtype of x.

    Args:
        x:       [num_rows, in_features]
        values, scale, minimum: as in dequantize_groups_ref
        bias:    [out_features] or None

    Returns:
        [num_rows, out_features]
    """
    out = x @ dequantize_groups_ref(values, scale.to(x.dtype), minimum.to(x.dtype)).T
    return out if bias is None else out + bias.to(x.dtype)
