"""Addresses as this project spells them: "host:port". Torch-free and grpc-free."""

from stagemesh.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; IPv6 hosts stand in brackets.

    Raises:
        ConfigError: it has another form.
    """
    host, colon, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not colon or not port.isdecimal() or int(port) > 65535 or is_bare_ipv6:
        raise ConfigError(
            f"address {address!r} must be host:port with a port of 0 to 65535 "
            "(an IPv6 host in brackets)"
        )
    return host, int(port)
