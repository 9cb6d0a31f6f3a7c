"""Commands of tests that are forked from a process which has imported torch, in the place of a new interpreter."""
