"""Versions: of the software, and of the protocol that peers speak."""

SOFTWARE_VERSION = "0.1.0"

PROTOCOL_MAJOR = 1
"""Peers of different majors refuse each other."""

PROTOCOL_MINOR = 0
"""A higher minor only adds fields that an older peer may ignore."""
