"""How the cloud behaves: requests, nodes, capacity and quota, and what it says. Pure."""
