"""The rules: each looks at the records of a run and says whether something is the matter."""
