"""matplotlib, which nothing but the figures needs: loaded when one is drawn, and told from a fault when it is not there."""

from __future__ import annotations

from typing import Any


def load_pyplot() -> Any:
    """pyplot, drawing to files.

    Raises:
        SystemExit: matplotlib is not installed; the message is how to install it.
    """
    try:
        import matplotlib  # noqa: PLC0415  only figures need it
    except ModuleNotFoundError:
        raise SystemExit("figures are drawn by matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415  after the backend is chosen

    return pyplot
