"""Commands of tests that are forked from a process which has imported torch, in the place of a new interpreter."""

import os
import sys

ENVIRON = dict(os.environ)  # before torch is imported, which adds to it
EXECUTABLE = sys.executable  # whatever a test makes of it later
PLACES = tuple(sys.path)  # where this process finds modules, as a process that is told all of them finds them too
