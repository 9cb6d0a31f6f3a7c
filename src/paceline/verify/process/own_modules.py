"""Every rank of a proof imports the user's modules by itself, as every rank of a run does.

What a module draws, or reads of its process, as it is imported would be alike on ranks that are forked after the
import, and another on each rank of the run. Installed packages are imported once: they are large, and nobody's own.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType

from paceline.run.process.alike import begin_alike
from paceline.task.own_code import OURS, is_installed
from paceline.verify.process.process_hooks import put_back, take_hooks_of

# That a second import may take, which every rank would: a module that reads much as it is imported is left as it is.
MOST_SECONDS = 1.0


class OwnModules:
    """Modules of the user's that ranks import again; none of them where that fails or takes long."""

    def __init__(self, load: Callable[[], object]) -> None:
        """Import what `load` does, and try whether it can be imported once more."""
        known = set(sys.modules)
        begin_alike()
        load()
        self._names = _own(sys.modules.keys() - known)
        began = time.perf_counter()
        if not self._again(load) or time.perf_counter() - began > MOST_SECONDS:
            self._names = []

    def import_again(self, load: Callable[[], object]) -> None:
        """Import them anew, in a rank."""
        if self._names:
            self._again(load)

    def _again(self, load: Callable[[], object]) -> bool:
        kept = {name: sys.modules.pop(name) for name in self._names if name in sys.modules}
        hooks = take_hooks_of(self._names)
        begin_alike()
        try:
            load()
        except Exception:  # what a module registers, it may not be able to register twice
            sys.modules.update(kept)
            put_back(hooks)
            return False
        return True


def _own(names: Collection[str]) -> list[str]:
    places = [Path(sysconfig.get_paths()[kind]).resolve() for kind in ("stdlib", "platstdlib")]
    return [name for name in names if _is_own(sys.modules[name], places)]


def _is_own(module: ModuleType, places: Collection[Path]) -> bool:
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py"):  # an extension may be imported once alone
        return False
    path = Path(file).resolve()
    return not (is_installed(path) or path.is_relative_to(OURS) or any(path.is_relative_to(each) for each in places))
