"""Bytes under a name, outside the database: in a directory, or in an object store by the `obstore` package.

Knows nothing of what is in them. All methods block, and may be called in any thread.
"""

import contextlib
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from holdfast.errors import ConfigError, InvalidArgument
from holdfast.extras import how_to_install
from holdfast.sessions.journal.files import make_directory, write_file

_SCHEMES = ("s3", "gs", "az", "memory")
_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TIMEOUT = timedelta(seconds=30)  # of one request to an object store, and of all attempts together
_NUM_RETRIES = 3

T = TypeVar("T")


class BlobStore(Protocol):
    """Raises OSError where the store does not answer or refuses."""

    def put(self, key: str, content: bytes) -> None:
        """Durable when it returns. Replaces what there was."""

    def get(self, key: str) -> bytes:
        """Raises FileNotFoundError where there is none."""

    def delete(self, keys: Sequence[str]) -> None:
        """Those that are not there are no error."""

    def keys(self, prefix: str) -> list[str]:
        """Those that begin so; `prefix` has at least four characters."""


def open_blobs(text: str) -> BlobStore:
    """The store that a setting names: a directory, which is made where it is missing, or the URL of an object store.

    Raises ConfigError, with what to do.
    """
    if "://" not in text:
        return _directory(Path(text).expanduser())
    url = urlsplit(text)
    if url.scheme == "file":
        return _directory(Path(url2pathname(url.path)))
    if url.scheme not in _SCHEMES:
        raise ConfigError(f"{text} is neither a directory nor a URL that begins with s3://, gs://, az:// or file://")
    try:
        from obstore.store import from_url
    except ImportError as exc:
        raise ConfigError(f"{url.scheme}:// needs the package obstore; {how_to_install('objects')}") from exc
    try:
        options: Any = {"timeout": _TIMEOUT, "connect_timeout": timedelta(seconds=5)}
        options["allow_http"] = True  # for an endpoint that AWS_ENDPOINT or the like gives as http://
        retries: Any = {"max_retries": _NUM_RETRIES, "retry_timeout": _TIMEOUT}
        store = from_url(text, client_options=options, retry_config=retries)
    except Exception as exc:
        raise ConfigError(f"cannot use {text}: {_first_line(exc)}") from exc
    return ObjectBlobs(store)


def usable_blobs(text: str) -> BlobStore:
    """As `open_blobs`, once something could be written, read and deleted there: not every refusal is found earlier."""
    blobs, key = open_blobs(text), f"probe-{secrets.token_hex(8)}"
    try:
        blobs.put(key, b"probe")
        blobs.get(key)
        blobs.delete([key])
    except OSError as exc:
        raise ConfigError(f"cannot use {text}: {exc.strerror or exc}") from exc
    return blobs


def _directory(path: Path) -> BlobStore:
    try:
        return DirectoryBlobs(path)
    except OSError as exc:
        raise ConfigError(f"cannot use the directory {path}: {exc.strerror}") from exc


class DirectoryBlobs:
    """A file for each, in folders by the first four characters of its key."""

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        self._directory = directory

    def put(self, key: str, content: bytes) -> None:
        path = self._path(key)
        if not path.parent.is_dir():
            make_directory(path.parent)
        write_file(path, content)

    def get(self, key: str) -> bytes:
        return self._path(key).read_bytes()

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def keys(self, prefix: str) -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            names = (path.name for path in self._path(prefix).parent.iterdir())
            return sorted(name for name in names if name.startswith(prefix) and not name.endswith(".new"))
        return []

    def _path(self, key: str) -> Path:
        return self._directory / _place(key)


class ObjectBlobs:
    """Objects of a store of `obstore`, named like the files of a directory."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, content: bytes) -> None:
        place = _place(key)
        try:
            _translated(lambda: self._store.put(place, content))
        except FileNotFoundError as exc:  # there is no such bucket
            raise OSError(str(exc)) from exc

    def get(self, key: str) -> bytes:
        place = _place(key)
        return _translated(lambda: bytes(self._store.get(place).bytes()))

    def delete(self, keys: Sequence[str]) -> None:
        places = [_place(key) for key in keys]
        try:
            if places:
                _translated(lambda: self._store.delete(places))
        except FileNotFoundError:  # some stores say so, and stop there
            for place in places:
                with contextlib.suppress(FileNotFoundError):
                    _translated(lambda place=place: self._store.delete(place))  # type: ignore[misc]

    def keys(self, prefix: str) -> list[str]:
        folder = _place(prefix).rpartition("/")[0]
        pages = _translated(lambda: list(self._store.list(prefix=folder)))
        names = (item["path"].rpartition("/")[2] for page in pages for item in page)
        return sorted(name for name in names if name.startswith(prefix))


def _place(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise InvalidArgument(f"{key!r} is not the key of a blob")
    padded = key.ljust(4, "_")
    return f"{padded[:2]}/{padded[2:4]}/{key}"


def _translated(call: Callable[[], T]) -> T:
    try:
        return call()
    except FileNotFoundError as exc:
        raise FileNotFoundError(_first_line(exc)) from exc
    except Exception as exc:
        raise OSError(_first_line(exc)) from exc


def _first_line(exc: Exception) -> str:
    """obstore appends pages of its own source to each message."""
    return str(exc).partition("\n")[0] or type(exc).__name__
