"""What modules hold right after they were imported, so that a process that is forked later begins with that again."""

from __future__ import annotations

import collections
import gc
import sys
import types
import weakref
from typing import Any

HOLDERS = (list, dict, set, collections.deque, weakref.WeakValueDictionary, weakref.WeakKeyDictionary, weakref.WeakSet)
TORCH_SEED = 67280421310721  # of torch's generator before anybody seeds it


class Pristine:
    """Names of Paceline's modules and what their lists, dictionaries and sets hold, as they are now."""

    def __init__(self, room: str) -> None:
        self._known = set(sys.modules)
        self._room = room
        self._names: dict[types.ModuleType, dict[str, Any]] = {}
        self._held: list[tuple[Any, Any]] = []
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == room:
                self._names[module] = dict(vars(module))
                holders = [value for key, value in vars(module).items() if not key.startswith("__")]
                self._held += [(each, each.copy()) for each in holders if isinstance(each, HOLDERS)]
        self._caches = [each for each in gc.get_objects() if callable(getattr(type(each), "cache_clear", None))]

    def restore(self) -> None:
        """Have all of them as they were, and modules of users be imported anew."""
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None) or ""
            if name not in self._known and "-packages" not in place and not place.startswith(sys.base_prefix):
                del sys.modules[name]
        for module, names in self._names.items():
            vars(module).clear()
            vars(module).update(names)
            sys.modules.setdefault(module.__name__, module)
        for each, held in self._held:
            each.clear()
            each.extend(held) if isinstance(each, list | collections.deque) else each.update(held)
        for each in self._caches:
            if str(getattr(each, "__module__", "")).partition(".")[0] == self._room:
                each.cache_clear()
        gc.enable()

    @staticmethod
    def restore_torch() -> None:
        """Have torch's settings be those of a process that has just imported it."""
        torch: Any = sys.modules["torch"]
        torch.random.default_generator.manual_seed(TORCH_SEED)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
