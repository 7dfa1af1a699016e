"""The embedded code signature of a Mach-O file: a hash of every page, which the kernel checks.

Layout: xnu, osfmk/kern/cs_blobs.h. Load commands are little-endian, the signature is big-endian.
"""

import hashlib
import struct
from dataclasses import dataclass

_HEADER_SIZE = 32
_LC_CODE_SIGNATURE = 0x1D
_SUPER_BLOB = 0xFADE0CC0
_CODE_DIRECTORY = 0xFADE0C02
_ADHOC = 0x2
_SHA256 = 2


@dataclass(frozen=True)
class CodeSignature:
    is_adhoc: bool
    """Carries no identity: enough for a library on Apple silicon, and all that a linker can do."""
    covers_code: bool
    """The last hashed page ends where the signature begins."""
    valid_pages: int
    pages: int

    @property
    def is_valid(self) -> bool:
        return self.covers_code and self.valid_pages == self.pages


@dataclass(frozen=True)
class _Slot:
    """One page and where its hash is kept."""

    begin: int
    end: int
    hash_at: int

    def digest(self, file: bytes | bytearray) -> bytes:
        return hashlib.sha256(file[self.begin : self.end]).digest()

    def is_valid(self, file: bytes | bytearray) -> bool:
        digest = self.digest(file)
        return digest == file[self.hash_at : self.hash_at + len(digest)]


def read_signature(file: bytes) -> CodeSignature | None:
    """The signature of a thin 64-bit Mach-O file; None where there is none with SHA-256 hashes."""
    signature_at = _find_signature(file)
    directory_at = _find_directory(file, signature_at) if signature_at else None
    if signature_at is None or directory_at is None:
        return None
    (flags,) = struct.unpack_from(">I", file, directory_at + 12)
    slots = _slots(file, directory_at)
    return CodeSignature(
        is_adhoc=bool(flags & _ADHOC),
        covers_code=bool(slots) and slots[-1].end == signature_at,
        valid_pages=sum(slot.is_valid(file) for slot in slots),
        pages=len(slots),
    )


def rehash(file: bytes) -> bytes:
    """The same file with the page hashes that its present contents should have."""
    signature_at = _find_signature(file)
    assert signature_at is not None
    directory_at = _find_directory(file, signature_at)
    assert directory_at is not None
    signed = bytearray(file)
    for slot in _slots(file, directory_at):
        digest = slot.digest(file)
        signed[slot.hash_at : slot.hash_at + len(digest)] = digest
    return bytes(signed)


def _find_signature(file: bytes) -> int | None:
    (num_commands,) = struct.unpack_from("<I", file, 16)
    at = _HEADER_SIZE
    for _ in range(num_commands):
        command, size, data_at = struct.unpack_from("<III", file, at)
        if command == _LC_CODE_SIGNATURE:
            return int(data_at)
        at += size
    return None


def _find_directory(file: bytes, signature_at: int) -> int | None:
    magic, _, num_blobs = struct.unpack_from(">III", file, signature_at)
    if magic != _SUPER_BLOB:
        return None
    for i in range(num_blobs):
        _, offset = struct.unpack_from(">II", file, signature_at + 12 + 8 * i)
        at = signature_at + int(offset)
        (magic,) = struct.unpack_from(">I", file, at)
        if magic == _CODE_DIRECTORY and struct.unpack_from(">B", file, at + 37)[0] == _SHA256:
            return at
    return None


def _slots(file: bytes, at: int) -> list[_Slot]:
    hashes_offset, _, _, num_pages, code_end = struct.unpack_from(">5I", file, at + 16)
    hash_size, _, _, log2_page_size = struct.unpack_from(">4B", file, at + 36)
    page_size = 1 << log2_page_size
    return [
        _Slot(
            begin=page * page_size,
            end=min((page + 1) * page_size, code_end),
            hash_at=at + hashes_offset + page * hash_size,
        )
        for page in range(num_pages)
    ]
