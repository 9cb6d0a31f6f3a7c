"""Labels that no objective and no metric counts, as datasets write them and models read them."""

IGNORED = -100  # what torch's cross entropy leaves out unless it is told otherwise
