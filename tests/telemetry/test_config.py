import pytest

from stagemesh.errors import ConfigError
from stagemesh.telemetry.config import BrokerAddress, MqttLimits, parse_mqtt_url

GOOD = [
    ("mqtt://h", BrokerAddress(host="h", port=1883)),
    ("mqtt://h/", BrokerAddress(host="h", port=1883)),
    ("MQTT://h:2000", BrokerAddress(host="h", port=2000)),
    ("mqtts://h", BrokerAddress(host="h", port=8883, use_tls=True)),
    ("mqtt://[::1]:1", BrokerAddress(host="::1", port=1)),
    ("mqtt://me@h", BrokerAddress(host="h", port=1883, username="me")),
    ("mqtt://me:p@h:65535", BrokerAddress(host="h", port=65535, username="me", password="p")),
    ("mqtt://m%40e:%2F%23@h", BrokerAddress(host="h", port=1883, username="m@e", password="/#")),
]


@pytest.mark.parametrize(("url", "expected"), GOOD)
def test_urls_are_read(url: str, expected: BrokerAddress) -> None:
    assert parse_mqtt_url(url) == expected


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "must start with"),
        ("h:1883", "must start with"),
        ("http://h", "must start with"),
        ("mqtt:/h", "names no host"),
        ("mqtt://", "names no host"),
        ("mqtt://:1883", "names no host"),
        ("mqtt://h:0", "port 0"),
        ("mqtt://h:65536", "wrong host or port"),
        ("mqtt://h:port", "wrong host or port"),
        ("mqtt://[::1", "wrong host or port"),
        ("mqtt://:secret@h", "password and no user"),
        ("mqtt://me:se/cret@h", "wrong host or port"),
        ("mqtt://me:1/secret@h", "after the port"),
        ("mqtt://h/topic", "after the port"),
        ("mqtt://h?secret=1", "after the port"),
        ("mqtt://h#secret", "after the port"),
        ("mqtt://h h", "blank"),
        ("mqtt://h\n", "blank"),
    ],
)
def test_wrong_urls_are_refused_and_never_shown(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_mqtt_url(url)
    assert "secret" not in str(caught.value)
    assert "cret" not in str(caught.value.__cause__)


def test_an_address_is_shown_without_its_password() -> None:
    address = parse_mqtt_url("mqtts://me:secret@[::1]:9")
    assert str(address) == "mqtts://[::1]:9"
    assert "secret" not in repr(address)
    assert address.password == "secret"  # negative control


@pytest.mark.parametrize(
    "field",
    [
        {"keepalive_seconds": 2},
        {"connect_timeout_seconds": 0},
        {"min_backoff_seconds": 0},
        {"min_backoff_seconds": 5, "max_backoff_seconds": 4},
        {"max_queued_messages": 0},
        {"max_queued_bytes": 10},
        {"stop_grace_seconds": -1},
        {"stop_grace_seconds": float("nan")},
    ],
)
def test_limits_out_of_range_are_named(field: dict[str, float]) -> None:
    name = list(field)[-1]
    with pytest.raises(ConfigError, match=f"{name} is .*: allowed are"):
        MqttLimits(**field)
