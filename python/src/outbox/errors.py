"""Every error this package raises, and the SQLSTATEs of the database package they stand for."""

from __future__ import annotations

from typing import ClassVar


class OutboxError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(OutboxError):
    """Only a person can put it right; trying again does not help."""


class NotInstalledError(ConfigurationError):
    """The database does not have the package."""


class ExchangeMissingError(ConfigurationError):
    """The broker does not have the exchange."""


class UnavailableError(OutboxError):
    """A server is away or in trouble; the same call may succeed later."""


class DatabaseUnavailableError(UnavailableError):
    """PostgreSQL is away or refused a call for the moment."""


class BrokerUnavailableError(UnavailableError):
    """RabbitMQ is away or did not answer in time."""


class RefusedError(OutboxError, ValueError):
    """A call was refused, here or by the database package: code, words and hint are the same on both sides."""

    code: ClassVar[str]

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class MissingArgumentError(RefusedError):
    """An argument is null or missing."""

    code = "OB001"


class ArgumentLengthError(RefusedError):
    """An argument is too long or empty."""

    code = "OB002"


class HeadersError(RefusedError):
    """Headers or properties hold something that cannot be sent."""

    code = "OB003"


class BodyTooLargeError(RefusedError):
    """The body is larger than the setting max_body_bytes."""

    code = "OB004"


class TimeError(RefusedError):
    """eta, delay or expires_in is wrong."""

    code = "OB005"


class MessagesError(RefusedError):
    """The messages are not what emit_many() takes."""

    code = "OB006"


class IsolationLevelError(RefusedError):
    """The transaction is not read committed."""

    code = "OB010"


class ArgumentRangeError(RefusedError):
    """An argument is out of range."""

    code = "OB011"


class TokenInUseError(RefusedError):
    """The token holds messages already."""

    code = "OB012"


class ArrayLengthError(RefusedError):
    """Arrays that belong together differ in length."""

    code = "OB013"


class UnknownReasonError(RefusedError):
    """The reason for a failure is not one of those known."""

    code = "OB014"


class OtherKindError(RefusedError, ConfigurationError):
    """Relays and workers do not deliver the messages of one database together."""

    code = "OB015"


class SettingError(RefusedError):
    """There is no such setting, or it does not take this value."""

    code = "OB020"


class InstalledError(RefusedError):
    """The package is installed already, or not as expected."""

    code = "OB090"


class UnsuitableError(RefusedError):
    """The server or the database is not suitable for the package."""

    code = "OB091"


class UninstallRefusedError(RefusedError):
    """Something would be lost if the package were removed."""

    code = "OB092"


class InUseError(RefusedError):
    """Somebody holds a lock that an upgrade needs; later it may be free."""

    code = "OB093"


# The code of a notice, no error: a claim put messages aside.
PUT_ASIDE = "OB016"
BY_CODE: dict[str, type[RefusedError]] = {kind.code: kind for kind in RefusedError.__subclasses__()}
