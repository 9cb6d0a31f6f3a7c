"""What has to be installed for a kind of remote storage, and the error that names the extra where it is not."""

from __future__ import annotations

from paceline.errors import MissingExtra

# How URLs of a kind of storage begin, what fsspec needs for it, and the extra that brings it. Of other kinds the error
# of fsspec names the package.
STORAGE_EXTRAS = (("s3", "s3fs", "s3"), ("s3a", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("gcs", "gcsfs", "gcs"))


def missing_storage(url: str, purpose: str) -> MissingExtra | None:
    """Return the error that an extra is missing for the storage of a URL; None where all that is known is there."""
    try:
        from fsspec import get_filesystem_class
    except ImportError:
        return MissingExtra("fsspec", "remote", purpose)
    for scheme, package, extra in STORAGE_EXTRAS:
        if scheme == url.partition("://")[0].lower():
            try:
                get_filesystem_class(scheme)
            except ImportError:
                return MissingExtra(package, extra, purpose)
    return None
