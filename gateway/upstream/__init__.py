"""HTTP to the engines of one pool: connections, relayed answers, endpoint choice, load and health."""
