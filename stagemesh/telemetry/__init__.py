"""Presence and telemetry over MQTT; torch-free, and optional: nothing else waits for a broker.

`topics` names what is published where, `config` reads the broker's URL, `payload` is the JSON at
the edge, `outbox` holds what waits, `presence` remembers who is there, `publisher` moves it all.
docs/mqtt.md documents topics and payloads.
"""
