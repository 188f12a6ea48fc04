"""The connection to the broker: presence, retained state and events out, presence of nodes in.

Telemetry never disturbs what it reports on: `publish` does not wait and does not fail for a broker
that is away, and `run` ends only when it is told to.

Life of a connection:

    connect (will = offline, "lost") -> subscribe -> retained state, "online" first -> events ...
        broker gone:  pause (doubling, bounded) and connect again
        stop:         what waits -> offline, "stopped" -> DISCONNECT, which drops the will

Presence rests on the client id being the same for every process of a node: when a new process
connects before the broker has noticed the end of the old one, the broker ends the old session and
publishes its will *before* it lets the new one in, so "online" is what stays retained.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiomqtt

from stagemesh.errors import ConfigError
from stagemesh.telemetry.config import MqttLimits, parse_mqtt_url
from stagemesh.telemetry.outbox import Outbox, Outgoing
from stagemesh.telemetry.payload import (
    MAX_PRESENCE_BYTES,
    Presence,
    encode_payload,
    presence_payload,
)
from stagemesh.telemetry.presence import PresenceWatch
from stagemesh.telemetry.topics import Topics

logger = logging.getLogger(__name__)

# What aiomqtt has to say comes through here, save one warning that says nothing: each attempt that
# got no answer ends with a disconnect that cannot be graceful.
_client_logger = logging.getLogger(f"{__name__}.aiomqtt")
_client_logger.addFilter(lambda record: "gracefully disconnect" not in str(record.msg))

_MAX_INCOMING_MESSAGES = 10_000


class MqttTelemetry:
    """One process's line to the broker; `run` is its life, and nothing happens before it.

    All methods belong to the event loop that runs `run`.

    Args:
        url: `mqtt://[user[:password]@]host[:port]` or `mqtts://...`.
        client_id: name of this process's session; equal for all starts of one node, and unique
            among those that live: a broker ends the session of a client whose id connects again.
        start_id: drawn by the process at its start; part of the presence payload.
        node_id: the node whose presence this is; None for the coordinator's.
        details: more fields of the online payload, such as the address and the version.
        cluster, prefix: the first levels of all topics.
        limits: bounds and intervals.

    Raises:
        ConfigError: when the URL, an id or a limit is wrong.
    """

    def __init__(
        self,
        url: str,
        *,
        client_id: str,
        start_id: str,
        node_id: str | None = None,
        details: Mapping[str, Any] | None = None,
        cluster: str = "default",
        prefix: str = "stagemesh",
        limits: MqttLimits | None = None,
    ) -> None:
        if not client_id or not start_id:
            raise ConfigError(
                f"MQTT client_id is {client_id!r} and start_id {start_id!r}: neither may be empty"
            )
        self._address = parse_mqtt_url(url)
        self._limits = limits or MqttLimits()
        self._client_id = client_id
        self._start_id = start_id
        self.topics = Topics(prefix=prefix, cluster=cluster)
        """Names of the topics to publish on."""
        self._status_topic = (
            self.topics.coordinator_status if node_id is None else self.topics.node_status(node_id)
        )
        self._outbox = Outbox(
            max_messages=self._limits.max_queued_messages, max_bytes=self._limits.max_queued_bytes
        )
        online = presence_payload("online", start_id=start_id, details=details)
        if len(online) > MAX_PRESENCE_BYTES:
            raise ConfigError(
                f"the details of the presence have {len(online)} bytes as JSON: "
                f"allowed are {MAX_PRESENCE_BYTES}"
            )
        self._outbox.put(Outgoing(topic=self._status_topic, payload=online, retain=True))
        self._watch: PresenceWatch | None = None
        self._is_connected = asyncio.Event()
        self._is_failing = False
        self._stopping = asyncio.Event()
        self._finished: asyncio.Event | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the broker is there now."""
        return self._is_connected.is_set()

    @property
    def queued_messages(self) -> int:
        """Messages that wait for the broker."""
        return len(self._outbox)

    @property
    def dropped_messages(self) -> int:
        """Messages given up since the start because too many waited."""
        return self._outbox.dropped_messages

    async def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait for the broker; False when the time passed first."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_connected.wait(), timeout_seconds)
        return self.is_connected

    def publish(
        self, topic: str, payload: Mapping[str, Any] | None, *, retain: bool = False
    ) -> None:
        """Leave a message for sending; returns at once, also when there is no broker.

        Retained messages are kept and sent again after each reconnect; the payload None clears the
        topic. The others wait in a bounded queue that drops the oldest (`dropped_messages`).
        """
        self._outbox.put(Outgoing(topic=topic, payload=encode_payload(payload), retain=retain))

    def watch_presence(self, callback: Callable[[Presence], None]) -> None:
        """Call `callback` for each change of a node's status, from `run`'s task; before `run`.

        A node that stays as it was is not reported again when the connection is made anew. Compare
        `start_id`: a will may arrive after its node has registered again with a new one.
        """
        if self._finished is not None:
            raise ConfigError("watch_presence was called after run: call it before")
        self._watch = PresenceWatch(callback, topics=self.topics)

    async def run(self) -> None:
        """Stay connected until `stop` or cancellation; both end with "offline" and no will.

        Ends within `stop_grace_seconds` of either (twice that when the broker does not answer), and
        raises nothing but the cancellation.
        """
        self._finished = asyncio.Event()
        worker = asyncio.create_task(self._keep_connected(), name=f"mqtt {self._client_id}")
        stop = asyncio.create_task(self._stopping.wait(), name=f"mqtt stop {self._client_id}")
        try:
            await asyncio.wait({worker, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            try:
                await self._wind_up(worker)
            finally:
                worker.cancel()
                self._finished.set()

    async def stop(self) -> None:
        """Send what waits, say "offline", disconnect; returns when `run` is about to end."""
        self._stopping.set()
        self._outbox.wake()
        if self._finished is not None:
            await self._finished.wait()

    async def _wind_up(self, worker: asyncio.Task[None]) -> None:
        self._stopping.set()
        self._outbox.wake()
        await asyncio.wait({worker}, timeout=self._limits.stop_grace_seconds)
        if not worker.done():
            logger.warning("mqtt did not stop in time", extra={"broker": str(self._address)})
            worker.cancel()
            await asyncio.wait({worker}, timeout=self._limits.stop_grace_seconds)

    async def _keep_connected(self) -> None:
        backoff = self._limits.min_backoff_seconds
        while not self._stopping.is_set():
            started = time.monotonic()
            try:
                await self._connection()
            except Exception as error:  # the root of this part: nothing of it may reach the caller
                self._report_failure(error, was_connected=self.is_connected)
            finally:
                self._is_connected.clear()
            # A connection that breaks at once (an id in use twice, say) must not reset the pause.
            if time.monotonic() - started > self._limits.max_backoff_seconds:
                backoff = self._limits.min_backoff_seconds
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, self._limits.max_backoff_seconds)

    async def _connection(self) -> None:
        """One connection from CONNECT to DISCONNECT; returns only for a stop, else raises."""
        client = self._new_client()
        try:
            await client.__aenter__()
        except BaseException:
            await _close_half_open(client)
            raise
        try:
            await self._exchange(client)
        finally:
            await self._leave(client)

    def _new_client(self) -> aiomqtt.Client:
        will = presence_payload("offline", start_id=self._start_id, reason="lost")
        return aiomqtt.Client(
            self._address.host,
            self._address.port,
            username=self._address.username,
            password=self._address.password,
            identifier=self._client_id,
            will=aiomqtt.Will(self._status_topic, will, qos=1, retain=True),
            timeout=self._limits.connect_timeout_seconds,
            keepalive=self._limits.keepalive_seconds,
            max_queued_incoming_messages=_MAX_INCOMING_MESSAGES,
            tls_context=ssl.create_default_context() if self._address.use_tls else None,
            logger=_client_logger,
        )

    async def _exchange(self, client: aiomqtt.Client) -> None:
        if self._watch is not None:
            await self._subscribe(client)
        self._outbox.resend_retained()
        async with asyncio.TaskGroup() as tasks:
            receiver = tasks.create_task(self._receive(client))
            await self._send(client)
            receiver.cancel()

    async def _subscribe(self, client: aiomqtt.Client) -> None:
        codes = await client.subscribe(self.topics.all_node_status, qos=1)
        # 0x80 and above: the broker refuses, and says so only here.
        if any((code if isinstance(code, int) else code.value) >= 0x80 for code in codes):
            logger.warning(
                "mqtt broker refuses the subscription", extra={"topic": self.topics.all_node_status}
            )

    async def _send(self, client: aiomqtt.Client) -> None:
        """Send until a stop; then what waits, for half of the grace: goodbye needs time too."""
        give_up_at: float | None = None
        while True:
            if give_up_at is None and self._stopping.is_set():
                give_up_at = time.monotonic() + self._limits.stop_grace_seconds / 2
            if give_up_at is not None and time.monotonic() > give_up_at:
                return
            message = self._outbox.take()
            if message is not None:
                await self._send_one(client, message)
            elif give_up_at is not None:
                return
            else:
                await self._outbox.wait()

    async def _send_one(self, client: aiomqtt.Client, message: Outgoing) -> None:
        # One at a time and acknowledged: what waits, waits in our outbox, which is bounded.
        try:
            await client.publish(message.topic, message.payload, qos=1, retain=message.retain)
        except BaseException:
            self._outbox.give_back(message)
            raise
        self._outbox.sent(message)
        if message.topic == self._status_topic and not self.is_connected:
            self._is_connected.set()
            self._is_failing = False
            logger.info("mqtt connected", extra={"broker": str(self._address)})

    async def _leave(self, client: aiomqtt.Client) -> None:
        """Say "offline", then DISCONNECT: that drops the will, so never one without the other."""
        client.timeout = self._patience()
        reason = "stopped" if self._stopping.is_set() else "lost"
        payload = presence_payload("offline", start_id=self._start_id, reason=reason)
        try:
            with contextlib.suppress(aiomqtt.MqttError):
                await client.publish(self._status_topic, payload, qos=1, retain=True)
        finally:
            await client.__aexit__(None, None, None)

    def _patience(self) -> float:
        """Deadline of an acknowledgement at the end: a fraction of the grace."""
        return min(self._limits.connect_timeout_seconds, self._limits.stop_grace_seconds / 5)

    async def _receive(self, client: aiomqtt.Client) -> None:
        async for message in client.messages:
            if self._watch is not None and isinstance(message.payload, bytes):
                self._watch.accept(message.topic.value, message.payload)

    def _report_failure(self, error: Exception, *, was_connected: bool) -> None:
        """Warn once for each outage; a broker that stays away is no news."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        is_news = was_connected or not self._is_failing
        self._is_failing = True
        logger.log(
            logging.WARNING if is_news else logging.DEBUG,
            "mqtt connection lost" if was_connected else "mqtt connection failed",
            extra={"broker": str(self._address), "why": f"{type(error).__name__}: {error}"},
        )


async def _close_half_open(client: aiomqtt.Client) -> None:
    """Close the socket of a connection that got no answer; aiomqtt leaves it to the keepalive."""
    client.timeout = 0.01
    with contextlib.suppress(aiomqtt.MqttError):
        await client.__aexit__(None, None, None)
