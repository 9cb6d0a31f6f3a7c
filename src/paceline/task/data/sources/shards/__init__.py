"""Token shards: files of tokens with document ends and checksums, folders of them, and what reads and writes both."""
