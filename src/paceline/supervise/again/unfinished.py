"""What worlds that are over were saving: from now on nobody can publish it.

A rank looks whether its generation still counts, and then renames what it has saved. A rank that stands still between
the look and the rename, on another machine or since its storage hangs, would publish as it goes on: a sound checkpoint
of a world that is over, which might count as the newest. So the folder gets another name, and the rename fails.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from paceline.durable import PARTIAL
from paceline.spec.run_files import checkpoints_folder

OVER = f"{PARTIAL}over-"  # which the next save removes, since nobody has locked them


def set_aside_unfinished(run_dir: Path) -> list[str]:
    """Rename the folders of saves that no world has published, and return their names.

    To be called when older worlds are fenced off, and before the next one looks for the newest checkpoint: what was
    renamed by then counts, and nothing else ever will.
    """
    aside = []
    with contextlib.suppress(OSError):  # there are none yet; who loads says what else is wrong with the storage
        for folder in sorted(checkpoints_folder(run_dir).glob(f"{PARTIAL}*")):
            if folder.is_dir() and not folder.name.startswith(OVER):
                with contextlib.suppress(OSError):  # it was removed, or published, just now
                    folder.rename(folder.with_name(f"{OVER}{secrets.token_hex(4)}"))
                    aside.append(folder.name)
    return aside
