"""What a call costs in the gateway itself, measured beside its peers on one machine and in one run."""
