"""Tiergate: an OpenAI-compatible gateway in front of vLLM GPU pools."""

__version__ = "0.1.0"
