"""What the project and its tests use of gssapi, so that types are checked where the extra is not installed."""

from collections.abc import Mapping
from typing import NamedTuple, Self

from gssapi import exceptions as exceptions

class NameType:
    kerberos_principal: OID
    hostbased_service: OID

class MechType:
    kerberos: OID

class OID:
    @classmethod
    def from_int_seq(cls, integer_sequence: str) -> Self: ...

class RequirementFlag:
    mutual_authentication: RequirementFlag
    integrity: RequirementFlag
    confidentiality: RequirementFlag
    out_of_sequence_detection: RequirementFlag
    def __or__(self, other: RequirementFlag) -> RequirementFlag: ...

class Name:
    def __init__(self, base: str, name_type: OID | None = ...) -> None: ...

class Credentials:
    def __init__(
        self, *, name: Name | None = ..., usage: str = ..., store: Mapping[bytes, bytes] | None = ...
    ) -> None: ...
    @property
    def name(self) -> Name: ...
    @property
    def lifetime(self) -> int | None: ...

class WrapResult(NamedTuple):
    message: bytes
    encrypted: bool

class UnwrapResult(NamedTuple):
    message: bytes
    encrypted: bool
    qop: int

class SecurityContext:
    def __init__(
        self,
        *,
        name: Name | None = ...,
        creds: Credentials | None = ...,
        mech: OID | None = ...,
        usage: str = ...,
        flags: RequirementFlag | None = ...,
    ) -> None: ...
    @property
    def complete(self) -> bool: ...
    @property
    def lifetime(self) -> int: ...
    @property
    def initiator_name(self) -> Name: ...
    def step(self, token: bytes | None = ...) -> bytes | None: ...
    def wrap(self, message: bytes, encrypt: bool) -> WrapResult: ...
    def unwrap(self, message: bytes) -> UnwrapResult: ...
    def get_wrap_size_limit(self, desired_output_size: int, encrypted: bool = ...) -> int: ...
