"""Telemetry: one log line a call, and the gateway's Prometheus series."""

from gateway.telemetry.log import CallLog
from gateway.telemetry.metrics import Metrics

__all__ = ["CallLog", "Metrics"]
