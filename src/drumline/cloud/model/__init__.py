"""The behaviour of the emulated cloud: requests, nodes, capacity, quota and errors. Pure."""
