from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.telemetry.broker import MOSQUITTO, Broker


@pytest.fixture
def stopped_broker(tmp_path: Path) -> Iterator[Broker]:
    if MOSQUITTO is None:
        pytest.skip("mosquitto is not installed (Debian: apt-get install mosquitto)")
    (tmp_path / "broker").mkdir()
    broker = Broker(tmp_path / "broker")
    yield broker
    broker.stop()


@pytest.fixture
def broker(stopped_broker: Broker) -> Broker:
    stopped_broker.start()
    return stopped_broker
