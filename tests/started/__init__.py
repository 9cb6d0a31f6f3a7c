"""Commands of tests that are forked from a process which has imported torch, in the place of a new interpreter."""

import os

ENVIRON = dict(os.environ)  # before torch is imported, which adds to it
