"""Bytes of files as they lie on a disk or a server: unpacked, and Arrow's tables as plain values."""
