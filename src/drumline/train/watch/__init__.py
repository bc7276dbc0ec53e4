"""Is the hardware still right: spikes, replays, replicas compared, and how fast each host is."""
