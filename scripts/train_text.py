"""Real text without a download: the source code of the installed Python standard library, one token
a byte.

Ids 0 to 255 are bytes, 256 ends a document; a document is one source file. The text becomes a
dataset in Megatron's indexed format once, in the user's cache folder, under a name made of the
Python version and a hash of the content. A dataset is written beside its place and renamed into it,
so a reader never sees half of one and any number of processes may do this at the same time: they
write the same bytes, the first rename wins.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/mok-megatron, or ~/.cache/mok-megatron."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mok-megatron"


def standard_library_sources(root: Path | None = None) -> Iterator[bytes]:
    """The .py files under `root` (default: the standard library), in the order of their paths;
    empty ones left out.

    The library's own tests and installed packages are not part of it.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    for folder, names, files in os.walk(root):
        names[:] = sorted(set(names) - _NOT_THE_LIBRARY)
        for name in sorted(files):
            if name.endswith(".py"):
                source = Path(folder, name).read_bytes()
                if source:
                    yield source


def standard_library_dataset(cache: Path | None = None, root: Path | None = None) -> Path:
    """Prefix of the dataset (`<prefix>.bin`, `<prefix>.idx`), built if the cache has none of this
    content.

    Raises RuntimeError when there are no sources (a Python shipped without them), OSError when the
    cache cannot be written.
    """
    sources = list(standard_library_sources(root))
    if not sources:
        raise RuntimeError(
            "mok: the default text needs the .py files of the standard library, got none in "
            f"{root or sysconfig.get_path('stdlib')}; pass --data-path with a Megatron dataset"
        )
    digest = hashlib.sha256()
    for source in sources:
        digest.update(len(source).to_bytes(8, "little") + source)
    cache = cache or cache_folder()
    place = cache / f"python-{platform.python_version()}-{digest.hexdigest()[:16]}"
    if not place.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        written = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=cache))
        try:
            _write(sources, written / "text")
            _rename_or_yield(written, place)
        finally:
            shutil.rmtree(written, ignore_errors=True)
    return place / "text"


def _write(sources: list[bytes], prefix: Path) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for source in sources:
        ids = np.append(np.frombuffer(source, np.uint8).astype(np.int32), END_OF_DOCUMENT)
        builder.add_item(torch.from_numpy(ids))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def _rename_or_yield(written: Path, place: Path) -> None:
    """Rename a folder into its place, unless another process was first; its content is then the
    same."""
    try:
        written.rename(place)
    except OSError:
        if not place.is_dir():
            raise
