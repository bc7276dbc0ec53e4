"""The agent: what is pushed to each host and runs there."""
