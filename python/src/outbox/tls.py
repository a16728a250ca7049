"""TLS on both sides: certificates are verified unless somebody says otherwise in so many words."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psycopg
from psycopg.conninfo import conninfo_to_dict
from yarl import URL

from outbox.errors import ConfigurationError
from outbox.options import flag

LOCAL = ("/", "@", "127.")
# Where systems keep the authorities they trust; the libpq that comes with the driver does not know.
SYSTEM_ROOTS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
# Of the client library, or of others. They would be passed over, or turn the verification off.
NOT_IN_THE_URL = frozenset(
    {"no_verify_ssl", "verify", "cafile", "cacertfile", "capath", "cadata", "certfile", "keyfile"}
)


def database_tls(dsn: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What to add to a DSN that says nothing about TLS. By itself libpq encrypts if it can, and verifies nothing."""
    try:
        parts = conninfo_to_dict(dsn)
    except psycopg.Error:
        return {}  # said by whoever connects
    said = parts.get("sslmode") or parts.get("service") or environment.get("PGSSLMODE") or environment.get("PGSERVICE")
    if said or is_local(parts, environment):
        return {}
    if (
        parts.get("sslrootcert")
        or environment.get("PGSSLROOTCERT")
        or Path("~/.postgresql/root.crt").expanduser().exists()
    ):
        return {"sslmode": "verify-full"}
    places = (environment.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile, *SYSTEM_ROOTS)
    return {"sslmode": "verify-full", "sslrootcert": next((p for p in places if p and Path(p).exists()), "system")}


def is_local(parts: Mapping[str, object], environment: Mapping[str, str] = os.environ) -> bool:
    """Whether nothing leaves this machine: a socket, or a name that can only mean itself."""
    hosts = str(parts.get("host") or environment.get("PGHOST") or parts.get("hostaddr") or "")
    return all(not host or host.startswith(LOCAL) or host in {"localhost", "::1"} for host in hosts.split(","))


class BrokerFiles(Protocol):
    """Of a relay or a worker."""

    @property
    def amqp_ca(self) -> str: ...

    @property
    def amqp_cert(self) -> str: ...

    @property
    def amqp_key(self) -> str: ...


def broker_tls(settings: BrokerFiles, url: URL) -> ssl.SSLContext | None:
    if wrong := NOT_IN_THE_URL & set(url.query):
        raise ConfigurationError(
            f"{flag('amqp_url')} must not say {min(wrong)!r}: certificates are always verified, and their files"
            f" are named by {flag('amqp_ca')}, {flag('amqp_cert')} and {flag('amqp_key')}"
        )
    if url.scheme != "amqps":
        if settings.amqp_ca or settings.amqp_cert or settings.amqp_key:
            raise ConfigurationError(f"{flag('amqp_ca')}, {flag('amqp_cert')} and {flag('amqp_key')} are for amqps://")
        return None
    if settings.amqp_key and not settings.amqp_cert:
        raise ConfigurationError(f"{flag('amqp_key')} is of no use without {flag('amqp_cert')}")
    try:
        context = ssl.create_default_context(cafile=settings.amqp_ca or None)
        if settings.amqp_cert:
            context.load_cert_chain(settings.amqp_cert, settings.amqp_key or None)
    except OSError as error:  # also what the library says of a file that it cannot read as a certificate
        raise ConfigurationError(
            f"the files of {flag('amqp_ca')}, {flag('amqp_cert')} and {flag('amqp_key')} cannot be used: {error}"
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
