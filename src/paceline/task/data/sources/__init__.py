"""What samples are read from: files, documents, tokens, and data sets of other kinds."""
