"""Whether torch's compiler works on this CPU, as torch sees it."""

from __future__ import annotations

import pytest

from paceline.cluster.here.compiler import cannot_compile

needs_vectors = pytest.mark.skipif(bool(cannot_compile("cpu")), reason=cannot_compile("cpu"))
