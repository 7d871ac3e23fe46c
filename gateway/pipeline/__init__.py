"""The path of a request (path.py), in order."""
