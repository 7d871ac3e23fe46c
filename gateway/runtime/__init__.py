"""The composition root: configuration to parts, their life, and their end."""
