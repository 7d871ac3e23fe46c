"""Configuration: one YAML file in, one checked and frozen object out, or every mistake at once."""

from gateway.config.load import load, loads
from gateway.config.mistakes import ConfigError, Mistake
from gateway.config.schema import Config

__all__ = ["Config", "ConfigError", "Mistake", "load", "loads"]
