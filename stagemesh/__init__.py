"""stagemesh: run and train models across the machines you have."""

from stagemesh.version import SOFTWARE_VERSION as __version__

__all__ = ["__version__"]
