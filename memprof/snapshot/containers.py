"""Find the pickle of a snapshot in a file around it: a page of torch's memory_viz, or what torch.save writes."""

from __future__ import annotations

import base64
import binascii
import io
import re
import zipfile

from memprof.errors import InputError

_ZIP = b"PK\x03\x04"
# torch.cuda._memory_viz writes local_files = [{"name": "snapshot.pickle", "base64": "..."}].
_EMBEDDED = re.compile(rb'"base64"\s*:\s*"([A-Za-z0-9+/=\s]*)"')
# torch.save stores without compression; an entry that grows by more was made to fill memory.
_MAX_INFLATION = 200
_FREE_INFLATION = 64 * 2**20


def contained(data: bytes, name: str) -> bytes:
    """Return the pickles inside a page or a torch.save file; other data as it is.

    Raises:
        InputError: the page or the archive is damaged, or has no snapshot in it.
    """
    if data.startswith(_ZIP):
        return _saved(data, name)
    if data[:256].lstrip()[:1] == b"<":
        return _embedded(data, name)
    return data


def _saved(data: bytes, name: str) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entry = next((e for e in archive.infolist() if re.search(r"(?:^|/)data\.pkl$", e.filename)), None)
            if entry is None:
                raise InputError(f"{name}: a zip file, not one of torch.save; extract the snapshot and name that file.")
            if entry.file_size > _FREE_INFLATION + _MAX_INFLATION * len(data):
                raise InputError(f"{name}: not read, because it unpacks to more than {_MAX_INFLATION} times itself.")
            return archive.read(entry)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError) as error:
        raise InputError(f"{name}: a damaged zip file ({type(error).__name__}); copy the file again.") from None


def _embedded(data: bytes, name: str) -> bytes:
    found = _EMBEDDED.findall(data)
    if not found:
        return data
    try:
        # The writer pads the pickle with zeros.
        return b"".join(base64.b64decode(b"".join(text.split()), validate=True).rstrip(b"\0") for text in found)
    except binascii.Error:
        raise InputError(f"{name}: the snapshot in this page is damaged (no base64); save the page again.") from None
