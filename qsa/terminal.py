"""What streams look like in a terminal: a progress line during prefill, then the text; plain lines when nobody watches."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.status import Status

from qsa.client import Delta, server_url
from qsa.client import Progress as Prefill
from qsa.config import EngineConfig
from qsa.server_process import running_server

console = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)  # everything that is not the answer


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner with the last thing heard beside it; on a pipe, one line. Yields the function that changes the rest."""
    if not notes.is_terminal:
        notes.print(text, markup=False)
        yield lambda line: None
        return
    with Status(text, console=notes) as status:
        yield lambda line: status.update(f"{text} [dim]{line[:80].replace('[', '(')}[/dim]")


@contextlib.contextmanager
def server_at(url: str | None, config: EngineConfig) -> Iterator[str]:
    """The address of the server at `url`, or of one that is started for this block and stopped after it."""
    with contextlib.ExitStack() as stack:
        if url is None:
            with working("starting the engine") as say:
                url = stack.enter_context(running_server(config, on_progress=say))
        yield server_url(url)


class PrefillBar:
    """The progress of one prefill, drawn on standard error; goes away when the first text arrives."""

    def __init__(self) -> None:
        columns = (
            TextColumn("reading"),
            BarColumn(bar_width=32),
            TextColumn("{task.completed}/{task.total} tokens"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=notes, transient=True) if notes.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("", total=None)
        self._started = False

    def update(self, progress: Prefill) -> None:
        if self._bar is None or self._task is None:
            if progress.processed == 0:
                return
            notes.print(f"reading: {progress.processed} of {progress.total} tokens", markup=False)
            return
        if not self._started:
            self._bar.start()
            self._started = True
        self._bar.update(self._task, completed=progress.processed, total=progress.total)

    def stop(self) -> None:
        if self._bar is not None and self._started:
            self._bar.stop()
        self._started = False


class WarmUpBar:
    """The progress of an engine's warm-up, drawn on standard error; on a pipe, a line whenever a tenth more is done."""

    def __init__(self) -> None:
        columns = (TextColumn("warming up"), BarColumn(bar_width=32), TextColumn("{task.description}"), TimeElapsedColumn())
        self._bar = Progress(*columns, console=notes, transient=True) if notes.is_terminal else None
        self._task: TaskID | None = None
        self._tenths = -1

    def update(self, done: int, total: int, text: str) -> None:
        if self._bar is None:
            tenths = 10 * done // max(1, total)
            if tenths != self._tenths:
                self._tenths = tenths
                notes.print(text, markup=False)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        shown = text.removeprefix("warming up ").replace("[", "(")
        self._bar.update(self._task, completed=done, total=total or None, description=shown)

    def stop(self) -> None:
        """Take the bar away. Calling it again does nothing."""
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None


async def show(stream: AsyncIterator[Prefill | Delta], on_progress: Callable[[Prefill], None] | None = None) -> str:
    """Print a stream as it comes.

    Returns:
        The whole text.
    """
    bar, text = PrefillBar(), []
    try:
        async for item in stream:
            if isinstance(item, Delta):
                bar.stop()
                text.append(item.text)
                console.print(item.text, end="", markup=False)
                console.file.flush()
            else:
                bar.update(item)
                if on_progress is not None:
                    on_progress(item)
    finally:
        bar.stop()
    if text and not text[-1].endswith("\n"):
        console.print()
    return "".join(text)
