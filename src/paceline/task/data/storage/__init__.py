"""Where bytes of data come from: local files, and remote ones through fsspec and a cache of blocks on local disk."""
