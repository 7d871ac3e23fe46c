"""The HTTP face: what clients and operators talk to."""
