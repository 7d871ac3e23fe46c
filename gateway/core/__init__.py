"""Decisions: pure, synchronous, without I/O, clock or dice; time and randomness are arguments."""
