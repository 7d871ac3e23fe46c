"""Where quota counters live: in this process, or shared between gateways."""
