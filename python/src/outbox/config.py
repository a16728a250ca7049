"""The knobs of one relay process. What two relays must agree on lives in the database, in outbox.setting."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outbox.errors import ConfigurationError
from outbox.options import flag, knob, secret, variable

# One call of the database may take this share of a lease, and so many seconds at most: three must fit into one.
STATEMENT_SHARE, STATEMENT_MOST = 8, 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    dsn: str = secret("database that has the package, postgresql://user@host/name", several=True)
    amqp_url: str = secret("broker and vhost, amqp://user@host/vhost; several, with commas between, are tried in turn")
    amqp_ca: str = knob(
        "", "file with the authorities that may sign the broker's certificate [those of the system]", "PATH"
    )
    amqp_cert: str = knob("", "file with the certificate that we show the broker", "PATH")
    amqp_key: str = knob("", "file with its key, if that is not in the same file", "PATH")
    declare: bool = knob(default=False, text="create the default exchange if it is missing: topic, durable")
    once: bool = knob(default=False, text="send what is ready now, then exit")
    batch_size: int = knob(500, "messages claimed at a time", "N")
    max_bytes: int = knob(8 * 1024 * 1024, "bytes of bodies claimed at a time", "N")
    window: int = knob(1500, "messages claimed and not yet marked, at most: so many can come twice after a crash", "N")
    lease: float = knob(120.0, "how long a claimed batch is ours", "SECONDS")
    confirm_timeout: float = knob(30.0, "after so long without a confirm, stop sending and wait", "SECONDS")
    send_timeout: float = knob(10.0, "the same when the socket does not take the data", "SECONDS")
    heartbeat: int = knob(15, "AMQP heartbeat; the connection is dropped after three without a sign", "SECONDS")
    poll: float = knob(1.0, "longest sleep without looking for messages", "SECONDS")
    shutdown: float = knob(30.0, "how long a stop may take to finish what is in flight", "SECONDS")

    def __post_init__(self) -> None:
        for name, what in (("dsn", "database"), ("amqp_url", "broker")):
            if not getattr(self, name):
                raise ConfigurationError(f"no {what} given: pass {flag(name)} or set {variable(name)}")
        if not all(url.startswith(("amqp://", "amqps://")) for url in self.brokers):
            raise ConfigurationError(f"{flag('amqp_url')} must start with amqp:// or amqps://")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ConfigurationError(f"{flag(item.name)} must be greater than 0")
        needed = self.confirm_timeout + 3 * self.statement_timeout
        if needed >= self.lease:
            raise ConfigurationError(
                f"{flag('lease')} must be longer than {needed:g} s, which is {flag('confirm_timeout')} and the time"
                " to settle: a batch whose lease has run out is sent again by another relay"
            )
        if self.confirm_timeout < self.heartbeat:
            raise ConfigurationError(
                f"{flag('confirm_timeout')} must not be shorter than {flag('heartbeat')}:"
                " a broker that is only slow would pass for a dead one"
            )
        if self.send_timeout > self.confirm_timeout:
            raise ConfigurationError(
                f"{flag('send_timeout')} must not be longer than {flag('confirm_timeout')}:"
                " what was not sent cannot be confirmed"
            )
        if self.batch_size > self.window:
            raise ConfigurationError(f"{flag('batch_size')} must not be larger than {flag('window')}: it would not fit")

    @property
    def brokers(self) -> list[str]:
        return [url.strip() for url in self.amqp_url.split(",")]

    @property
    def statement_timeout(self) -> float:
        return min(self.lease / STATEMENT_SHARE, STATEMENT_MOST)
