"""Running a program on the hosts of a slice: connections, code, environment, and the agent."""
