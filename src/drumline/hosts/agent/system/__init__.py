"""The machine under the agent: its files, its processes, its logs, and whether it goes down."""
