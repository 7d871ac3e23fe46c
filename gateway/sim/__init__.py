"""A simulated vLLM engine: a step model without I/O and the HTTP face that serves it."""
