"""Bytes of versions from an S3 bucket, or from whatever speaks its protocol. The only file that imports obstore.

A URL of a manifest names bucket and prefix, `s3://bucket/prefix/`; endpoint, region and credentials are the node's own settings, so a
publisher cannot choose where a node's credentials are sent. Without a key of its own the node uses what its environment gives it: AWS_*
variables, a web identity or the machine's role. Retries are the fetcher's business, which goes on where an answer was cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from node_agent.config import S3Settings
from node_agent.fetch import SourceError, SourceLied
from raftmeta.core.manifest import path_fault

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

CHUNK = 1  # at least: chunks come as they arrive, and what arrived before a cut is kept; larger ones come no faster


class Buckets:
    """Opens sources; connections to a bucket are shared."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._open: dict[str, S3Store] = {}

    def source(self, url: str) -> S3Source:
        """Raises SourceError when the bucket cannot be spoken to with these settings."""
        parts = urlsplit(url)
        bucket = parts.netloc
        if bucket not in self._open:
            self._open[bucket] = self._store(bucket)
        return S3Source(url, self._open[bucket], unquote(parts.path).lstrip("/"))

    def _store(self, bucket: str) -> S3Store:
        settings = self._settings
        options: S3Config = {"region": settings.region}
        if settings.endpoint:
            options["endpoint"] = settings.endpoint
        try:
            if settings.access_key_id:
                options["access_key_id"] = settings.access_key_id
                assert settings.secret_file is not None, "checked by the settings"
                options["secret_access_key"] = settings.secret_file.read_text("ascii").strip()
            seconds = f"{settings.timeout_s:g}s"
            client: ClientConfig = {"timeout": seconds, "connect_timeout": seconds, "allow_http": settings.endpoint.startswith("http://")}
            return S3Store(bucket, config=options, client_options=client, retry_config={"max_retries": 0})
        except (BaseError, OSError, ValueError) as cause:
            raise SourceError(f"bucket {bucket}: {type(cause).__name__}: {_first_line(cause)}") from cause


class S3Source:
    def __init__(self, url: str, store: S3Store, prefix: str) -> None:
        self.name = url
        self._store = store
        self._prefix = prefix if not prefix or prefix.endswith("/") else prefix + "/"

    def read(self, file: str, file_size: int, begin: int, end: int) -> Iterator[bytes]:
        fault = path_fault(file)
        if fault:
            raise SourceError(f"{file[:200]!r} {fault}")
        key = self._prefix + file
        try:
            answer = obstore.get(self._store, key, options={"range": (begin, end)})
            size = answer.meta["size"]
            if size != file_size:
                raise SourceLied(f"{key} has {size} bytes, the manifest says {file_size}")
            if tuple(answer.range) != (begin, end):
                raise SourceError(f"{key}: asked for bytes {begin}-{end - 1}, the server sent {answer.range[0]}-{answer.range[1] - 1}")
            for chunk in answer.stream(min_chunk_size=CHUNK):
                yield bytes(chunk)
        except (BaseError, OSError, ValueError) as cause:
            raise SourceError(f"{key}: {type(cause).__name__}: {_first_line(cause)}") from cause


def _first_line(cause: BaseException) -> str:
    """Of an error text that goes on with the library's own internals."""
    return (str(cause).strip().splitlines() or ["no reason given"])[0][:300]
