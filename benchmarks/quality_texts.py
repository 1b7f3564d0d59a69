"""The texts that quality is measured on, fetched once into .cache/texts; none of them is shipped from here.

    python -m benchmarks.quality_texts

alice29, asyoulik, lcet10: public-domain texts from the source archive of the PyPI package `brotli`. rcu: a document of the
kernel (GPL-2, Debian `linux-doc-6.1`). handbook: the Debian handbook (GPL-2+ or CC BY-SA, Debian `debian-handbook`).
"""

from __future__ import annotations

import gzip
import html
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ROOT / ".cache" / "texts"
BROTLI = ("alice29", "asyoulik", "lcet10")
KERNEL_DOCUMENT = "usr/share/doc/linux-doc-6.1/Documentation/RCU/Design/Requirements/Requirements.rst.gz"
HANDBOOK = "usr/share/doc/debian-handbook/html/en-US"


def read_text(name: str, folder: Path = TEXTS) -> str:
    """A text by its name.

    Raises:
        FileNotFoundError: not fetched yet; the message says how.
    """
    path = folder / f"{name}.txt"
    if not path.is_file():
        raise FileNotFoundError(f"no text {path}: run `python -m benchmarks.quality_texts` (as root on Debian) first")
    return path.read_text(encoding="utf-8")


def fetch(folder: Path = TEXTS) -> None:
    """Download and unpack everything that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        if not all((folder / f"{name}.txt").is_file() for name in BROTLI):
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "brotli==1.2.1"]
            subprocess.run([*pip, "-d", scratch], check=True)
            with tarfile.open(next(work.glob("brotli-*.tar.gz"))) as archive:
                for name in BROTLI:
                    member = next(m for m in archive.getmembers() if m.name.endswith(f"tests/testdata/{name}.txt"))
                    file = archive.extractfile(member)
                    assert file is not None
                    (folder / f"{name}.txt").write_text(file.read().decode("latin-1"), encoding="utf-8")
        if not (folder / "rcu.txt").is_file():
            unpacked = _debian_package("linux-doc-6.1", work)
            (folder / "rcu.txt").write_bytes(gzip.decompress((unpacked / KERNEL_DOCUMENT).read_bytes()))
        if not (folder / "handbook.txt").is_file():
            pages = sorted((_debian_package("debian-handbook", work) / HANDBOOK).glob("*.html"))
            text = "\n".join(_plain(page.read_text(encoding="utf-8")) for page in pages)
            (folder / "handbook.txt").write_text(text, encoding="utf-8")


def _debian_package(name: str, work: Path) -> Path:
    subprocess.run(["apt-get", "download", "-q", name], check=True, cwd=work)
    target = work / name
    subprocess.run(["dpkg-deb", "-x", str(next(work.glob(f"{name}_*.deb"))), str(target)], check=True)
    return target


def _plain(page: str) -> str:
    """The words of an HTML page."""
    without = re.sub(r"(?s)<(script|style|head).*?</\1>", "", page)
    return re.sub(r"\n\s*\n+", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", without)))


if __name__ == "__main__":
    fetch()
